"""Python's garbage collector in a run: at the same steps, and as it was afterwards."""

import gc
import os

import pytest

from jshard.training.callbacks.collection import Collection
from jshard.training.run.account import Account
from test_trainer import make


@pytest.fixture(autouse=True)
def _own_collector():
    """The suite has frozen objects; here none are, as in a program."""
    frozen, enabled = gc.get_freeze_count(), gc.isenabled()
    gc.unfreeze()
    yield
    (gc.enable if enabled else gc.disable)()
    if frozen:
        gc.freeze()


def state() -> tuple[bool, bool, int]:
    return gc.isenabled(), bool(gc.get_freeze_count()), len(gc.callbacks)


def test_a_run_collects_at_its_steps_alone_and_leaves_the_collector_as_it_was(tmp_path):
    before, seen, ran = state(), [], []

    def spy(phase, info):
        if phase == "stop" and info["generation"] == 2:
            ran.append(True)

    def on_step(trainer, step, metrics):
        seen.append((step, gc.isenabled(), gc.get_freeze_count() > 0, len(ran)))
        if step == 7:
            raise OSError("a hook failed")

    gc.callbacks.append(spy)
    try:
        with pytest.raises(OSError, match="a hook failed"):
            make(tmp_path, config={"collect_every": 3}, on_step=on_step).fit()
    finally:
        gc.callbacks.remove(spy)
    assert state() == before
    assert all((not enabled, frozen) == (True, True) for _, enabled, frozen, _ in seen)
    first = seen[0][3]
    counts = [count - first for *_, count in seen]
    assert counts == [0, 0, 1, 1, 1, 2, 2]  # after steps 3 and 6


@pytest.mark.parametrize("every", [0, 5])
def test_what_the_program_set_stays(every):
    gc.disable()
    gc.freeze()
    frozen = gc.get_freeze_count()
    with Collection(every, Account(0.0)) as collection:
        for step in range(1, 7):
            collection.after_step(step)
    assert not gc.isenabled()
    assert gc.get_freeze_count() >= frozen - 1000 > 0  # not unfrozen


def test_every_collection_is_timed_whoever_began_it():
    with Collection(0, Account(0.0)) as collection:
        collection.after_step(1)
        assert gc.isenabled()
        gc.collect()
        assert collection.take() > 0
        assert collection.take() == 0


@pytest.mark.filterwarnings("ignore:os.fork")
def test_what_a_run_forks_collects_by_itself():
    gc.enable()
    with Collection(5, Account(0.0)) as collection:
        collection.after_step(1)
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.write(write, b"1" if gc.isenabled() else b"0")
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 1) == b"1"
        assert not gc.isenabled()
    os.close(read)
    os.close(write)
