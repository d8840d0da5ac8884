"""Texts that the processes of a job share, and where they listen."""

import pytest

from jshard.distributed import job, watched
from jshard.distributed.cluster import Cluster


@pytest.fixture
def first(monkeypatch):
    """The only process of a job, with a dict as its key-value store."""
    values = {}

    class KeyValueStore:
        def put(self, key, text):
            values[key] = text

        def get(self, key, timeout):
            return values[key]

        def all_in(self, folder):
            return {
                key.rpartition("/")[2]: text
                for key, text in values.items()
                if key.startswith(f"{folder}/")
            }

    class Heartbeat:
        silence = 8.0

        def __init__(self, *args):
            """Starts nothing."""

    monkeypatch.setattr(watched, "KeyValueStore", KeyValueStore)
    monkeypatch.setattr(watched, "Heartbeat", Heartbeat)
    monkeypatch.setattr(job, "_redirect_stdout", lambda prints: None)
    return job._Distributed(Cluster(0, 1, "here:1", None, "options"))


def test_a_text_is_shared_or_published_once_under_a_name(first):
    assert first.share("a", "1") == ["1"]
    assert first.publish("b", "2") == "2"
    for again in (first.share, first.publish):
        for name in ("a", "b"):
            with pytest.raises(ValueError, match=f"'{name}' was shared or published"):
                again(name, "stale")
    assert first.publish("c", "3") == "3"


@pytest.mark.parametrize(
    ("coordinator", "bound"),
    [
        ("127.0.0.1:2000", "127.0.0.1:2000"),
        ("localhost:2000", "localhost:2000"),
        ("[::1]:2000", "[::1]:2000"),
        ("node1:2000", None),
        (None, None),
    ],
)
def test_jobs_of_one_machine_listen_to_it_alone(coordinator, bound, monkeypatch):
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    assert job._bind_address(coordinator) == bound
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "10.0.0.1:2000")
    assert job._bind_address(coordinator) is None
