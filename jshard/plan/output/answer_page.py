"""The answers to "which GPUs, how many, how long and how much" as a page."""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from jshard.plan.output.answer_text import ESTIMATED, HEADING, nothing, row, title
from jshard.plan.search.answers import Answer, Question, front
from jshard.system.formatting import format_count
from jshard.system.pages.charts import Axes, element
from jshard.system.pages.page import document, note, section, table

_WIDTH, _HEIGHT = 720, 420  # px; the page scales it
_BOX = (70.0, _WIDTH - 60.0, 16.0, _HEIGHT - 44.0)


def render(
    question: Question,
    answers: Sequence[Answer],
    unit: str,
    command: Callable[[Answer], str],
    heading: str,
) -> str:
    """Renders the page: a picture of days and cost, a table, and commands."""
    found = [answer for answer in answers if answer.best]
    best = front(question, answers)
    parts = []
    if found:
        parts.append(section("Days against cost", _picture(question, found, best)))
    rows = [row(question, answer) for answer in found]
    cells = [cell.format(unit=unit) for cell in HEADING]
    fitting = table(rows, cells, "numbers answers") or note("none")
    if any(answer.best and answer.best.estimated for answer in found):
        fitting += note(ESTIMATED)
    others = table([(x.topology, x.why) for x in answers if not x.best])
    parts.append(section("The fastest way to train on each", fitting + others))
    commands = [(answer.topology, command(answer)) for answer in best]
    none = note(nothing(question, answers)) if not best else ""
    parts.append(section("Commands of those that no other beats", table(commands)))
    styles = ["page.css", "plan.css"]
    body = [*parts, none]
    return document(
        heading, title(question, unit), body, styles, [], "jshard.plan.output"
    )


def _picture(
    question: Question, found: Sequence[Answer], best: Sequence[Answer]
) -> str:
    """Draws a line for each GPU, a dot for each number of them."""
    priced = all(answer.cost is not None for answer in found)

    def cost(answer: Answer) -> float:
        return answer.cost[0] if priced and answer.cost else answer.gpu_hours

    days = [answer.days[0] for answer in found]
    costs = [cost(answer) for answer in found]
    axes = Axes(_BOX, _around(costs), _around(days), log=True)
    parts = axes.grid(_decades(axes.x), _decades(axes.y))
    groups: dict[str, list[Answer]] = collections.defaultdict(list)
    for answer in found:
        groups[answer.kind].append(answer)
    chosen = {answer.topology for answer in best}
    for number, group in enumerate(groups.values()):
        kind = f"line-{number % 8}"
        points = [(cost(answer), answer.days[0]) for answer in group]
        parts.append(axes.line(points, class_=f"line {kind}"))
        for answer, (x, y) in zip(group, points, strict=True):
            hover = f"{answer.topology}: {y:,.1f} days, {format_count(x)}"
            size = 6 if answer.topology in chosen else 3
            dot = {"cx": axes.across(x), "cy": axes.up(y), "r": size}
            inside = element("title", escape(hover))
            guess = " guess" if answer.best and answer.best.estimated else ""
            parts.append(element("circle", inside, class_=f"dot {kind}{guess}", **dot))
            at = {"x": axes.across(x) + 8, "y": axes.up(y) - 6}
            parts.append(element("text", str(answer.gpus), class_="tick", **at))
    currency = question.prices.currency or "cost"
    below = currency if priced else "GPU hours"
    corner = {"x": _WIDTH - 8, "y": _HEIGHT - 8, "text_anchor": "end"}
    parts.append(element("text", escape(below), class_="tick", **corner))
    parts.append(element("text", "days", class_="tick", x=8, y=12))
    picture = element(
        "svg",
        "".join(parts),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label="Days of training against their cost, for each GPU",
    )
    keys = "".join(
        f'<span class="key key-{number % 8}">{escape(name)}</span>'
        for number, name in enumerate(groups)
    )
    said = note(
        "Numbers are GPUs. Large dots: no other takes fewer days for less. Hollow dots "
        "are estimated."
    )
    inside = f"<figcaption>{keys}</figcaption>{picture}"
    return f'<figure class="wide answer">{inside}</figure>{said}'


def _around(values: Sequence[float]) -> tuple[float, float]:
    """Returns the ends of a logarithmic axis that has all values inside."""
    low, high = min(values), max(values)
    room = max((high / low) ** 0.08, 1.2)
    return low / room, high * room


def _decades(span: tuple[float, float]) -> Mapping[float, str]:
    """Returns round numbers on a logarithmic axis, with their labels."""
    first, last = (math.floor(math.log10(value)) for value in span)
    values = [m * 10.0**n for n in range(first, last + 1) for m in (1, 2, 5)]
    inside = [value for value in values if span[0] <= value <= span[1]]
    return {value: format_count(value) for value in inside}
