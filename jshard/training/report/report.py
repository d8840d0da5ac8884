"""The run's report: one HTML page that needs no network."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from jshard.checkpoint.atomic import replace_file
from jshard.errors import UserError
from jshard.formatting import format_bytes, format_count
from jshard.training.config.config import flatten
from jshard.training.recipe import short_name
from jshard.training.report.charts import line_chart
from jshard.training.report.page import document, section, table, tiles

_Line = Mapping[str, Any]

# Of the first step alone, or another metric's reciprocal.
_NOT_DRAWN = ("step", "step_time", "time_to_first_step")
_NOT_CURVES = ("eval_", "checkpoint_")  # beside the training's curve, or in a table


REPORT = "report.html"  # of a run
METRICS = "metrics.jsonl"  # of a run, and as far as it was then, of a checkpoint


def write_report(workdir: Path) -> None:
    """Writes `report.html` from the run's config, metrics and notes.

    Args:
      workdir: The run's folder. A file that is not there yet leaves its part of the
        page out.
    """
    config = _read_json(workdir / "config.json")
    notes = _read_json(workdir / "notes.json")
    page = render(workdir, config, read_metrics(workdir), notes)
    replace_file(workdir / REPORT, page)


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """Reads `metrics.jsonl`; leaves out a last line that was cut short.

    Args:
      workdir: The run's folder, or one of its checkpoints.

    Raises:
      UserError: Another line is no JSON object with a step.
    """
    path = workdir / METRICS
    text = path.read_bytes() if path.exists() else b""
    *lines, _ = text.split(b"\n")  # what follows the last newline was cut
    metrics = []
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
        except ValueError:
            values = None
        if not isinstance(values, dict) or not isinstance(values.get("step"), int):
            raise UserError(
                f"{path}, line {number}, is no line of metrics: mend or remove it"
            )
        metrics.append(values)
    return metrics


def render(workdir: Path, config: _Line, metrics: Sequence[_Line], notes: _Line) -> str:
    """Returns the page; everything in it that is not ours is escaped."""
    heading = short_name(notes.get("recipe", workdir.name))
    where = str(workdir.absolute())
    if steps := notes.get("resumed"):
        listed = ", ".join(map(str, steps))
        where += f" · resumed at {'steps' if len(steps) > 1 else 'step'} {listed}"
    references = notes.get("references", {})
    results = _results(metrics, references).items()
    charts = "".join(_charts(metrics, references))
    sections = [
        tiles((value, name) for name, value in results),
        section("Curves", f'<div class="charts">{charts}</div>'),
    ]
    if checkpoints := _checkpoints(metrics):
        sections.append(section("Checkpoints", checkpoints))
    for name, key in (("What was set up", "start_up"), ("Sample", "sample")):
        if key in notes:
            sections.append(section(name, f"<pre>{escape(notes[key])}</pre>"))
    sections.append(
        section("Config", table((k, str(v)) for k, v in flatten(config).items()))
    )
    return document(heading, where, sections, ["report.css"], ["report.js"])


def _charts(metrics: Sequence[_Line], references: Mapping[str, float]) -> Iterator[str]:
    """Yields the loss's chart, a wide one, and one for each other metric."""
    names = dict.fromkeys(name for line in metrics for name in line)
    for name in names:
        if name.startswith(_NOT_CURVES) or name in _NOT_DRAWN:
            continue
        lines = {"training": _points(metrics, name)}
        if evaluations := _points(metrics, f"eval_{name}"):
            lines["validation"] = evaluations
        if averages := _points(metrics, f"eval_ema_{name}"):
            lines["validation of averages"] = averages
        if name == "loss":
            yield line_chart("Loss", lines, references=references, wide=True)
        else:
            yield line_chart(_title(name), lines)


def _results(
    metrics: Sequence[_Line], references: Mapping[str, float]
) -> dict[str, str]:
    """Returns the run's final numbers as text, the most telling first."""
    results = {}
    if evaluations := _points(metrics, "eval_loss"):
        step, loss = evaluations[-1]
        results[f"validation loss at step {step}"] = f"{loss:.4f}"
        for name, reference in references.items():
            side = "below" if loss < reference else "above"
            name = f"{name}; validation is {abs(loss - reference):.4f} {side}"
            results[name] = f"{reference:.4f}"
    if losses := _points(metrics, "loss"):
        step, loss = losses[-1]
        results[f"training loss at step {step}"] = f"{loss:.4f}"
    for _, seconds in _points(metrics, "time_to_first_step"):
        results["time to first step"] = f"{seconds:.1f} s"
    for name in _speeds(metrics):
        speed = statistics.median(value for _, value in _points(metrics, name))
        results[f"{_title(name).lower()}, median"] = format_count(speed)
    if utilisation := [value for _, value in _points(metrics, "mfu")]:
        results["MFU, median"] = f"{statistics.median(utilisation):.1%}"
    if blocked := [value for _, value in _points(metrics, "checkpoint_blocked")]:
        seconds = statistics.median(blocked)
        name = "held up training for a save, median"
        if step_times := [value for _, value in _points(metrics, "step_time")]:
            name += f"; {seconds / statistics.median(step_times):.1%} of a step"
        results[name] = _duration(seconds)
    return results


def _checkpoints(metrics: Sequence[_Line]) -> str:
    """Returns a table of the saves, or "" when there was none."""
    columns = {
        "size": ("checkpoint_bytes", format_bytes),
        "held up training": ("checkpoint_blocked", _duration),
        "written in": ("checkpoint_write_time", _duration),
    }
    values = {name: dict(_points(metrics, key)) for name, (key, _) in columns.items()}
    rows = []
    for step in sorted({step for column in values.values() for step in column}):
        cells = [
            show(values[name][step]) if step in values[name] else ""
            for name, (_, show) in columns.items()
        ]
        rows.append((str(step), *cells))
    return table(rows, ["step", *columns], "columns")


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f} ms"


def _points(metrics: Sequence[_Line], name: str) -> list[tuple[int, float]]:
    return [(m["step"], m[name]) for m in metrics if m.get(name) is not None]


def _speeds(metrics: Sequence[_Line]) -> list[str]:
    return sorted({k for line in metrics for k in line if k.endswith("_per_second")})


def _title(name: str) -> str:
    name = name.replace("_per_second", " a second").replace("_", " ")
    return {"mfu": "MFU", "grad norm": "Gradient norm"}.get(name, name.capitalize())


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
