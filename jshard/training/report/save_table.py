"""The table of a run's saves in its report."""

from collections.abc import Mapping

from jshard.storage.checkpoint.selected.best_step import Best
from jshard.system.formatting import format_bytes
from jshard.system.pages.page import table
from jshard.training.report.series import Series


def save_table(series: Mapping[str, Series], best: Best | None) -> str:
    """Returns a table of the saves, the best one marked; "" if there are none.

    Of very many saves it has some.
    """
    columns = {
        "size": ("checkpoint_bytes", format_bytes),
        "held up training": ("checkpoint_blocked", format_wait),
        "written in": ("checkpoint_write_time", format_wait),
    }
    cells = {
        (name, step): show(value)
        for name, (key, show) in columns.items()
        for step, value in (series[key].samples if key in series else ())
    }
    steps = {step for _, step in cells} | ({best.step} if best else set())
    rows = []
    for step in sorted(steps):
        mark = f", best: {best.result}" if best and step == best.step else ""
        rows.append((f"{step}{mark}", *(cells.get((x, step), "") for x in columns)))
    return table(rows, ["step", *columns], "columns")


def format_wait(seconds: float) -> str:
    """Returns 1.5 as "1.5 s" and 0.0123 as "12 ms"."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f} ms"
