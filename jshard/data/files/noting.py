"""What files were taken for what, for the start-up note.

It is said where files are found, below the recipe, which hands on datasets alone.
"""

import contextlib
import contextvars
from collections.abc import Iterator

_NOTED: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar(
    "noted", default=None
)


def note(text: str) -> None:
    """Notes a line once, if someone collects notes."""
    lines = _NOTED.get()
    if lines is not None and text not in lines:
        lines.append(text)


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """Collects, within it, what is noted."""
    lines: list[str] = []
    token = _NOTED.set(lines)
    try:
        yield lines
    finally:
        _NOTED.reset(token)
