"""Keeps what Orbax and TensorStore say of a failed save off the user's screen.

It is thousands of lines for each failure, and ``Save.error`` is the one that counts.
Tried on Orbax 0.12.8. When it breaks, users see those lines; nothing else changes.
"""

import logging
import sys
from typing import Any


def silence() -> None:
    """Installs the filters, once."""
    logging.getLogger("absl").addFilter(_not_orbax)
    if not isinstance(sys.unraisablehook, _LateWrites):
        sys.unraisablehook = _LateWrites(sys.unraisablehook)


def _not_orbax(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or "/orbax/" not in record.pathname


class _LateWrites:
    """``sys.unraisablehook`` less TensorStore's writes that end after the save.

    When one write fails Orbax closes its event loop; the others then have nobody to
    tell that they have ended.
    """

    def __init__(self, before: Any):
        self._before = before

    def __call__(self, unraisable: Any) -> None:
        """Passes everything else on."""
        error = unraisable.exc_value
        if isinstance(error, RuntimeError) and str(error) == "Event loop is closed":
            return
        self._before(unraisable)
