"""Texts that the processes of a job share, and where they listen."""

import dataclasses

import pytest

from jshard.system.jobs import job, peers
from jshard.system.jobs.cluster import Cluster


@pytest.fixture
def values():
    """The values of a job's key-value store."""
    return {}


@pytest.fixture
def first(monkeypatch, values):
    """The only process of a job."""

    class KeyValueStore:
        def __init__(self, name):
            self.name = name

        def put(self, key, text):
            values[f"{self.name}/{key}"] = text

        def get(self, key, timeout):
            return values[f"{self.name}/{key}"]

        def all_in(self, folder):
            return {
                key.rpartition("/")[2]: text
                for key, text in values.items()
                if key.startswith(f"{self.name}/{folder}/")
            }

        def clear(self):
            for key in [key for key in values if key.startswith(f"{self.name}/")]:
                del values[key]

    class Heartbeat:
        silence = 8.0

        def __init__(self, *args):
            """Starts nothing."""

    monkeypatch.setattr(peers, "KeyValueStore", KeyValueStore)
    monkeypatch.setattr(peers, "Heartbeat", Heartbeat)
    monkeypatch.setattr(job, "_redirect_stdout", lambda prints: None)
    return job._Distributed(Cluster(0, 1, "here:1", None, "options"))


def test_a_name_that_is_shared_again_never_gives_an_earlier_text(first):
    assert first.share("a", "1") == ["1"]
    assert first.publish("b", "2") == "2"
    assert first.share("a", "3") == ["3"]
    assert first.publish("a", "4") == "4"
    assert first.publish("b", "5") == "5"


def test_texts_that_all_have_read_leave_the_store(first, values):
    sizes = []
    for number in range(5):
        first.share("a", str(number))
        sizes.append(len(values))
    assert len({*sizes[1:]}) == 1


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
    cluster = Cluster(0, 2, coordinator, None, "options")
    assert job._bind_address(cluster) == bound
    # A PyTorchJob's first process is told an address of its own.
    of_pods = dataclasses.replace(cluster, found_by="PyTorch")
    assert job._bind_address(of_pods) is None
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "10.0.0.1:2000")
    assert job._bind_address(cluster) is None
