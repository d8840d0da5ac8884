"""Errors of which one line tells the user more than a traceback."""

from collections.abc import Sequence

_SHOWN = 8


def some_of(texts: Sequence[str], separator: str = ", ") -> str:
    """The first few texts, and how many more there are: a list fit for one line."""
    more = len(texts) - _SHOWN
    shown = separator.join(texts[:_SHOWN])
    return f"{shown} and {more:,} more" if more > 0 else shown


class UserError(ValueError):
    """A mistake of the user: one line, what, where, what to do.

    The command line exits 2 with it.
    """


class RunFailed(RuntimeError):
    """A run that cannot go on, through no bug: a loss that is not finite, a full disk.

    The command line exits 1 with it.
    """


class Interrupted(RunFailed):
    """A run that a signal ended, and that saves nothing: it is lost.

    The command line exits 130 with it.
    """


class Preempted(RuntimeError):
    """A run that a signal ended, after its state was saved: it can be resumed.

    The command line exits 75 with it, which schedulers know as "try again".
    """
