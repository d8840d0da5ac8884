"""Where processes of one machine meet: a folder of their launcher, and gone with it."""

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from jshard.system.errors import UserError
from jshard.system.network.hosts import private_socket

LAUNCHER = """
import socket, time
from jshard.system.network.hosts import private_socket
with private_socket() as address:
    socket.socket(socket.AF_UNIX).bind(address.removeprefix("unix:"))
    print(address, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary(monkeypatch) -> Iterator[Path]:
    # Not `tmp_path`, whose name is too long for a socket where pytest has workers.
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def folder_of(address: str) -> Path:
    return Path(address.removeprefix("unix:")).parent


def test_a_killed_launchers_folder_is_removed_by_the_next_and_not_before(temporary):
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        left = folder_of(launcher.stdout.readline())
        with private_socket() as address:
            assert stat.S_IMODE(folder_of(address).stat().st_mode) == 0o700
            assert sorted(temporary.iterdir()) == sorted([left, folder_of(address)])
        assert list(temporary.iterdir()) == [left]
        launcher.send_signal(signal.SIGKILL)
    assert os.listdir(left) == ["meeting"]
    with private_socket() as address:
        assert list(temporary.iterdir()) == [folder_of(address)]
    assert list(temporary.iterdir()) == []


def test_what_no_launcher_left_stays(temporary):
    elsewhere, full = temporary / "elsewhere", temporary / "jshard-meeting-full"
    link, file = temporary / "jshard-meeting-link", temporary / "jshard-meeting-file"
    for folder in (elsewhere, full):
        folder.mkdir()
    (full / "notes").touch()
    (elsewhere / "meeting").touch()
    file.touch()
    link.symlink_to(elsewhere)
    before = sorted(temporary.rglob("*"))
    with private_socket():
        pass
    assert sorted(temporary.rglob("*")) == before


def test_a_job_that_ends_leaves_nothing(temporary):
    with private_socket() as address, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address.removeprefix("unix:"))
    assert list(temporary.iterdir()) == []


def test_a_folder_too_deep_for_a_socket_is_refused(temporary, monkeypatch):
    deep = temporary / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    said = r"too long for a socket.*--port=N"
    with pytest.raises(UserError, match=said), private_socket():
        pass
    assert list(deep.iterdir()) == []
