"""Whole runs of `python -m jshard.train`, as a user sees them."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPE = """\
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

import jshard
from jshard.training.text import text_data


def get_config():
    return ConfigDict(
        {
            "steps": 6,
            "batch_size": 16,
            "log_every": 2,
            "eval_every": 3,
            "nan_at_step": 0,
            "mesh": {"cpu_devices": 2},
            "data": {"path": ""},
        }
    )


def make_model(config, rngs):
    return nnx.Sequential(
        jshard.Unit(nnx.Linear(8, 64, rngs=rngs)),
        nnx.relu,
        nnx.Linear(64, 1, rngs=rngs),
    )


def learning_rate(config):
    return optax.linear_schedule(0.1, 0.0, 10)


def make_optimizer(config):
    return optax.sgd(learning_rate(config))


def loss_fn(model, batch):
    error = model(batch["x"])[:, 0] - batch["x"].sum(1)
    return jshard.Mean(jnp.sum(error**2), error.size)


def make_data(config, split):
    if config.data.path:
        return text_data(config.data.path, split, sequence_length=8, seed=config.seed)
    rows = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    data = grain.MapDataset.source(rows).map(lambda row: {"x": row})
    if split == "validation":
        return data[:32]
    bad = range(*(config.batch_size * (config.nan_at_step - i) for i in (1, 0)))
    return data.seed(config.seed).shuffle().repeat().map_with_index(
        lambda i, x: {"x": x["x"] * np.float32(np.nan if i in bad else 1)}
    )


def references(config):
    return {"devices": float(jax.device_count())}


def sample(config):
    prompts = np.ones((1, 8), np.float32)
    return lambda model, x: model(x), prompts, lambda row: f"<{len(row)}>\\x1b[2J"
