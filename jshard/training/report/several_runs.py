"""Several runs beside each other: their results, and the keys in which they differ."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jshard.recipe.changes import NOTES
from jshard.recipe.config.run_config import flatten
from jshard.system.errors import UserError
from jshard.system.files.atomic import replace_file
from jshard.system.files.lock import check_unlocked
from jshard.system.formatting import one_line
from jshard.system.pages.charts import line_chart
from jshard.system.pages.page import document, section, table
from jshard.training.report.run_files import (
    METRICS,
    printable,
    read_numbers,
    read_object,
)
from jshard.training.report.series import Points, Series

CONFIG = "config.json"  # in a run's folder
COMPARISON = "comparison.html"  # in the folder of the runs
_CURVES = 8  # as many colors has the page
_KEYS = 6  # columns that fit a screen
_LOSSES = _LOSS, _EVAL_LOSS = "loss", "eval_loss"


@dataclasses.dataclass(frozen=True)
class Result:
    """What one run's folder says of it.

    Attributes:
      name: The path of its folder below the one that holds all runs.
      config: The text of each key's value, by flattened key.
      step: The last step in its metrics.
      steps: The number of steps of its config; None if the config does not say it.
      last: The last loss and validation loss, as far as it has them.
      metric: The metric by which runs are sorted: `checkpoint.best` of its config or
        the validation loss; the loss if it has no value of that.
      best: The best value of the metric, and its step; None without one.
      highest: Whether the highest value is the best.
      curves: The values of the losses over steps.
      state: Whether it is done, is training, or how it ended.
      left_out: A line for each damaged part of its files.
    """

    name: str
    config: Mapping[str, str]
    step: int
    steps: int | None
    last: Mapping[str, float]
    metric: str
    best: tuple[float, int] | None
    highest: bool
    curves: Mapping[str, Points]
    state: str
    left_out: tuple[str, ...]


def is_run(path: Path) -> bool:
    """Returns whether a folder is a run's; a checkpoint has metrics, but no config."""
    return (path / METRICS).is_file() and (path / CONFIG).is_file()


def runs_in(path: Path) -> list[Path]:
    """Returns the folders of runs that a folder directly holds, by name.

    There are none in a run's own folder.

    Raises:
      UserError: The folder cannot be listed.
    """
    try:
        if is_run(path) or not path.is_dir():
            return []
        return sorted(child for child in path.iterdir() if is_run(child))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def common_folder(runs: Sequence[Path]) -> Path:
    """Returns the deepest folder that holds all of these runs."""
    return Path(os.path.commonpath([run.absolute().parent for run in runs]))


def read_runs(runs: Sequence[Path]) -> list[Result]:
    """Reads runs' results, the best first, runs without a value of the metric last.

    Raises:
      UserError: A file cannot be read.
    """
    folder, results = common_folder(runs), []
    for run in runs:
        try:
            results.append(_read(run, str(run.absolute().relative_to(folder))))
        except OSError as error:
            where = error.filename or run
            raise UserError(f"cannot read {where}: {error.strerror}") from error
    return sorted(results, key=_rank)


def _rank(result: Result) -> tuple[bool, str, float, str]:
    """Returns by what results are sorted; values of other metrics are not compared."""
    if result.best is None:
        return True, "", 0.0, result.name
    value, _ = result.best
    return False, result.metric, -value if result.highest else value, result.name


def _read(path: Path, name: str) -> Result:
    config, of_config = read_object(path / CONFIG)
    notes, of_notes = read_object(path / NOTES)
    left_out = [*of_config, *of_notes]
    flat = flatten(config)
    chosen = str(flat.get("checkpoint.best") or _EVAL_LOSS)
    highest = flat.get("checkpoint.best_is") == "highest"
    step, last, bests = 0, {}, {}
    series = {_LOSS: Series(), _EVAL_LOSS: Series()}
    for values in read_numbers(path, left_out.append):
        step = max(step, values["step"])
        for key in {*series, chosen}:
            if (value := values.get(key)) is None:  # also where it was not finite
                continue
            if key in series:
                series[key].add(values["step"], value)
                last[key] = value
            sign = -1 if highest and key == chosen else 1
            if key not in bests or sign * value < sign * bests[key][0]:
                bests[key] = value, values["step"]
    metric = chosen if chosen in bests else _LOSS  # of a run without validation
    steps = flat.get("steps")
    steps = steps if type(steps) is int else None
    return Result(
        name=name,
        config={key: str(value) for key, value in flat.items()},
        step=step,
        steps=steps,
        last=last,
        metric=metric,
        best=bests.get(metric),
        highest=highest and metric == chosen,
        curves={key: values.means for key, values in series.items()},
        state=_state(path, notes, step, steps),
        left_out=tuple(left_out),
    )


