"""The processes of a save tell each other what they wrote, and who has failed."""

import collections
import errno
import json
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jshard.storage.checkpoint import participants
from jshard.storage.checkpoint.buckets.objects import BucketError
from jshard.storage.checkpoint.participants import Participants, on_first, why


class Store:
    """JAX's key-value store, in this process."""

    spaces: dict[str, dict[str, str]] = collections.defaultdict(dict)  # noqa: RUF012

    def __init__(self, name: str):
        self.values, self.name = self.spaces[name], name

    def put(self, key: str, text: str) -> None:
        self.values[key] = text

    def get(self, key: str, patience: float) -> str:
        assert patience == participants._PATIENCE
        return self.values[key]

    def all_in(self, folder: str) -> dict[str, str]:
        found = self.values.items()
        return {k.partition("/")[2]: x for k, x in found if k.startswith(f"{folder}/")}

    def clear(self) -> None:
        self.spaces.pop(self.name, None)


@pytest.fixture(autouse=True)
def store(monkeypatch):
    monkeypatch.setattr(participants, "KeyValueStore", Store)
    Store.spaces.clear()
    return Store.spaces


@pytest.fixture
def member(monkeypatch):
    """Makes a participant of several."""

    def make(index: int, count: int = 3, number: int = 0) -> Participants:
        monkeypatch.setattr(jax, "process_index", lambda: index)
        monkeypatch.setattr(jax, "process_count", lambda: count)
        return Participants("saves", number)

    return make


def test_process_0_hears_what_all_wrote_in_their_order(member):
    member(2).end()  # says nothing: it has not failed
    first, second, third = member(0), member(1), member(2)
    for one in (second, third):
        one._store.put("end", "")
        assert one.gather({"wrote": one.index}) == []
    assert first.gather({"wrote": 0}) == [{"wrote": i} for i in range(3)]
    first.end()
    assert first._store.get("end", participants._PATIENCE) == ""
    assert first._store.all_in("failed") == {}


def test_a_process_that_fails_is_heard_by_all(member):
    first, second = member(0, 2), member(1, 2)
    second.end("no room")
    assert json.loads(second._store.values["1"]) == {"error": "no room"}
    with pytest.raises(OSError, match="failed on another process: no room"):
        first.gather({})
    first.end("no room")
    with pytest.raises(OSError, match="failed on another process: no room"):
        second.gather({})
    assert first._store.values["end"] == "no room"
    assert first._store.all_in("failed") == {"0": "no room", "1": "no room"}


def test_a_process_alone_talks_to_nobody(member, store):
    alone = member(0, 1)
    assert alone.gather({"a": 1}) == [{"a": 1}]
    alone.end("a problem")
    response: Any = SimpleNamespace(result=lambda: "written")
    assert alone.wait_for(response) == "written"
    assert not store


def test_process_0_forgets_the_save_before_the_last(member, store):
    for number in range(4):
        member(1, 2, number)._store.put("1", "x")
    member(1, 2, 4)
    assert {f"saves {n}" for n in range(4)} <= {*store}
    member(0, 2, 3)
    assert "saves 1" not in store
    assert store["saves 2"] == {"1": "x"}
    assert store["saves 0"] == {"1": "x"}


def test_arrays_are_waited_for_unless_another_process_has_failed(member, monkeypatch):
    monkeypatch.setattr(participants, "_POLL", 0.01)
    one, written = member(0, 2), threading.Event()
    response: Any = SimpleNamespace(result=lambda: written.wait(5))
    one._store.put("failed/1", "no room")
    with pytest.raises(OSError, match="failed on another process: no room"):
        one.wait_for(response)
    waiting = [t for t in threading.enumerate() if "wait" in t.name]
    assert all(thread.daemon for thread in waiting)
    one._store.values.clear()
    threading.Timer(0.05, written.set).start()
    since = time.monotonic()
    one.wait_for(response)
    assert written.is_set()
    assert time.monotonic() - since < 2

    def fail() -> None:
        raise OSError(errno.ENOSPC, "no room here")

    failing: Any = SimpleNamespace(result=fail)
    with pytest.raises(OSError, match="no room here"):
        one.wait_for(failing)


def test_what_process_0_cannot_do_fails_on_all(monkeypatch):
    told: list[int] = []

    def broadcast(code):
        told.append(int(code))
        return code

    monkeypatch.setattr(participants.multihost_utils, "broadcast_one_to_all", broadcast)
    done = []
    on_first(lambda: done.append(1))
    assert (done, told) == ([1], [0])

    def fail(number=None):
        raise OSError(number, "here") if number else OSError("here")

    with pytest.raises(OSError, match="here"):
        on_first(lambda: fail(errno.ENOSPC))
    with pytest.raises(OSError, match="here"):
        on_first(fail)
    assert told == [0, errno.ENOSPC, errno.EIO]
    # Another process hears the number alone, and does nothing itself.
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(
        participants.multihost_utils,
        "broadcast_one_to_all",
        lambda code: np.int32(errno.EACCES),
    )
    with pytest.raises(OSError, match=r"Permission denied \(on process 0\)") as error:
        on_first(lambda: done.append(2))
    assert error.value.errno == errno.EACCES
    assert done == [1]


def test_the_cause_of_a_failure_is_one_line():
    def caused(error: Exception, cause: Exception | None) -> Exception:
        error.__cause__ = cause
        return error

    full = ValueError(f"a long\nstory: {os.strerror(errno.ENOSPC)} [source]")
    assert why(caused(RuntimeError("outside"), full)) == "No space left on device"
    assert why(ValueError("a\n  b")) == "ValueError: a b"
    assert why(ValueError("x" * 900)) == f"ValueError: {'x' * 488}"
    bucket = caused(BucketError("access denied", "s3://b"), ValueError("long"))
    assert why(caused(RuntimeError("outside"), bucket)) == "s3://b: access denied"
