"""What the command lines share: arguments, one-line errors, exit codes."""

import argparse
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import jax

from jshard.cli.paths import path_problem
from jshard.cli.user_code import describe_user_error
from jshard.errors import Interrupted, Preempted, RunFailed, UserError


def run_command(command: Callable[[list[str]], None]) -> None:
    """Runs a command line; what the user can mend is one line, not a traceback.

    An error in the user's own functions shows their lines alone.

    It exits 0 done, 1 failed, 2 bad input, 75 saved and to be resumed, 130 Ctrl-C.

    Args:
      command: called with the words after the program's name.
    """
    warnings.formatwarning = _format_warning
    try:
        command(sys.argv[1:])
    except UserError as error:
        _exit(2, f"error: {error}")
    except Interrupted as error:
        _exit(130, f"error: {error}")
    except RunFailed as error:
        _exit(1, f"error: {error}")
    except Preempted as error:
        _exit(75, str(error))
    except Exception as error:
        if _is_interrupt(error):
            _exit(130, "error: interrupted")
        described = describe_user_error(error)
        if described is None:
            raise
        line, lines = described
        print(lines, end="", file=sys.stderr)
        _exit(1, f"error: {line}")
    except KeyboardInterrupt:
        _exit(130, "error: interrupted")


class ArgumentParser(argparse.ArgumentParser):
    """An argparse parser whose errors are UserErrors."""

    def error(self, message: str) -> NoReturn:
        """Raises UserError, where argparse prints its usage."""
        raise UserError(f"{message}; see --help")


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """A type for `add_argument`: whole numbers of a range.

    Args:
      least: the smallest.
      most: the largest.
    """

    def parse(text: str) -> int:
        digits = text.removeprefix("-")
        # Python reads no more than 4300 of them.
        if not digits.isdecimal() or len(digits) > 99 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"{text}: must be a whole number from {least} to {most}"
            )
        return int(text)

    return parse


def file_path(text: str) -> Path:
    """A type for `add_argument`: paths that a file can have."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got an empty text")
    if problem := path_problem(text):
        raise argparse.ArgumentTypeError(f"{text}: {problem}")
    return Path(text)


def checkpoint_parser(name: str, description: str) -> ArgumentParser:
    """The parser of a command that reads a checkpoint, and computes nothing.

    Args:
      name: of the command, as in ``python -m jshard.export``.
      description: what it does.
    """
    jax.config.update("jax_platforms", "cpu")  # a GPU may be busy with the run itself
    parser = ArgumentParser(prog=name, description=description, allow_abbrev=False)
    parser.add_argument(
        "path",
        metavar="PATH",
        type=file_path,
        help="a run's folder, a folder of checkpoints, or one checkpoint",
    )
    return parser


def _format_warning(message, category, filename, lineno, line=None) -> str:
    if category is UserWarning:  # ours, for the user; others keep their place
        return f"jshard: warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error: JAX's C++ turns it into one of its own."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


def _exit(code: int, message: str) -> NoReturn:
    line = " ".join(message.splitlines())
    # What a user gave by mistake may be a file's whole text.
    line = re.sub(r"(\S{80})\S{300,}(\S{20})", r"\1...\2", line)
    print("jshard:", line, file=sys.stderr)
    sys.exit(code)
