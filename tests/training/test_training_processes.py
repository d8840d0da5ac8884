"""Runs of several processes: stopped, and gone on with by as many or by others.

All have four devices in one mesh, so they compute the same but for the order in which
gradients are added up: losses agree to six digits, what was seen and saved exactly.
"""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jshard
from failures import WORDS
from jobs import Job, write_recipe
from jshard.recipe.source import Source
from jshard.storage.checkpoint import metadata
from jshard.storage.checkpoint.restore import CHECKPOINTS, find_damage
from jshard.storage.checkpoint.step_folders import find_steps
from jshard.system.errors import Preempted
from jshard.training.callbacks.saving import Saving
from processes import Processes
from resumable import read_metrics, train

STEPS = 16
CLOSE = 1e-6  # relative: a few roundings of float32


def gathered(state: jshard.TrainState) -> dict[str, np.ndarray]:
    """Whole arrays by name; of random keys their data."""
    arrays = {
        name: jax.random.key_data(array)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        else array
        for name, array in metadata.arrays_by_name(state).items()
    }
    everywhere = NamedSharding(state.step.sharding.mesh, P())  # type: ignore[union-attr]
    return jax.device_get(jax.jit(lambda x: x, out_shardings=everywhere)(arrays))


def record(
    folder: Path, stop_at: int = 0, victim: int = 0, pause: float = 0.0
) -> dict[str, Any]:
    """Trains, or goes on; returns what this process saw, saved and restored.

    Args:
      folder: of the run's folder, ``run``.
      stop_at: where ``victim`` sends SIGTERM to itself, steps from the start here; 0
        is never.
      victim: which process.
      pause: seconds before each step.
    """
    seen: dict[str, Any] = {"tokens": [], "saved": {}, "restored": None, "end": ""}
    shard_batch, save = jshard.FSDP.shard_batch, Saving.save
    restore = Source.restore

    def sharding(fsdp: jshard.FSDP, batch: Any) -> Any:
        seen["tokens"].append(batch["tokens"])
        time.sleep(pause)
        if len(seen["tokens"]) == stop_at and jax.process_index() == victim:
            os.kill(os.getpid(), signal.SIGTERM)
        return shard_batch(fsdp, batch)

    def saving(self: Saving, step: int, *args: Any) -> None:
        seen["saved"][step] = gathered(self._run.state)
        save(self, step, *args)

    def restoring(self: Source, abstract: jshard.TrainState) -> jshard.TrainState:
        state = restore(self, abstract)
        seen["restored"] = gathered(state)
        return state

    own = folder / f"recipe-{jax.process_index()}"  # each writes its file
    own.mkdir(exist_ok=True)
    with (
        mock.patch.object(jshard.FSDP, "shard_batch", sharding),
        mock.patch.object(Saving, "save", saving),
        mock.patch.object(Source, "restore", restoring),
    ):
        try:
            train(
                own, str(folder / "run"), steps=STEPS, eval_every=0, checkpoint__every=8
            )
        except Preempted as preempted:
            seen["end"] = str(preempted)
    return seen


def tokens_of(results: list[dict[str, Any]]) -> list[np.ndarray]:
    """The global batch of each step: the rows of the processes in order."""
    steps = zip(*(result["tokens"] for result in results), strict=True)
    return [np.concatenate(parts) for parts in steps]


def stopped_at(results: list[dict[str, Any]]) -> int:
    """The one step that all processes stopped after."""
    ends = [re.search(r"at step (\d+): saved", result["end"]) for result in results]
    (step,) = {int(end[1]) if end else None for end in ends}
    assert step is not None, results
    return step


def check_equal(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """Bit for bit; the optimizer's state is there."""
    assert got.keys() == want.keys()
    assert sum(name.startswith("opt_state") for name in want) > 6
    for name, array in want.items():
        assert got[name].dtype == array.dtype, name
        np.testing.assert_array_equal(got[name], array, err_msg=name)


def check_metrics(run: Path, whole: Path) -> None:
    got, want = read_metrics(run), read_metrics(whole)
    assert [line["step"] for line in got] == list(range(1, STEPS + 1))
    for line, other in zip(got, want, strict=True):
        assert line.keys() == other.keys()
        for name, value in line.items():
            exact = name.startswith(("token_", "step", "learning_rate"))
            assert value == pytest.approx(other[name], rel=0 if exact else CLOSE), name


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Any:
    """One process with four devices."""
    with Processes(1, 4, tmp_path_factory.mktemp("single")) as processes:
        yield processes


@pytest.fixture(scope="module")
def whole(single, tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """The uninterrupted run of one process."""
    folder = tmp_path_factory.mktemp("whole")
    results = single.call(record, folder)
    assert len(results[0]["tokens"]) == STEPS
    return folder / "run", results


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_in_two_is_stopped_there_and_ends_in_one(
    single, whole, tmp_path
):
    """SIGTERM to one of two processes stops both, after the same step."""
    run, uninterrupted = whole
    first = single.call(record, tmp_path, stop_at=3)
    step = stopped_at(first)
    with Processes(2, 2, tmp_path) as pair:
        # Slow steps: processes agree in about a second.
        second = pair.call(record, tmp_path, stop_at=2, victim=1, pause=0.3)
    last = stopped_at(second)
    assert step + 2 <= last < STEPS
    assert find_steps(tmp_path / "run" / CHECKPOINTS)[-1] == last
    assert not find_damage(tmp_path / "run" / CHECKPOINTS / str(last))
    for result in second:
        assert "saved; run the same command" in result["end"]
        check_equal(result["restored"], first[0]["saved"][step])

    third = single.call(record, tmp_path)
    check_equal(third[0]["restored"], second[0]["saved"][last])
    seen = [*tokens_of(first), *tokens_of(second), *tokens_of(third)]
    np.testing.assert_array_equal(seen, tokens_of(uninterrupted))
    check_metrics(tmp_path / "run", run)
    notes = json.loads((tmp_path / "run" / "notes.json").read_text())
    assert notes["resumed"] == [step, last]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [((1, 4), (2, 2)), ((2, 2), (4, 1))],
    ids=str,
)
def test_a_killed_run_goes_on_in_other_processes(
    before: tuple[int, int], after: tuple[int, int], whole, tmp_path
):
    run, uninterrupted = whole
    folder = tmp_path / "run" / CHECKPOINTS
    with Processes(*before, tmp_path) as processes:
        processes.start(record, tmp_path, pause=0.2)
        deadline = time.monotonic() + 60
        while not find_steps(folder):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)
        processes.kill()
    step = find_steps(folder)[-1]
    assert 0 < step < STEPS
    with Processes(*after, tmp_path) as processes:
        results = processes.call(record, tmp_path)
    np.testing.assert_array_equal(tokens_of(results), tokens_of(uninterrupted)[step:])
    check_metrics(tmp_path / "run", run)


REFERENCES = """

def references(config):
    with open("references", "a") as file:
        file.write(f"process {jax.process_index()}\\n")
    return {"mine": 1.25}
"""


@pytest.mark.slow
def test_references_are_made_by_process_0_alone(tmp_path):
    write_recipe(tmp_path, lambda recipe: recipe + REFERENCES)
    with Job(
        tmp_path, 2, 1, *WORDS, "--config.steps=2", "--config.eval_every=1"
    ) as job:
        assert job.wait() == [0, 0], job.err()
    assert (tmp_path / "references").read_text() == "process 0\n"
    assert "mine 1.2500" in job.out(0)
    notes = json.loads((tmp_path / "run" / "notes.json").read_text())
    assert notes["references"] == {"mine": 1.25}
