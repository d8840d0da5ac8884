"""Processes that die at a system call of their choice, or show what would be left.

What stands between them and the disk is system_calls.c, for Linux with gcc.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")


def compile_library(folder: Path) -> Path:
    """Compiles what is preloaded; skips the test where nothing can."""
    library = folder / "system_calls.so"
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or os.uname().sysname != "Linux":
        pytest.skip("needs Linux and a C compiler")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"]
    subprocess.run(command, check=True)
    return library


@contextmanager
def watch(folder: Path, *, die_at: int = 0, copies: Path | str = "") -> Iterator[list]:
    """Numbers the calls that change ``folder``, in a process that preloads the library.

    Args:
      folder: whose changes count.
      die_at: the process dies at this call, counted from 1; in the midst of a write.
      copies: the folder that is copied there before every call, as "PROCESS-CALL".

    Yields:
      A list, which holds the number of calls at the end.
    """
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.watched.restype = ctypes.c_long
    arguments = os.fsencode(folder), ctypes.c_long(die_at), os.fsencode(copies)
    library.watch(*arguments)
    calls: list[int] = []
    yield calls
    calls.append(library.watched())