"""


@pytest.fixture(scope="session")
def train(command):
    """Runs the command line to its end, with the recipe in `tiny.py`."""

    def run(folder, *words, recipe=RECIPE, **options):
        (folder / "tiny.py").write_text(recipe)
        return subprocess.run(timeout=120, **command(folder, *words, **options))

    return run


@pytest.fixture(scope="session")
def finished(train, tmp_path_factory):
    """A run with nothing but its recipe given, and its folder."""
    folder = tmp_path_factory.mktemp("finished")
    env = {"JAX_COMPILATION_CACHE_DIR": str(folder / "programs")}
    run = train(folder, "--config=tiny.py", env=env)
    assert (run.returncode, run.stderr) == (0, "")
    (workdir,) = (folder / "runs").iterdir()
    return run, workdir


def read_metrics(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def without_times(metrics):
    times = {"time_to_first_step", "step_time", "examples_per_second"}
    # A checkpoint's files hold times too, as text.
    times |= {"checkpoint_blocked", "checkpoint_write_time", "checkpoint_bytes"}
    return [{k: v for k, v in line.items() if k not in times} for line in metrics]


# Runs that succeed.


def test_a_run_leaves_config_metrics_events_notes_and_a_report(finished):
    _, workdir = finished
    assert sorted(p.name.split(".")[0] for p in workdir.glob("[!.]*")) == [
        "checkpoints",
        "config",
        "events",
        "metrics",
        "notes",
        "report",
    ]
    assert json.loads((workdir / "config.json").read_text())["steps"] == 6
    assert "&lt;1&gt;�[2J" in (workdir / "report.html").read_text()  # the sample


def test_a_line_of_metrics_says_what_its_step_did_and_how_fast(finished):
    _, workdir = finished
    metrics = read_metrics(workdir)
    assert [line["step"] for line in metrics] == [1, 2, 3, 3, 4, 6, 6, 6]
    first, second, *_, last, evaluation, checkpoint = metrics
    names = ["step", "loss", "grad_norm", "learning_rate"]
    assert list(first) == [*names, "time_to_first_step"]
    assert list(second) == [*names, "step_time", "examples_per_second"]
    assert list(evaluation) == ["step", "eval_loss"]
    saved = ["checkpoint_blocked", "checkpoint_write_time", "checkpoint_bytes"]
    assert list(checkpoint) == ["step", *saved]
    assert last["loss"] < first["loss"] / 2
    assert last["learning_rate"] == pytest.approx(0.05)  # of the sixth update
    assert first["time_to_first_step"] > 0.5  # importing JAX takes longer


def test_a_run_that_is_not_in_a_terminal_prints_one_plain_line_for_each_log(finished):
    run, workdir = finished
    lines = run.stdout.splitlines()
    assert not any("\x1b" in line for line in lines)
    steps = [line.split()[1] for line in lines if line.startswith("step ")]
    assert steps == [f"{step}/6" for step in (1, 2, 3, 3, 4, 6, 6, 6)]
    assert lines[lines.index("sample:") + 1] == "<1>�[2J"
    assert lines[-1].endswith(f"report: runs/{workdir.name}/report.html")


def test_without_a_workdir_the_runs_folder_is_named_after_recipe_and_time(finished):
    _, workdir = finished
    assert re.fullmatch(r"tiny-\d{8}-\d{6}", workdir.name)


def test_compiled_programs_are_kept_for_the_next_run(finished):
    _, workdir = finished
    assert any((workdir.parents[1] / "programs").iterdir())


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


@pytest.mark.parametrize(
    ("words", "env", "devices"),
    [
        ([], {}, 2),  # as get_config says
        pytest.param(["--config.mesh.cpu_devices=4"], {}, 4, marks=pytest.mark.slow),
        pytest.param([], {"JAX_NUM_CPU_DEVICES": "1"}, 1, marks=pytest.mark.slow),
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


def test_help_lists_the_recipes_keys_and_trains_nothing(train, tmp_path):
    run = train(tmp_path, "--config=tiny.py", "--help")
    assert (run.returncode, run.stderr) == (0, "")
    assert "--config.nan_at_step=0\n" in run.stdout
    assert "--config.mesh.fsdp=-1\n" in run.stdout
    assert not (tmp_path / "runs").exists()


def test_a_packaged_recipe_runs_in_a_folder_that_has_its_own_models(train, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models/__init__.py").touch()
    (tmp_path / "models/gpt.py").write_text("raise ImportError('the wrong models')")
    run = train(tmp_path, "--config=gpt.py", "--help")
    assert (run.returncode, run.stderr) == (0, "")


def test_a_cache_that_cannot_be_written_is_a_warning(train, tmp_path):
    env = {"JAX_COMPILATION_CACHE_DIR": "/dev/null/programs"}
    run = train(tmp_path, "--config=tiny.py", "--config.steps=1", env=env)
    assert run.returncode == 0
    (line,) = run.stderr.splitlines()
    assert line.startswith("jshard: warning: compiled programs are not kept")


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
    assert (run.returncode, run.stderr) == (0, "")


# Bad input: exit 2, and one line.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config=nosuch.py"], "no recipe 'nosuch.py': looked for"),
        (["--config.stepz=3"], "did you mean steps?"),
        pytest.param(
            ["--config.steps=three"],
            "--config.steps=three: expected a whole number",
            marks=pytest.mark.slow,
        ),
        (["--config.batch_size=7"], "7 examples does not divide"),
        pytest.param(
            ["--config.policy.accumulate=3"],
            "16 examples does not divide",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--config.mesh.fsdp=3"],
            "needs 3 devices but there are 2",
            marks=pytest.mark.slow,
        ),
        (["--config.data.path=nosuch"], "nosuch: no such file or folder"),
        pytest.param(
            ["--config.data.path=empty.txt"],
            "empty.txt: the file is empty",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--config.data.path=short.txt"],
            "sequence_length=8",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, said, train, tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("short")
    expect_one_line(train(tmp_path, "--config=tiny.py", *words), 2, said)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        pytest.param(
            "def loss_fn",
            "def loss",
            "lacks the function loss_fn()",
            marks=pytest.mark.slow,
        ),
        ("return jshard.Mean(", "return jnp.maximum(", "loss_fn returned"),
        pytest.param(
            "return nnx.Sequential(",
            "return nnx.Dropout(0.5) or (",
            "no parameters",
            marks=pytest.mark.slow,
        ),
        ("import jshard\n", "jnp.ones(3)\nimport jshard\n", "while it is imported"),
    ],
)
def test_a_bad_recipe_is_one_line_and_exit_code_2(old, new, said, train, tmp_path):
    recipe = RECIPE.replace(old, new, 1)
    expect_one_line(train(tmp_path, "--config=tiny.py", recipe=recipe), 2, said)


def expect_one_line(run, code, said):
    assert run.returncode == code, run.stderr
    (line,) = run.stderr.splitlines()
    assert line.startswith("jshard: error: ")
    assert said in line


# Runs that end badly.


def test_a_loss_that_is_not_finite_stops_the_run_with_its_step(train, tmp_path):
    run = train(
        tmp_path,
        "--config=tiny.py",
        "--workdir=run",
        "--config.nan_at_step=5",
        "--config.log_every=3",
        "--config.eval_every=0",
    )
    expect_one_line(run, 1, "the loss is nan at step 5")
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 3]
    assert (tmp_path / "run/report.html").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            [],
            75,
            r"jshard: SIGINT: finishing the step .*\n"
            r"jshard: SIGINT at step \d+: saved; .*\n",
        ),
        (["--config.checkpoint.every=0"], 130, "jshard: error: interrupted\n"),
    ],
)
def test_an_interrupted_run_saves_where_it_may_and_keeps_its_metrics(
    words, code, said, command, tmp_path
):
    (tmp_path / "tiny.py").write_text(RECIPE)
    options = command(
        tmp_path,
        "--config=tiny.py",
        "--workdir=run",
        "--config.steps=5000",
        "--config.eval_every=0",
        *words,
    )
    # A shell's background job, as the tests may be, would be deaf to Ctrl-C.
    listening = (
        "import runpy, signal; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('jshard.train', run_name='__main__')"
    )
    options["args"][1:3] = ["-c", listening]
    with subprocess.Popen(**options) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 2/"):
                break
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert re.fullmatch(said, stderr)
    assert [line["step"] for line in read_metrics(tmp_path / "run")][:2] == [1, 2]
    assert (tmp_path / "run/report.html").exists()


def test_an_error_that_is_nobodys_mistake_keeps_its_traceback(train, tmp_path):
    recipe = RECIPE.replace("(config):", "(config):\n    1 / 0")
    run = train(tmp_path, "--config=tiny.py", recipe=recipe)
    assert run.returncode == 1
    assert "ZeroDivisionError" in run.stderr


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("error = model(", "error = missing(", "loss_fn"),
        (
            'map(lambda row: {"x": row})',
            'map(lambda row: {"x": row / missing})',
            r"make_data.<locals>.<lambda>",
        ),
        pytest.param(
            "return optax.linear_schedule(0.1, 0.0, 10)",
            "return lambda step: missing",
            "learning_rate.<locals>.<lambda>",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *('f"<{len(row)}>', 'f"<{missing}>', "sample.<locals>.<lambda>"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_error_of_the_users_function_shows_its_lines_and_exits_1(
    old, new, name, train, tmp_path
):
    assert old in RECIPE
    short = ["--config.steps=1", "--config.eval_every=0"]
    recipe = RECIPE.replace(old, new, 1)
    run = train(tmp_path, "--config=tiny.py", *short, recipe=recipe)
    assert run.returncode == 1
    *lines, last = run.stderr.splitlines()
    assert last.startswith(f"jshard: error: {name}() failed at {tmp_path}/tiny.py:")
    assert last.endswith("NameError: name 'missing' is not defined")
    shown = [line for line in lines if line.startswith("  File ")]
    assert shown
    assert all("tiny.py" in line for line in shown)


def test_tokens_beyond_the_vocabulary_and_counts_of_nothing_are_told(train, tmp_path):
    words = ["--config=tiny.py", "--config.steps=1", "--config.eval_every=0"]
    embed = (
        "jshard.Unit(nnx.Linear(8, 64, rngs=rngs))",
        "jshard.Unit(nnx.Embed(64, 64, rngs=rngs))",
    )
    tokens = ('{"x": row}', '{"x": np.full(8, 64, np.int32)}')
    flat = ('model(batch["x"])[:, 0]', 'model(batch["x"]).sum((1, 2))')
    scaled = ('{"x": x["x"] * np.float32(np.nan if i in bad else 1)}', "x")
    recipe = RECIPE
    for old, new in (embed, tokens, flat, scaled):
        assert old in recipe
        recipe = recipe.replace(old, new)
    recipe = recipe.replace("def sample", "def no_sample")
    run = train(tmp_path, *words, recipe=recipe)
    said = "its batch has token 64 in 'x', and the model's embedding 'layers.0' has 64"
    expect_one_line(run, 1, f"the loss is nan at step 1: {said} rows")
    recipe = RECIPE.replace("error.size)", "0 * error.size)")
    expect_one_line(train(tmp_path, *words, recipe=recipe), 1, "step 1 counts nothing")


def test_wrong_returns_and_a_list_of_ragged_examples_are_one_line(train, tmp_path):
    recipe = RECIPE.replace("data.seed(config.seed)", "None and data.seed(0)")
    run = train(tmp_path, "--config=tiny.py", recipe=recipe)
    expect_one_line(run, 2, "make_data returned None for split 'train'")
    ragged = (
        "def make_data(config, split):\n    return [[1.0] * (i + 1) for i in range(99)]"
    )
    recipe = RECIPE.replace("def make_data(config, split):", ragged)
    run = train(tmp_path, "--config=tiny.py", recipe=recipe)
    expect_one_line(run, 2, "has several shapes in one batch")


def test_ctrl_c_within_jax_is_no_bug(train, tmp_path):
    # JAX's C++ raises a ValueError from the KeyboardInterrupt of a comparison.
    raising = "(config):\n    raise ValueError('metadata') from KeyboardInterrupt()"
    run = train(
        tmp_path, "--config=tiny.py", recipe=RECIPE.replace("(config):", raising)
    )
    assert run.returncode == 130
    assert run.stderr == "jshard: error: interrupted\n"
