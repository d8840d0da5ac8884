"""Saves that die at any of their system calls lose nothing, whatever they replace."""

import contextlib
import dataclasses
import functools
import multiprocessing
import random
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
import known_states
from checkpoints import at_step, values
from jshard.storage.checkpoint.checkpointer import Checkpointer, Save
from jshard.storage.checkpoint.restore import find_damage, newest_intact, restore_state
from jshard.storage.checkpoint.step_folders import find_steps, step_folder
from processes import Processes
from system_calls import compile_library, watch

OPTIMIZER = optax.sgd(1e-2)
OLD, NEW = 0, 1  # seeds of the values


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A save into a folder that holds checkpoints, with `loss` |step - 1|."""

    before: tuple[int, ...]
    step: int
    options: dict = dataclasses.field(default_factory=dict)
    deleted: tuple[int, ...] = ()


SCENARIOS = {
    "a new step": Scenario((1,), 2),
    "the first step": Scenario((), 1),
    "a step that exists": Scenario((1, 2), 2),
    "the only step, which exists": Scenario((2,), 2),
    "one that the new one makes superfluous": Scenario(
        (1,), 2, {"keep": 1}, deleted=(1,)
    ),
    "a step that exists among superfluous ones": Scenario(
        (1, 2, 3), 3, {"keep": 1}, deleted=(1, 2)
    ),
    "one that is no longer the newest, nor the best": Scenario(
        (1, 2), 3, {"keep": 1, "best": "loss"}, deleted=(2,)
    ),
}


def make_fsdp() -> jshard.FSDP:
    mesh = jshard.make_mesh(fsdp=jax.process_count(), devices=_devices())
    return jshard.FSDP(mesh, jshard.Policy(min_shard_elements=0))


def _devices() -> list[Any]:
    """The first of each process: the tests' own has more."""
    return [jax.local_devices(process_index=p)[0] for p in range(jax.process_count())]


