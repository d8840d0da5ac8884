"""Errors that tell the user more in one line than in a traceback."""

import errno
import inspect
import warnings
from collections.abc import Sequence

from jshard.system.formatting import one_line


def some_of(texts: Sequence[str], separator: str = ", ", limit: int = 8) -> str:
    """Joins the first few texts, and says how many more there are."""
    more = len(texts) - limit
    shown = separator.join(texts[:limit])
    return f"{shown} and {more:,} more" if more > 0 else shown


# Packages through which a user's call leads here, but for models and recipes.
_PASSED = {"jshard", "jax", "jaxlib", "flax", "contextlib", "functools"}


def warn(text: str) -> None:
    """Warns at the line of the user's that led here, past jshard, JAX and Flax."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_back is not None:
        package, _, rest = frame.f_globals.get("__name__", "").partition(".")
        if package not in _PASSED or rest.startswith(("models.", "recipes.")):
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def is_disk_full(error: BaseException) -> bool:
    """Returns whether an error is that of a full disk, or of a used-up quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


class _OneLine(Exception):
    """An error that a notebook shows as its line alone, without a traceback."""

    def _render_traceback_(self) -> list[str]:  # asked for by IPython
        return [f"{type(self).__name__}: {one_line(str(self))}"]


class UserError(_OneLine, ValueError):
    """A mistake by the user; its one line says what is wrong, where, and what to do.

    The command line exits with 2.
    """


class RunFailed(_OneLine, RuntimeError):
    """A run that cannot continue, but not because of a bug: a full disk, a nan loss.

    The command line exits with 1.
    """


class _BySignal(_OneLine):
    """An ending that was asked for: a notebook shows its line without a name."""

    def _render_traceback_(self) -> list[str]:
        return [one_line(str(self))]


class Interrupted(_BySignal, RunFailed):
    """A run that a signal ended before it could save anything.

    The command line exits with 130.
    """


class Preempted(_BySignal, RuntimeError):
    """A run that a signal ended after its state was saved; it can be resumed.

    The command line exits with 75, which schedulers know as "try again".
    """
