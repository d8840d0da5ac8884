"""A run's report: one HTML page that works offline."""

import base64
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from jshard.recipe.config.run_config import flatten
from jshard.recipe.recipe_path import short_name, split_path
from jshard.storage.checkpoint.selected.best_step import Best, best_of
from jshard.storage.checkpoint.step_folders import CHECKPOINTS
from jshard.system.files.atomic import replace_file
from jshard.system.formatting import format_count
from jshard.system.pages.charts import line_chart
from jshard.system.pages.page import (
    cards,
    document,
    folded,
    pictures,
    section,
    table,
    tiles,
)
from jshard.training.report.goodput import read_goodput
from jshard.training.report.run_files import (
    printable,
    read_numbers,
    read_object,
    read_picture,
)
from jshard.training.report.save_table import format_wait, save_table
from jshard.training.report.series import Points, Series
from jshard.training.report.step_times import StepTimes
from jshard.training.report.time_section import goodput_section
from jshard.training.report.trace_section import PLAN, trace_section

REPORT = "report.html"  # in a run's folder
SAMPLES = "samples"  # a note, and the folder of its pictures in a run's folder
GENERATED = "generated"  # the note of what the model wrote, by step
CHANGED = "changed"  # the note of the keys whose values are not the recipe's
_SHOWN = 6  # of these on the page
_MOST_LEFT_OUT = 20  # lines of damage on the page

# Values of the first step alone, the clock, or the reciprocal of another metric.
_NO_CHART = {"step", "epoch", "time", "step_time", "time_to_first_step", "collect_time"}
_NO_CHART |= {"spikes_in_a_row"}  # in the counts of skipped steps
# Drawn beside the training metric, or listed in a table.
_NO_CHART_PREFIX = ("eval_", "checkpoint_")
_NO_CHART_SUFFIX = "_seen"  # rises with the steps

_Object = Mapping[str, Any]
_Series = Mapping[str, Series]  # by metric


