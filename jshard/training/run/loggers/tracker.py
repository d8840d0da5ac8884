"""A run as one service keeps it, jshard's or a user's."""

from collections.abc import Mapping
from pathlib import Path


class Tracker:
    """What a recipe's `tracker(config)` returns; methods that it leaves out do nothing.

    They are called by a thread of the run's first process. An error leaves the tracker
    out after a warning, and the run continues.
    """

    def log(self, step: int, when: float, values: Mapping[str, float]) -> None:
        """Adds the metrics of a step, and the time in seconds since 1970."""

    def text(self, step: int, name: str, text: str) -> None:
        """Adds a text."""

    def picture(self, step: int, name: str, file: Path) -> None:
        """Adds a picture, in a PNG file."""

    def send(self) -> None:
        """Sends what was added; called after every few additions."""

    def close(self, *, failed: bool) -> None:
        """Ends the run, and waits until all is sent; the last call."""
