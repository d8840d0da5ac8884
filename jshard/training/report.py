"""The run's report: one HTML page that needs no network."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from jshard.training.atomic import replace_file
from jshard.training.charts import line_chart
from jshard.training.config import flatten
from jshard.training.progress import format_count

_Line = Mapping[str, Any]

# Of the first step alone, or another metric's reciprocal.
_NOT_DRAWN = ("step", "step_time", "time_to_first_step")


def write_report(workdir: Path) -> None:
    """Writes `report.html` from the run's config, metrics and notes.

    Args:
      workdir: The run's folder. A file that is not there yet leaves its part of the
        page out.
    """
    config = _read_json(workdir / "config.json")
    notes = _read_json(workdir / "notes.json")
    page = render(workdir, config, read_metrics(workdir), notes)
    replace_file(workdir / "report.html", page)


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """Reads `metrics.jsonl`; leaves out a last line that was cut short."""
    path = workdir / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    *lines, _ = text.split("\n")  # what follows the last newline was cut
    return [json.loads(line) for line in lines]


def render(workdir: Path, config: _Line, metrics: Sequence[_Line], notes: _Line) -> str:
    """Returns the page; everything in it that is not ours is escaped."""
    heading = Path(notes.get("recipe", workdir.name)).stem
    references = notes.get("references", {})
    tiles = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in _results(metrics, references).items()
    )
    charts = "".join(_charts(metrics, references))
    sections = [
        f'<div class="tiles">{tiles}</div>',
        _section("Curves", f'<div class="charts">{charts}</div>'),
    ]
    for name, key in (("What was set up", "start_up"), ("Sample", "sample")):
        if key in notes:
            sections.append(_section(name, f"<pre>{escape(notes[key])}</pre>"))
    sections.append(_section("Config", _table(flatten(config))))
    files = resources.files("jshard.training")
    style = files.joinpath("report.css").read_text(encoding="utf-8")
    script = files.joinpath("report.js").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(heading)}</title>\n<style>\n{style}</style></head>\n<body>"
        f'<h1>{escape(heading)}</h1><p class="where">{escape(str(workdir.absolute()))}'
        f"</p>\n{''.join(sections)}\n<script>\n{script}</script></body></html>\n"
    )


def _charts(metrics: Sequence[_Line], references: Mapping[str, float]) -> Iterator[str]:
    """Yields the loss's chart, a wide one, and one for each other metric."""
    names = dict.fromkeys(name for line in metrics for name in line)
    for name in names:
        if name.startswith("eval_") or name in _NOT_DRAWN:
            continue
        lines = {"training": _points(metrics, name)}
        if evaluations := _points(metrics, f"eval_{name}"):
            lines["validation"] = evaluations
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
    return results


def _points(metrics: Sequence[_Line], name: str) -> list[tuple[int, float]]:
    return [(m["step"], m[name]) for m in metrics if m.get(name) is not None]


def _speeds(metrics: Sequence[_Line]) -> list[str]:
    return sorted({k for line in metrics for k in line if k.endswith("_per_second")})


def _title(name: str) -> str:
    name = name.replace("_per_second", " a second").replace("_", " ")
    return {"mfu": "MFU", "grad norm": "Gradient norm"}.get(name, name.capitalize())


def _section(heading: str, content: str) -> str:
    return f"<h2>{escape(heading)}</h2>\n{content}\n"


def _table(rows: Mapping[str, Any]) -> str:
    cells = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
        for name, value in rows.items()
    )
    return f'<div class="table"><table>{cells}</table></div>'


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