class _LeftOut:
    """What is damaged: the first lines to show, and how many there are."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0

    def add(self, line: str) -> None:
        self.count += 1
        if self.count <= _MOST_LEFT_OUT:
            self.lines.append(line)


def write_report(
    workdir: Path, output: Path | None = None, *, up_to: float = math.inf
) -> None:
    """Writes a run's report from its config, metrics, notes and checkpoints.

    If one of these files does not exist, its part of the page is left out. So is what
    is damaged, and the page says so: a report ends no run.

    Args:
      workdir: The run's folder.
      output: The page to write; by default `report.html` there.
      up_to: The last step whose metrics it shows.
    """
    config, of_config = read_object(workdir / "config.json")
    notes, of_notes = read_object(workdir / "notes.json")
    left_out = _LeftOut()
    for line in (*of_config, *of_notes):
        left_out.add(line)
    series: dict[str, Series] = {}
    times = StepTimes()
    for values in read_numbers(workdir, left_out.add):
        if values["step"] > up_to:
            continue
        times.add(values)
        for name, value in values.items():
            found = series.setdefault(name, Series())
            if value is not None:  # it was not finite
                found.add(values["step"], value)
    page = _render(workdir, config, series, times, notes, left_out, up_to)
    replace_file(output or workdir / REPORT, printable(page))


def _render(
    workdir: Path,
    config: _Object,
    series: _Series,
    times: StepTimes,
    notes: _Object,
    left_out: _LeftOut,
    up_to: float,
) -> str:
    """Returns the page; adds to ``left_out`` what notes are not of a run."""

    def part(name: str, make: Callable[[], Any], otherwise: Any = "") -> Any:
        """Returns a part of the page, unless what it is made of is damaged."""
        try:
            return make()
        # What values of any other type, size or structure end in.
        except (
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            OSError,
        ) as error:
            left_out.add(f"{name}: {type(error).__name__}: {error}")
            return otherwise

    title = part("recipe", lambda: _heading(workdir, notes), workdir.absolute().name)
    where = str(workdir.absolute())
    where += part("resumed", lambda: _resumed(notes))
    where += part("stopped", lambda: _stopped(notes))
    references = part("references", lambda: _references(notes), {})
    best = part(CHECKPOINTS, lambda: best_of(workdir / CHECKPOINTS), None)
    if best is not None and best.step > up_to:
        best = None
    results = _results(series, references, best)
    sections = [
        line_chart("Loss", _lines(series, "loss"), references=references, wide=True),
        tiles((value, name) for name, value in results.items()),
    ]
    if math.isinf(up_to):  # the account of a step in between would be another
        account = part("attempts", lambda: read_goodput(workdir, left_out.add), None)
        if account is not None:
            heading = "Where the time went"
            sections.append(section(heading, goodput_section(account)))
    if shown := part("step_time", times.render):
        sections.append(section("Step times", shown))
    sections.append(part(PLAN, lambda: trace_section(workdir)))
    if charts := list(_charts(series)):
        sections.append(section("Curves", cards(charts)))
    if GENERATED in notes:
        made = part(GENERATED, lambda: _generated(notes[GENERATED]))
        sections.append(section("Samples", made))
    if checkpoints := save_table(series, best):
        sections.append(section("Checkpoints", checkpoints))
    if "start_up" in notes:
        text = escape(str(notes["start_up"]))
        sections.append(section("Set-up", f"<pre>{text}</pre>"))
    sections.append(part(SAMPLES, lambda: _samples(workdir, notes.get(SAMPLES, {}))))
    if "pictures" in notes:
        made = part("pictures", lambda: pictures(notes["pictures"]))
        sections.append(section("Predictions", made))
    made = part("config", lambda: _config(config, notes.get(CHANGED, ())))
    sections.append(section("Config", made))
    if left_out.count:
        heading = f"Left out: {left_out.count} of what the files hold"
        sections.append(section(heading, table([x] for x in left_out.lines)))
    return document(title, where, sections, ["page.css"], ["page.js"])


def _heading(workdir: Path, notes: _Object) -> str:
    recipe = notes.get("recipe", "")
    # Functions that a program gives to a Trainer have no file, and so no name.
    in_file = split_path(recipe)[0].endswith(".py")
    return short_name(recipe) if in_file else workdir.absolute().name


def _resumed(notes: _Object) -> str:
    if not (steps := notes.get("resumed")):
        return ""
    listed = ", ".join(map(str, steps))
    return f" · resumed at {'steps' if len(steps) > 1 else 'step'} {listed}"


def _stopped(notes: _Object) -> str:
    stopped = notes.get("stopped")
    if not stopped:
        return ""
    return f" · stopped at step {stopped['step']}: {stopped['why']}"


def _references(notes: _Object) -> dict[str, float]:
    given = notes.get("references", {})
    return {str(name): float(value) for name, value in given.items()}


def _samples(workdir: Path, samples: _Object) -> str:
    sections = []
    for name, shown in samples.items():
        heading = f"{_title(name)} at step {shown['step']}"
        sections.append(section(heading, _sample(workdir, shown)))
    return "".join(sections)


def _generated(texts: Sequence[_Object]) -> str:
    """Returns some texts of the first evaluation to the last."""
    count = min(len(texts), _SHOWN)
    chosen = [
        texts[round(i * (len(texts) - 1) / max(count - 1, 1))] for i in range(count)
    ]
    parts = []
    for one in chosen:
        heading = f"step {one['step']}"
        if one["eval_loss"] is not None:
            heading += f", validation loss {one['eval_loss']:.4f}"
        text = escape(one["text"])
        parts.append(f"<h3>{escape(heading)}</h3><pre>{text}</pre>")
    return "".join(parts)


def _sample(workdir: Path, shown: _Object) -> str:
    """Returns a text, or a picture within the page."""
    if "text" in shown:
        return f"<pre>{escape(shown['text'])}</pre>"
    name = shown["picture"]
    try:
        data = base64.b64encode(read_picture(workdir, name)).decode()
    except FileNotFoundError:
        return f"<p>{escape(str(workdir / name))} is missing</p>"
    return f'<img class="picture" alt="" src="data:image/png;base64,{data}">'


def _config(config: _Object, changed: Collection[str]) -> str:
    """Returns the keys that differ from the recipe's, and all of them, folded."""
    rows = [(key, str(value)) for key, value in flatten(config).items()]
    return table(row for row in rows if row[0] in changed) + folded(
        f"All {len(rows)} keys", table(rows)
    )


