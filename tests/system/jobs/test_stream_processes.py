"""Real processes read their parts of a stream, and go on after they were killed."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from jobs import Job, tokens_seen, write_recipe
from resumable import RECIPE, read_metrics, train

STEPS = 24
MAP_STYLE = """    data = grain.MapDataset.range(512).map(example)
    if split == "validation":
        return data[:16]
    return data.seed(config.seed).shuffle().repeat()
"""
# Each process notes what it reads. Nothing is read by number.
STREAM = """    if split == "validation":
        return grain.MapDataset.range(16).map(example)

    def rows(part, parts):
        def read(i):
            if "READ" in os.environ:
                time.sleep(0.01)
                with open(f"{os.environ['READ']}-{jax.process_index()}", "a") as file:
                    file.write(f"{i}\\n")
            return example(i)

        numbers = grain.MapDataset.range(600)[part::parts].to_iter_dataset(
            grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        )
        shuffled = grain.experimental.WindowShuffleIterDataset(
            numbers, window_size=6, seed=part
        )
        return shuffled.map(read)

    return rows
"""
KEYS: dict[str, Any] = {
    "steps": STEPS,
    "eval_every": 0,
    "model__noise": 0,
    "checkpoint__every": 4,
}
WORDS = [f"--config.{k.replace('__', '.')}={v}" for k, v in KEYS.items()]


def streamed(recipe: str) -> str:
    assert MAP_STYLE in recipe
    return "import os\nimport time\n" + recipe.replace(MAP_STYLE, STREAM)


def start(folder: Path, count: int, seen: str) -> Job:
    (folder / seen).mkdir(exist_ok=True)
    devices = 8 // count
    env = {"SEEN": str(folder / seen), "READ": str(folder / f"{seen}-read")}
    words = [*WORDS, "--workdir=run", "--config.watch.silence=2"]
    return Job(folder, count, devices, *words, env=env)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run of two processes that nothing happened to: its batches and metrics."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_recipe(folder, streamed)
    with start(folder, 2, "seen") as job:
        assert job.wait(300) == [0, 0], job.err()
    seen = tokens_seen(folder / "seen")
    assert len(seen) == STEPS
    return seen, read_metrics(folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_killed_processes_go_on_where_they_were(count, undisturbed, tmp_path):
    seen, metrics = undisturbed
    write_recipe(tmp_path, streamed)
    with start(tmp_path, 2, "killed") as job:
        job.wait_for_step(tmp_path / "run", 10)
        for index in (0, 1):
            os.kill(job.worker(index), signal.SIGKILL)
        job.wait(60)
    saved = max(map(int, filter(str.isdigit, os.listdir(tmp_path / "run/checkpoints"))))
    assert 8 <= saved < STEPS
    with start(tmp_path, count, "seen") as job:
        assert job.wait(300) == [0] * count, job.err()
    assert tokens_seen(tmp_path / "seen") == seen[saved:]
    # No process has read what was trained on before, but for a window of the shuffle.
    for file in tmp_path.glob("seen-read-*"):
        assert min(map(int, file.read_text().split())) >= (saved * 8) - 2 * 6
    got = read_metrics(tmp_path / "run")
    assert [line["step"] for line in got] == list(range(1, STEPS + 1))
    if count == 2:
        assert got == metrics  # bit for bit
    for line, other in zip(got, metrics, strict=True):
        tokens = [name for name in line if name.startswith("token_")]
        assert [line[name] for name in tokens] == [other[name] for name in tokens]
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)
    note = (tmp_path / "run/notes.json").read_text()
    if count != 2:
        assert f"in 2 parts, read by {count} process(es)" in note
    else:
        assert "each process reads its part" in note


@pytest.mark.slow  # by default, data/test_streams
@pytest.mark.usefixtures("compiled_once")
def test_a_stream_goes_on_in_this_process_bit_for_bit(tmp_path, monkeypatch):
    recipe = streamed(RECIPE).replace("optax.adamw(", "optax.sgd(")
    keys: dict[str, Any] = KEYS | {"steps": 8, "policy__ema_decay": None}
    run = train(tmp_path, recipe=recipe, **keys)
    whole = read_metrics(run)
    shutil.rmtree(run / "checkpoints" / "8")
    monkeypatch.setenv("READ", str(tmp_path / "read"))
    train(tmp_path, recipe=recipe, **keys)
    assert read_metrics(run) == whole
    numbers = [int(x) for x in (tmp_path / "read-0").read_text().split()]
    # The first row is for its shapes; then it goes on after 4 steps of 8.
    assert min(numbers[2:]) >= 4 * 8 - 6
