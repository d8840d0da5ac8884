"""Whether a program runs in the stages of a pipeline, while it is traced."""

import contextlib
import contextvars
from collections.abc import Iterator

_stages = contextvars.ContextVar("stages", default=1)  # that run what is traced


@contextlib.contextmanager
def in_stages(number: int) -> Iterator[None]:
    """Says that what is traced inside runs in a stage, of so many."""
    token = _stages.set(number)
    try:
        yield
    finally:
        _stages.reset(token)


def stages_here() -> int:
    """Returns the number of stages of the pipeline that is traced; 1 is none."""
    return _stages.get()
