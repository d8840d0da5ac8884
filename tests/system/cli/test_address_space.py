"""Limits of memory: said in one line before XLA aborts, and after Python has none."""

import resource
import subprocess
import sys

import pytest

from jobs import environment
from jshard.system.cli.command import expected_ending
from jshard.system.cli.machine import address_space
from jshard.system.errors import UserError
from resumable import RECIPE


@pytest.mark.parametrize("words", [("train", "--config=tiny.py"), ("inspect", "run")])
def test_a_limit_below_what_jax_needs_is_one_line_before_anything_is_written(
    words, tmp_path
):
    (tmp_path / "tiny.py").write_text(RECIPE)
    command, *rest = words
    limited = f"ulimit -v 1500000; exec {sys.executable} -m jshard.{command} "
    run = subprocess.run(
        ["sh", "-c", limited + " ".join(rest)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2, run.stderr
    (line,) = run.stderr.splitlines()
    said = "jshard: error: the address space is limited to 1.4 GiB (ulimit -v), and a"
    assert line.startswith(said)
    assert "run `ulimit -v unlimited` before" in line
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.py"]


def limit_to(size, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (size, size))


def test_a_limit_that_may_be_too_low_is_a_warning_and_none_is_nothing(
    monkeypatch, capsys
):
    for size, said in ((2**32, "limited to 4.0 GiB"), (2**36, ""), (-1, "")):
        limit_to(size, monkeypatch)
        address_space.check_address_space()
        err = capsys.readouterr().err
        assert (said in err and bool(said)) == bool(err), err
    limit_to(2**30, monkeypatch)
    with pytest.raises(UserError, match=r"limited to 1\.0 GiB .*and a small model"):
        address_space.check_address_space()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "error: MemoryError"),
        (RuntimeError("can't start new thread"), "error: can't start new thread"),
        (OSError(12, "Cannot allocate memory"), "error: OSError [Errno 12] Cannot al"),
        (ImportError("a.so: failed to map segment"), "error: ImportError a.so: failed"),
    ],
)
def test_an_error_of_memory_is_one_line_that_says_what_limits_it(
    error, said, monkeypatch
):
    for size, why in ((-1, "this host is out of memory"), (2**32, "to 4.0 GiB: JAX")):
        limit_to(size, monkeypatch)
        ending = expected_ending(error)
        assert ending is not None
        assert ending[0] == 1
        assert ending[1].startswith(said)
        assert why in ending[1]


def test_other_errors_are_none_of_memory():
    for error in (RuntimeError("x"), OSError(28, "full"), ValueError("memory")):
        assert not address_space.lacks_memory(error)
