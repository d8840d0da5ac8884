"""Whole runs of `python -m jshard.train`, as a user sees them."""

import json
import re
import sys
from pathlib import Path

import pytest

import jshard.train
from jshard.system.cli.machine.platform import has_cuda_plugin
from tiny_runs import RECIPE, expect_one_line, read_metrics

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def finished(train, tmp_path_factory):
    """A run with nothing but its recipe given, and its folder."""
    folder = tmp_path_factory.mktemp("finished")
    env = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        # On a fast machine none of its programs takes the tenth of a second from which
        # they are kept.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    run = train(folder, "--config=tiny.py", env=env)
    assert (run.returncode, run.stderr) == (0, "")
    (workdir,) = (folder / "runs").iterdir()
    return run, workdir


def without_times(metrics):
    times = {"time", "time_to_first_step", "step_time", "examples_per_second"}
    times |= {"data_wait", "collect_time"}
    # A checkpoint's files hold times too, as text.
    times |= {"checkpoint_blocked", "checkpoint_write_time", "checkpoint_bytes"}
    return [{k: v for k, v in line.items() if k not in times} for line in metrics]


# Runs that succeed.


@pytest.mark.core
def test_a_run_leaves_config_metrics_events_notes_and_a_report(finished):
    _, workdir = finished
    assert sorted(p.name.split(".")[0] for p in workdir.glob("[!.]*")) == [
        "attempts",
        "checkpoints",
        "config",
        "events",
        "metrics",
        "notes",
        "report",
    ]
    assert json.loads((workdir / "config.json").read_text())["steps"] == 6
    assert r"&lt;1&gt;\x1b[2J" in (workdir / "report.html").read_text()  # the sample


def test_a_line_of_metrics_says_what_its_step_did_and_how_fast(finished):
    _, workdir = finished
    metrics = read_metrics(workdir)
    assert [line["step"] for line in metrics] == [1, 2, 3, 3, 4, 5, 6, 6, 6]
    for line in metrics:
        line.pop("collect_time", None)  # where Python collected garbage
    first, second, *_, last, evaluation, checkpoint = metrics
    names = ["step", "time", "loss", "grad_norm", "learning_rate", "examples_seen"]
    names += ["epoch"]
    assert list(first) == [*names, "time_to_first_step"]
    assert list(second) == [*names, "step_time", "examples_per_second", "data_wait"]
    assert list(evaluation) == ["step", "time", "eval_loss"]
    saved = ["checkpoint_blocked", "checkpoint_write_time", "checkpoint_bytes"]
    assert list(checkpoint) == ["step", "time", *saved]
    assert last["loss"] < first["loss"] / 2
    assert last["learning_rate"] == pytest.approx(0.05)  # of the sixth update
    assert first["time_to_first_step"] > 0.5  # importing JAX takes longer


def test_a_run_that_is_not_in_a_terminal_prints_one_plain_line_for_each_log(finished):
    run, workdir = finished
    lines = run.stdout.splitlines()
    assert not any("\x1b" in line for line in lines)
    steps = [line.split()[1] for line in lines if line.startswith("step ")]
    assert steps == [f"{step}/6" for step in (1, 2, 3, 3, 4, 6, 6, 6)]
    assert lines[lines.index("sample:") + 1] == r"<1>\x1b[2J"
    assert lines[-1].endswith(f"report: runs/{workdir.name}/report.html")


def test_without_a_workdir_the_runs_folder_is_named_after_recipe_and_time(finished):
    _, workdir = finished
    assert re.fullmatch(r"tiny-\d{8}-\d{6}", workdir.name)


def test_compiled_programs_are_kept_for_the_next_run(finished):
    _, workdir = finished
    assert any((workdir.parents[1] / "programs").iterdir())


@pytest.mark.slow
def test_the_same_seed_gives_bitwise_the_same_metrics_and_another_seed_others(
    finished, train, tmp_path
):
    _, workdir = finished
    for seed in ("0", "1"):
        train(tmp_path, "--config=tiny.py", f"--config.seed={seed}", "--workdir", seed)
    first, same, other = (
        without_times(read_metrics(folder))
        for folder in (workdir, tmp_path / "0", tmp_path / "1")
    )
    assert first == same
    assert first != other


def test_a_cpu_run_has_as_many_devices_as_the_recipe_says(finished):
    _, workdir = finished
    notes = json.loads((workdir / "notes.json").read_text())
    assert notes["references"] == {"devices": 2}
    assert notes["changed"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "env", "devices"),
    [
        (["--config.mesh.cpu_devices=4"], {}, 4),
        ([], {"JAX_NUM_CPU_DEVICES": "1"}, 1),
        ([], {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}, 1),
    ],
)
def test_a_cpu_run_has_as_many_devices_as_it_is_told(
    words, env, devices, train, tmp_path
):
    short = ["--config.steps=1", "--config.eval_every=0"]
    run = train(tmp_path, "--config=tiny.py", "--workdir=run", *short, *words, env=env)
    assert (run.returncode, run.stderr) == (0, "")
    notes = json.loads((tmp_path / "run/notes.json").read_text())
    assert notes["references"] == {"devices": devices}
    assert {"steps", "eval_every"} <= set(notes["changed"])


