"""Errors of which one line tells the user more than a traceback."""


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
