"""Runs of `python -m jshard.train` that end badly, as a user sees them."""

import os
import re
import signal
import subprocess
import threading
import time

import pytest

from jshard.storage.checkpoint.restore import find_damage
from tiny_runs import RECIPE, expect_one_line, read_metrics

pytestmark = pytest.mark.usefixtures("compiled_once")


def test_a_loss_that_is_not_finite_stops_the_run_with_its_step(train_here, tmp_path):
    run = train_here(
        tmp_path,
        "--config=tiny.py",
        "--workdir=run",
        "--config.nan_at_step=5",
        "--config.log_every=3",
        "--config.eval_every=0",
    )
    expect_one_line(run, 1, "the loss is nan at step 5")
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[-1]["loss"] is None
    assert (tmp_path / "run/report.html").exists()


@pytest.fixture
def send_in_training(tmp_path):
    """Sends this process a signal when a run in a folder there has its first line.

    A run whose process would ignore the signal, as a shell's background job ignores
    Ctrl-C, would be deaf to it.
    """
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(kind, signal.default_int_handler) for kind in kinds]
    threads = []

    def wait_and_send(number):
        metrics = tmp_path / "run/metrics.jsonl"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if metrics.exists() and metrics.stat().st_size:
                return os.kill(os.getpid(), number)
            time.sleep(0.01)

    def send(number):
        threads.append(threading.Thread(target=wait_and_send, args=[number]))
        threads[-1].start()

    yield send
    for thread in threads:
        thread.join()
    for kind, handler in zip(kinds, before, strict=True):
        signal.signal(kind, handler)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, marks=pytest.mark.core),
        # By default test_preemption.py sends each signal.
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_the_first_signal_lets_the_run_save_and_exit_75(
    number, send_in_training, train_here, tmp_path
):
    keys = {"steps": 5000, "log_every": 5000, "eval_every": 0}
    words = [f"--config.{key}={value}" for key, value in keys.items()]
    send_in_training(number)
    run = train_here(tmp_path, "--config=tiny.py", "--workdir=run", *words)
    name = number.name
    said = (
        rf"jshard: {name}: finishing the step and saving; "
        r"a second signal exits at once\n"
        rf"jshard: (?:interrupted by )?{name} at step (\d+): saved; .* to resume\n"
    )
    ended = re.fullmatch(said, run.stderr)
    assert run.returncode == 75
    assert ended, run.stderr
    lines = read_metrics(tmp_path / "run")
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == list(range(1, int(ended[1]) + 1))
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == [
        ended[1]
    ]
    assert not find_damage(tmp_path / "run/checkpoints" / ended[1])
    assert (tmp_path / "run/report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            [],
            75,
            r"jshard: SIGINT: finishing the step .*\n"
            r"jshard: interrupted by SIGINT at step \d+: saved; .*\n",
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
    _, ours, rest = stderr.partition("jshard: ")  # a CUDA plugin may speak before
    assert re.fullmatch(said, ours + rest)
    assert [line["step"] for line in read_metrics(tmp_path / "run")][:2] == [1, 2]
    assert (tmp_path / "run/report.html").exists()


def test_an_error_that_is_nobodys_mistake_keeps_its_traceback(train_here, tmp_path):
    recipe = RECIPE.replace("(config):", "(config):\n    1 / 0")
    run = train_here(tmp_path, "--config=tiny.py", recipe=recipe)
    assert run.returncode == 1
    assert "ZeroDivisionError" in run.stderr


@pytest.mark.quick("error")
@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("error = model(", "error = missing(", "loss_fn"),
        (
            'map(lambda row: {"x": row})',
            'map(lambda row: {"x": row / missing})',
            r"make_data.<locals>.<lambda>",
        ),
        (
            "return optax.linear_schedule(0.1, 0.0, 10)",
            "return lambda step: missing",
            "learning_rate.<locals>.<lambda>",
        ),
        ('f"<{len(row)}>', 'f"<{missing}>', "sample.<locals>.<lambda>"),
    ],
)
def test_an_error_of_the_users_function_shows_its_lines_and_exits_1(
    old, new, name, train_here, tmp_path
):
    assert old in RECIPE
    short = ["--config.steps=1", "--config.eval_every=0"]
    recipe = RECIPE.replace(old, new, 1)
    run = train_here(tmp_path, "--config=tiny.py", *short, recipe=recipe)
    assert run.returncode == 1
    *lines, last = run.stderr.splitlines()
    assert last.startswith(f"jshard: error: {name}() failed at {tmp_path}/tiny.py:")
    assert last.endswith("NameError: name 'missing' is not defined")
    shown = [line for line in lines if line.startswith("  File ")]
    assert shown
    assert all("tiny.py" in line for line in shown)


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_ctrl_c_within_jax_is_no_bug(train_here, tmp_path):
    # JAX's C++ raises a ValueError from the KeyboardInterrupt of a comparison.
    raising = "(config):\n    raise ValueError('metadata') from KeyboardInterrupt()"
    run = train_here(
        tmp_path, "--config=tiny.py", recipe=RECIPE.replace("(config):", raising)
    )
    assert run.returncode == 130
    assert run.stderr == "jshard: error: interrupted\n"