def make_model(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Linear(8, 8, rngs=rngs)


@functools.cache
def abstract() -> jshard.TrainState:
    return make_fsdp().abstract_state(make_model, OPTIMIZER)


@functools.cache
def make_state(seed: int, step: int) -> jshard.TrainState:
    return at_step(known_states.make_state(abstract(), seed), step)


def save(folder: Path, seed: int, steps: Iterable[int], **options) -> list[Save]:
    reports: list[Save] = []
    with Checkpointer(folder, report=reports.append, **options) as checkpointer:
        for step in steps:
            state = make_state(seed, step)
            checkpointer.save(state, metrics={"loss": abs(step - 1)})
    return reports


def save_watched(name: str, folder: Path, **watching) -> int:
    """Prepares a scenario's folder, and saves; returns the number of system calls."""
    scenario = SCENARIOS[name]
    save(folder, OLD, scenario.before, keep=9)
    make_state(NEW, scenario.step)
    with watch(folder, **watching) as calls:
        (report,) = save(folder, NEW, [scenario.step], **scenario.options)
    assert not report.error
    return calls[0]


def check_left(name: str, folder: Path) -> None:
    """What is left of a save is whole, and nothing is lost."""
    scenario = SCENARIOS[name]
    before = shutil.copytree(folder, folder.with_name(f"{folder.name}-before"))
    for looking in (before, folder):
        if looking == folder:
            checkpointer = Checkpointer(folder)
            found = checkpointer.steps()
            assert sorted(p.name for p in folder.iterdir()) == list(map(str, found))
            assert not list(folder.glob("*/.*"))
        found = find_steps(looking)  # also by who only reads, and tidies nothing
        assert {*scenario.before} - {*scenario.deleted} <= {*found}
        assert {*found} <= {*scenario.before, scenario.step}
        if not {*scenario.before} <= {*found}:
            assert scenario.step in found
        if found:
            assert newest_intact(looking) == step_folder(looking, found[-1])
        for step in found:
            check_step(step_folder(looking, step), step, scenario)
    save(folder, NEW, [scenario.step], **scenario.options)  # and life goes on
    kept = {*scenario.before, scenario.step} - {*scenario.deleted}
    assert sorted(p.name for p in folder.iterdir()) == sorted(map(str, kept))


def check_step(path: Path, step: int, scenario: Scenario) -> None:
    """A step is whole, and all of it is old or all of it is new."""
    assert find_damage(path) == ""
    restored = values(restore_state(path, abstract()))
    seeds = [OLD] * (step in scenario.before) + [NEW] * (step == scenario.step)
    wanted = [values(make_state(seed, step)) for seed in seeds]
    assert any(
        all(np.array_equal(restored[name], want[name]) for name in restored)
        for want in wanted
    )


def check_copies(name: str, copies: Path, calls: int) -> None:
    """Checks those copies that differ in more than what is being written or deleted."""
    found = [path for path in copies.iterdir() if path.is_dir()]
    assert len(found) == calls
    distinct = {tuple(files_that_count(copy)): copy for copy in found}
    for copy in distinct.values():
        check_left(name, copy)


def files_that_count(folder: Path) -> Iterator[tuple[str, int]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if not name.parts[0].endswith((".saving", ".deleting")):
            yield str(name), path.stat().st_size
        elif len(name.parts) == 1:
            yield str(name), 0


# Copies of the folder at every call, of one process and of two.


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return compile_library(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def preloaded(library, tmp_path_factory) -> Iterator[Callable[[int], Processes]]:
    """Starts one process, or two that work together, that preload the library."""
    folder = tmp_path_factory.mktemp("preloaded")
    with contextlib.ExitStack() as started:

        @functools.cache
        def start(count: int) -> Processes:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("LD_PRELOAD", str(library))
                return started.enter_context(Processes(count, 1, folder))

        yield start


@pytest.mark.quick("1-one that is no")
@pytest.mark.parametrize(
    ("processes", "name"),
    [
        *((1, name) for name in SCENARIOS),
        (2, "a new step"),
        (2, "a step that exists among superfluous ones"),
    ],
)
def test_a_save_leaves_whole_checkpoints_at_every_system_call(
    processes, name, preloaded, tmp_path
):
    (tmp_path / "copies").mkdir()
    calls = preloaded(processes).call(
        save_watched, name, tmp_path / "checkpoints", copies=tmp_path / "copies"
    )
    assert min(calls) > 10
    check_copies(name, tmp_path / "copies", sum(calls))


def tidy_watched(folder: Path, copies: Path) -> int:
    with watch(folder, copies=copies) as calls:
        assert Checkpointer(folder).steps() == [1, 2]
    return calls[0]


@pytest.mark.quick("False")
@pytest.mark.parametrize("replacement", [True, False])
def test_the_next_start_may_die_too_at_every_system_call(
    replacement, preloaded, tmp_path
):
    name, folder = "a step that exists", tmp_path / "checkpoints"
    save(folder, OLD, SCENARIOS[name].before)
    shutil.copytree(folder / "2", folder / "2.saving")
    shutil.copytree(folder / "1", folder / "0.deleting")
    if replacement:
        shutil.copytree(folder / "2", folder / "2.replaced")
    else:
        (folder / "2").rename(folder / "2.replaced")
    (tmp_path / "copies").mkdir()
    (calls,) = preloaded(1).call(tidy_watched, folder, tmp_path / "copies")
    check_copies(name, tmp_path / "copies", calls)


# Processes that die at a call.


def check_death(name: str, folder: Path, call: int) -> bool:
    """Dies at a call of a scenario's save; returns False where there are fewer."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    process = processes.Process(
        target=save_watched, args=(name, folder), kwargs={"die_at": call}
    )
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    check_left(name, folder)
    return process.exitcode != 0


@pytest.mark.slow  # by default, test_promises
@pytest.mark.parametrize("call", range(3, 60, 20))
def test_a_save_that_dies_at_a_system_call_loses_nothing(
    call, library, tmp_path, monkeypatch
):
    monkeypatch.setenv("LD_PRELOAD", str(library))
    assert check_death("the only step, which exists", tmp_path / "c", call)


@pytest.mark.slow
def test_a_save_that_dies_at_any_system_call_loses_nothing(
    library, tmp_path, monkeypatch
):
    """An eighth of them, others each time."""
    monkeypatch.setenv("LD_PRELOAD", str(library))
    call = 1
    while check_death("the only step, which exists", tmp_path / str(call), call):
        call += random.randint(4, 12)
    assert call > 60
