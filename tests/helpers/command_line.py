"""A command's line, run within the test's process."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import pytest

from jshard.system.cli import command


def shown(
    patch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    run: Callable[[list[str]], None],
    *words: object,
) -> tuple[int, str, str]:
    """The exit code, output and errors of a command that reads these words."""
    patch.setattr(sys, "argv", ["jshard", *map(str, words)])
    # The platform is for a process of its own.
    patch.setattr(jax.config, "update", lambda *_: None)
    code: Any = 0
    try:
        command.run_command(run)
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    return code, out, err
