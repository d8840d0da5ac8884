"""A run's folder belongs to one process, and its files are no links."""

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from jshard.system.errors import UserError
from jshard.system.files.lock import lock_folder
from jshard.system.jobs.log import Log
from jshard.training.run.append import AppendedFile
from killed_run import contents, killed_run, open_folder, small_config

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config():
    return small_config()


@pytest.fixture
def run(config, tmp_path):
    return killed_run(tmp_path / "run", config)


HOLD = """\
import sys, time
from pathlib import Path
from jshard.system.files.lock import lock_folder
lock = lock_folder(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


@pytest.mark.quick("4")
@pytest.mark.parametrize("resume_from", [None, 4])
def test_a_folder_belongs_to_one_process_until_that_one_is_killed(
    resume_from, run, config
):
    if resume_from is None:
        (run / "metrics.jsonl").unlink()
    command = [sys.executable, "-c", HOLD, str(run)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        before = contents(run)
        said = rf"another process \({process.pid}\) is training in --workdir={run}"
        with pytest.raises(UserError, match=said):
            open_folder(run, config, resume_from=resume_from)
        assert contents(run) == before
        process.send_signal(signal.SIGKILL)
        process.wait()
        open_folder(run, config, resume_from=resume_from).__exit__()


def test_an_open_folder_cannot_be_opened_again_and_a_closed_one_can(run, config):
    with (
        open_folder(run, config, resume_from=4),
        pytest.raises(UserError, match=rf"another process \({os.getpid()}\)"),
    ):
        open_folder(run, config, resume_from=4)
    open_folder(run, config, resume_from=4).__exit__()


def test_a_lock_that_is_a_link_is_not_followed(run, config, tmp_path):
    (tmp_path / "precious").write_text("precious")
    (run / ".lock").unlink(missing_ok=True)
    (run / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=r"\.lock is a link: give another"):
        lock_folder(run)
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("opened", [AppendedFile, lambda file: Log(file, "title")])
def test_a_file_that_grows_is_not_appended_to_by_a_link(opened, tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "file").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic link"):
        opened(tmp_path / "file")
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lock_folder(tmp_path).close()
    assert "cannot be locked (Function not implemented)" in str(caught[0].message)