def test_help_lists_a_packaged_recipes_keys_and_trains_nothing(
    tmp_path, monkeypatch, capsys
):
    """In a folder that has its own models."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models/__init__.py").touch()
    (tmp_path / "models/gpt.py").write_text("raise ImportError('the wrong models')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("warnings.formatwarning", None)
    monkeypatch.setattr(sys, "argv", ["jshard.train", "--config=gpt.py", "--help"])
    jshard.train.main()
    out, err = capsys.readouterr()
    assert "--config.model.num_heads=" in out
    assert "--config.mesh.fsdp=-1\n" in out
    assert err == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_packaged_recipe_runs_in_a_folder_that_has_its_own_models(train, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models/__init__.py").touch()
    (tmp_path / "models/gpt.py").write_text("raise ImportError('the wrong models')")
    run = train(tmp_path, "--config=gpt.py", "--help")
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_a_warning(train, tmp_path):
    env = {"JAX_COMPILATION_CACHE_DIR": "/dev/null/programs"}
    run = train(tmp_path, "--config=tiny.py", "--config.steps=1", env=env)
    assert run.returncode == 0
    (line,) = run.stderr.splitlines()
    assert line.startswith("jshard: warning: compiled programs are not cached")


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or any(Path("/dev").glob("nvidia*")),
    reason="about machines without a GPU",
)
def test_a_gpu_plugin_is_not_heard_of_on_a_machine_without_a_gpu(train, tmp_path):
    # As the CUDA plugin does, which raises unless other platforms were asked for.
    plugin = tmp_path / "plugins/jax_plugins/fake/__init__.py"
    plugin.parent.mkdir(parents=True)
    plugin.write_text(
        "import jax\n"
        "def initialize():\n"
        "    if not jax.config.jax_platforms: raise RuntimeError('no GPU')\n"
    )
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path / 'plugins'}", "JAX_PLATFORMS": ""}
    run = train(tmp_path, "--config=tiny.py", "--config.steps=1", env=env)
    said = "jshard: note: a CUDA plugin is installed but cannot be used (no GPU is "
    said += "visible, not even as /dev/nvidia0): computing on the CPU\n"
    assert (run.returncode, run.stderr) == (0, said if has_cuda_plugin() else "")


# Bad input: exit 2, and one line.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config=nosuch.py"], "no recipe 'nosuch.py': looked for"),
        pytest.param(
            *(["--config.stepz=3"], "did you mean steps?"), marks=pytest.mark.core
        ),
        pytest.param(
            *(["--config.steps=three"], "--config.steps=three: must be a whole number"),
            marks=pytest.mark.core,
        ),
        (["--config.batch_size=7"], "7 examples is not divisible by 8 devices"),
        (["--config.policy.accumulate=3"], "not divisible by 8 devices x 3"),
        (["--config.mesh.fsdp=9"], "needs 9 devices but there are 8"),
        pytest.param(
            *(["--config.data.path=nosuch"], "nosuch: no such file or folder"),
            marks=pytest.mark.core,
        ),
        (["--config.data.path=empty.txt"], "empty.txt: the file is empty"),
        (["--config.data.path=short.txt"], "sequence_length=8"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, said, train_here, tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("short")
    expect_one_line(train_here(tmp_path, "--config=tiny.py", *words), 2, said)


@pytest.mark.quick("return jshard.Mean")
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def loss_fn", "def loss", "lacks the function loss_fn()"),
        ("return jshard.Mean(", "return jnp.maximum(", "loss_fn returned"),
        ("return nnx.Sequential(", "return nnx.Dropout(0.5) or (", "no parameters"),
    ],
)
def test_a_bad_recipe_is_one_line_and_exit_code_2(old, new, said, train_here, tmp_path):
    recipe = RECIPE.replace(old, new, 1)
    expect_one_line(train_here(tmp_path, "--config=tiny.py", recipe=recipe), 2, said)


@pytest.mark.slow
def test_a_recipe_that_computes_while_it_is_imported_is_one_line(train, tmp_path):
    recipe = RECIPE.replace("import jshard\n", "jnp.ones(3)\nimport jshard\n", 1)
    run = train(tmp_path, "--config=tiny.py", recipe=recipe)
    expect_one_line(run, 2, "while it is imported")
