"""Where the time of a run went, in its report."""

from jshard.system.pages.page import bar, note, table
from jshard.training.report.goodput import Goodput


def goodput_section(goodput: Goodput) -> str:
    """Returns a bar of the categories, a table of them, and the account in a line."""
    marks = [f"time-{name}" for name in goodput.seconds]
    rows = [
        (goodput.describe(name), _exact(seconds), f"{seconds / goodput.total:.1%}")
        for name, seconds in goodput.seconds.items()
    ]
    parts = [
        (words, seconds, f"{exact}, {share}")
        for (words, exact, share), seconds in zip(
            rows, goodput.seconds.values(), strict=True
        )
    ]
    line = str(goodput)
    return (
        bar(parts, goodput.total, marks)
        + table(rows, (), "", marks)
        + note(f"{line[0].upper()}{line[1:]}.")
    )


def _exact(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 3600:.2f} h"
