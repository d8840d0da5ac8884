"""What the commands share: one-line errors and exit codes.

Besides those of a command:

Exit codes:
  141: Nobody reads the output any more, as after `| head`.
"""

import logging
import os
import re
import select
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from jshard.system.cli.machine.address_space import lacks_memory, memory_advice
from jshard.system.cli.terminal import open_outputs, show
from jshard.system.cli.user_code import describe_user_error
from jshard.system.compat.plugin_log import LOGGER, note_of
from jshard.system.errors import Interrupted, Preempted, RunFailed, UserError
from jshard.system.formatting import one_line, printable

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # in JAX's error
ALLOCATOR = "JAX_PJRT_CLIENT_CREATE_OPTIONS"  # whose setting also chooses the allocator


def run_command(command: Callable[[list[str]], None]) -> None:
    """Runs a command line; errors that the user can fix are one line.

    An error raised in the user's own functions shows only their part of the traceback.

    Exits with 0 if done, 1 if failed, 2 for bad input, 75 if saved and to be resumed,
    130 after Ctrl-C, 141 when nobody reads its output any more.

    Args:
      command: called with the arguments after the program's name.
    """
    open_outputs()
    logging.getLogger(LOGGER).addFilter(_show_note)
    warnings.formatwarning = _format_warning
    try:
        command(sys.argv[1:])
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) and _reader_left():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the flush at exit
            sys.exit(128 + signal.SIGPIPE)
        if ending := expected_ending(error):
            _exit(*ending)
        described = describe_user_error(error)
        if described is None:
            raise
        line, lines = described
        show(lines, error=True, end="")
        _exit(1, f"error: {line}")


def _show_note(record: logging.LogRecord) -> bool:
    """Shows what a record of a failed plugin says, in its place; passes others on."""
    if note := note_of(record):
        show(f"jshard: {note}", error=True)
    return not note


def _reader_left() -> bool:
    """Returns whether stdout is a pipe without a reader."""
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def expected_ending(error: BaseException) -> tuple[int, str] | None:
    """Returns the exit code and message of an error that is no bug, None for others."""
    if isinstance(error, Preempted):
        return 75, one_line(str(error))
    if isinstance(error, UserError):
        return 2, f"error: {one_line(str(error))}"
    if isinstance(error, RunFailed):
        code = 130 if isinstance(error, Interrupted) else 1
        return code, f"error: {one_line(str(error))}"
    if OUT_OF_MEMORY in str(error) and _is_of_jax(error):
        return 1, f"error: {_out_of_memory(error)}"
    if lacks_memory(error):
        return 1, f"error: {_what(error)} ({memory_advice()})"
    cause: BaseException | None = error
    while cause is not None:  # JAX's C++ turns Ctrl-C into an error of its own
        if isinstance(cause, KeyboardInterrupt):
            return 130, "error: interrupted"
        cause = cause.__cause__
    return None


def _is_of_jax(error: BaseException) -> bool:
    import jax  # slow; a launcher needs none

    return isinstance(error, jax.errors.JaxRuntimeError)


def _out_of_memory(error: BaseException) -> str:
    import jax

    advice = "a device is out of memory; docs/how_to/out_of_memory.md: what needs less"
    if jax.default_backend() == "gpu" and ALLOCATOR not in os.environ:
        advice += f". If the plan fits, {ALLOCATOR}=allocator:cuda_async in the "
        advice += "environment helps against fragmentation"
    return f"{_what(error)} ({advice})"


def _what(error: BaseException) -> str:
    """Returns the first line of an error, and where the user's code raised it."""
    described = describe_user_error(error)
    if described:
        return described[0]
    text = one_line(str(error).split("\n")[0])
    return text if isinstance(error, RuntimeError) else f"{type(error).__name__} {text}"


def read_text(option: str, file: Path) -> str:
    """Reads the file that an option names.

    Raises:
      UserError: It cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"{option}={file}: cannot be read: {reason}") from error


def _format_warning(message, category, filename, lineno, line=None) -> str:
    if category is UserWarning:  # ours, for the user; others keep their location
        return f"jshard: warning: {one_line(str(message))}\n"
    return printable(f"{filename}:{lineno}: {category.__name__}: {message}\n")


def _exit(code: int, message: str) -> NoReturn:
    # By mistake a user may have passed the text of a whole file.
    line = re.sub(r"(\S{80})\S{300,}(\S{20})", r"\1...\2", one_line(message))
    show(f"jshard: {line}", error=True)
    sys.exit(code)