def _lines(series: _Series, name: str) -> dict[str, Points]:
    names = {
        "training": name,
        "validation": f"eval_{name}",
        "validation of averages": f"eval_ema_{name}",
    }
    return {line: series[x].means if x in series else [] for line, x in names.items()}


def _charts(series: _Series) -> Iterator[str]:
    for name, values in series.items():
        own = name.removeprefix("eval_")
        if _is_score(name, series) and (chart := line_chart(own, _lines(series, own))):
            yield chart
        if name.startswith(_NO_CHART_PREFIX) or name in ("loss", *_NO_CHART):
            continue
        if name.endswith(_NO_CHART_SUFFIX):
            continue
        if name == "mfu" or name.endswith("_per_second"):
            usual = _usual(values.samples)
            left_out = (len(values.samples) - len(usual)) * values.group
            note = f" ({left_out} of {values.count} steps are outliers, not drawn)"
            if usual:
                title = _title(name) + note * bool(left_out)
                yield line_chart(title, {"training": usual})
            continue
        if chart := line_chart(_title(name), _lines(series, name)):
            yield chart


def _is_score(name: str, series: _Series) -> bool:
    """Returns whether evaluations alone have a metric, as they have a task's."""
    if not name.startswith("eval_") or name.startswith("eval_ema_"):
        return False
    return name.removeprefix("eval_") not in ("loss", *series)


def _usual(points: Points) -> Points:
    """Returns the rates that training has, without those of stalls and wrong clocks.

    One of them would make the curve of all others flat.
    """
    if len(points) < 4:
        return points
    lower, _, upper = statistics.quantiles((y for _, y in points), method="inclusive")
    return [(x, y) for x, y in points if lower / 2 <= y <= 2 * upper]


def _results(
    series: _Series, references: Mapping[str, float], best: Best | None
) -> dict[str, str]:
    """Returns the run's final numbers as text, the most important first."""

    def samples(name: str) -> Points:
        return series[name].samples if name in series else []

    def median(name: str) -> float | None:
        values = [value for _, value in samples(name)]
        return statistics.median(values) if values else None

    results = {}
    if best is not None:
        results[f"best {best.metric}, at step {best.step}"] = f"{best.value:.4f}"
    if evaluations := samples("eval_loss"):
        step, loss = evaluations[-1]
        results[f"validation loss at step {step}"] = f"{loss:.4f}"
        for name, reference in references.items():
            side = "below" if loss < reference else "above"
            name = f"{name}; validation is {abs(loss - reference):.4f} {side}"
            results[name] = f"{reference:.4f}"
    for name in series:
        if _is_score(name, series) and (scores := samples(name)):
            step, score = scores[-1]
            results[f"{name.removeprefix('eval_')} at step {step}"] = f"{score:.4f}"
    if losses := samples("loss"):
        step, loss = losses[-1]
        results[f"training loss at step {step}"] = f"{loss:.4f}"
    for _, skipped in samples("skipped_steps")[-1:]:
        results["steps without an update"] = f"{skipped:.0f}"
    for _, seconds in samples("time_to_first_step")[-1:]:
        results["time to first step"] = f"{seconds:.1f} s"
    for name in sorted(name for name in series if name.endswith("_per_second")):
        if (speed := median(name)) is not None:
            results[f"{_title(name).lower()}, median"] = format_count(speed)
    if (utilisation := median("mfu")) is not None:
        results["MFU, median"] = f"{utilisation:.1%}"
    waits, times = series.get("data_wait"), series.get("step_time")
    if waits and times and times.total > 0:
        share = waits.total / times.total
        results["of the step time was spent waiting for data"] = f"{min(share, 1):.1%}"
    if (blocked := median("checkpoint_blocked")) is not None:
        name = "held up training for a save, median"
        if step_time := median("step_time"):
            share = blocked / step_time
            many, part = f"{share:.1f} steps", f"{share:.1%} of a step's time"
            name += f"; as long as {many}" if share >= 1 else f"; {part}"
        results[name] = format_wait(blocked)
    return results


def _title(name: str) -> str:
    name = name.replace("_per_second", " per second").replace("_", " ")
    named = {
        "mfu": "MFU",
        "grad norm": "Gradient norm",
        "data wait": "Waited for data, s",
    }
    return named.get(name, name.capitalize())