def _state(path: Path, notes: Mapping[str, Any], step: int, steps: int | None) -> str:
    try:
        check_unlocked(path)
    except UserError:
        return "training"
    stopped = notes.get("stopped")
    if isinstance(stopped, dict):
        return f"stopped: {stopped.get('why')}"
    if steps is not None and step >= steps:
        return "done"
    return "ended before its last step"


def differing_keys(results: Sequence[Result]) -> list[str]:
    """Returns the keys whose values are not the same in all configs."""
    keys = dict.fromkeys(key for result in results for key in result.config)
    return [key for key in keys if len({one.config.get(key) for one in results}) > 1]


def columns(
    results: Sequence[Result], keys: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Returns the heading of a table of results, and its rows.

    The cell of a key that a run's config does not have is empty.
    """
    metrics = {result.metric for result in results}
    shared = f"best {next(iter(metrics))}" if len(metrics) == 1 else "best"
    rows = []
    for one in results:
        best = ""
        if one.best is not None:
            named = "" if len(metrics) == 1 else f"{one.metric} "
            best = f"{named}{one.best[0]:.5g} at step {one.best[1]}"
        last = [f"{one.last[key]:.5g}" if key in one.last else "" for key in _LOSSES]
        of = "" if one.steps is None else f" of {one.steps}"
        values = [one.config.get(key, "") for key in keys]
        rows.append([one.name, *values, f"{one.step}{of}", *last, best, one.state])
    return ["run", *keys, "step", *_LOSSES, shared, "state"], rows


def as_text(results: Sequence[Result], *, full: bool) -> str:
    """Returns a table of results as text, and what is not in it.

    Args:
      results: Of at least one run.
      full: Whether it has all keys that differ, or as many as fit a screen.
    """
    differing = differing_keys(results)
    keys = differing if full else differing[:_KEYS]
    heading, rows = columns(results, keys)
    cells = [[one_line(cell) for cell in row] for row in (heading, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    if left := differing[len(keys) :]:
        lines.append(f"{len(left)} more of the keys differ: {', '.join(left)}; --full")
    lines += _left_out(results)
    return "\n".join(map(one_line, lines))


def _left_out(results: Sequence[Result]) -> list[str]:
    """Returns a line for each run whose files are damaged, with the first damage."""
    return [
        f"{one.name}: left out {one.left_out[0]}"
        + (f", and {len(one.left_out) - 1} more" if one.left_out[1:] else "")
        for one in results
        if one.left_out
    ]


def write_comparison(results: Sequence[Result], title: str, output: Path) -> None:
    """Writes a page with the losses of all runs in one chart, and their table.

    Args:
      results: The runs, the best first: the first ones have curves.
      title: Its heading.
      output: The file to write.

    Raises:
      OSError: It cannot be written.
    """
    shown = results[:_CURVES]
    charts = [
        line_chart(heading, {one.name: one.curves[key] for one in shown}, wide=True)
        for heading, key in (("Loss", _LOSS), ("Validation loss", _EVAL_LOSS))
    ]
    heading, rows = columns(results, differing_keys(results))
    where = f"{len(results)} runs, the best first"
    if len(results) > _CURVES:
        where += f"; the charts show the first {_CURVES}"
    sections = [*charts, section("Runs", table(rows, heading, "runs"))]
    if damaged := _left_out(results):
        sections.append(section("Left out", table([line] for line in damaged)))
    page = document(title, where, sections, ["page.css"], ["page.js"])
    replace_file(output, printable(page))
