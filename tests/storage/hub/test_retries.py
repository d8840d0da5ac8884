"""A busy hub is asked again, some times, and what it said last is the error."""

from types import SimpleNamespace

import pytest

from jshard.storage.hub.online import download as downloads
from jshard.storage.hub.online.names import Name
from jshard.system.errors import UserError

errors = pytest.importorskip("huggingface_hub.errors", reason="needs jshard[hub]")


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """A hub that answers with 503 so often, then with a folder; how long was waited."""
    waits: list[float] = []
    busy = errors.HTTPError("busy")
    busy.response = SimpleNamespace(status_code=503)

    def set_up(failures: int, error: Exception = busy) -> list[float]:
        left = [error] * failures

        def snapshot_download(*args, **options):
            if left:
                raise left.pop()
            return str(tmp_path / "commit")

        stub = SimpleNamespace(
            snapshot_download=snapshot_download,
            errors=errors,
            constants=SimpleNamespace(HF_HUB_CACHE=str(tmp_path)),
        )
        monkeypatch.setattr(downloads, "library", lambda name: stub)
        monkeypatch.setattr(downloads.time, "sleep", waits.append)
        return waits

    return set_up


@pytest.mark.parametrize("failures", [0, 1, 3])
def test_three_times_a_busy_hub_is_asked_again_after_longer_waits(
    failures, asked, tmp_path, capsys
):
    waits = asked(failures)
    assert downloads.download(Name("org/model"), ()) == tmp_path / "commit"
    assert waits == [1, 4, 16][:failures]
    assert capsys.readouterr().err.count("trying again in ") == failures


def test_after_the_last_time_its_answer_is_the_error(asked):
    waits = asked(4)
    with pytest.raises(UserError, match=r"cannot download hf://org/model .* 503"):
        downloads.download(Name("org/model"), ())
    assert waits == [1, 4, 16]


def test_what_does_not_pass_is_not_asked_again(asked):
    waits = asked(1, ValueError("no such thing"))
    with pytest.raises(UserError, match="no such thing"):
        downloads.download(Name("org/model"), ())
    assert waits == []
