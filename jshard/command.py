"""What the command lines share: arguments, one-line errors, exit codes."""

import argparse
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn

from jshard.errors import Preempted, RunFailed, UserError


def run_command(command: Callable[[list[str]], None]) -> None:
    """Runs a command line; what the user can mend is one line, not a traceback.

    It exits 0 done, 1 failed, 2 bad input, 75 saved and to be resumed, 130 Ctrl-C.

    Args:
      command: called with the words after the program's name.
    """
    warnings.formatwarning = _format_warning
    try:
        command(sys.argv[1:])
    except UserError as error:
        _exit(2, f"error: {error}")
    except RunFailed as error:
        _exit(1, f"error: {error}")
    except Preempted as error:
        _exit(75, str(error))
    except KeyboardInterrupt:
        _exit(130, "error: interrupted")


class ArgumentParser(argparse.ArgumentParser):
    """An argparse parser whose errors are UserErrors."""

    def error(self, message: str) -> NoReturn:
        """Raises UserError, where argparse prints its usage."""
        raise UserError(f"{message}; see --help")


def _format_warning(message, category, filename, lineno, line=None) -> str:
    if category is UserWarning:  # ours, for the user; others keep their place
        return f"jshard: warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _exit(code: int, message: str) -> NoReturn:
    print("jshard:", " ".join(message.splitlines()), file=sys.stderr)
    sys.exit(code)
