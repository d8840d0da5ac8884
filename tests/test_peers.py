"""Texts that the processes of a job give each other."""

import pytest

from jshard.distributed import Cluster, peers


@pytest.fixture
def first(monkeypatch):
    """The only process of a job that has started, with its notes in a dict."""
    notes = {}

    class Board:
        def put(self, name, text):
            notes[name] = text

        def get(self, name, timeout):
            return notes[name]

        def all_in(self, folder):
            return {
                name.rpartition("/")[2]: text
                for name, text in notes.items()
                if name.startswith(f"{folder}/")
            }

    class Watch:
        silence = 8.0

        def __init__(self, *args):
            """Watches nobody."""

    monkeypatch.setattr(peers, "Board", Board)
    monkeypatch.setattr(peers, "Watch", Watch)
    monkeypatch.setattr(peers, "_keep_stdout_for_python", lambda prints: None)
    return peers._Many(Cluster(0, 1, "here:1", None, "options"))


def test_a_text_is_shared_or_published_once_under_a_name(first):
    assert first.share("a", "1") == ["1"]
    assert first.publish("b", "2") == "2"
    for again in (first.share, first.publish):
        for name in ("a", "b"):
            with pytest.raises(ValueError, match=f"'{name}' was shared or published"):
                again(name, "stale")
    assert first.publish("c", "3") == "3"
