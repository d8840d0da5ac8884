"""A plan as one self-contained HTML page: an interactive timeline, and tables."""

from collections.abc import Iterator
from html import escape
from typing import Any

from jshard.plan.cost.assumptions import assumed
from jshard.plan.cost.kernel_work import ATTENTION, LIMITS, MATRIX, MEMORY
from jshard.plan.cost.phases import Phases
from jshard.plan.cost.streams import COMPUTE, Event
from jshard.plan.cost.timeline import Timeline
from jshard.plan.memory.breakdown import Memory
from jshard.plan.output import comparison_text, plan_text, schedule_picture
from jshard.plan.planning import Plan
from jshard.plan.trace.comparison import Comparison
from jshard.system.formatting import format_bytes, format_count, format_seconds
from jshard.system.pages.charts import script_json
from jshard.system.pages.page import (
    bar,
    document,
    folded,
    note,
    section,
    table,
    tiles,
)

KINDS = (
    MATRIX,
    ATTENTION,
    MEMORY,
    "all-gather",
    "reduce-scatter",
    "other collectives",
    "copy",
)
_NO_CONTENTION = "Kernels, collectives and copies do not slow each other down."


def render(plan: Plan, found: Comparison | None = None) -> str:
    """Renders the page. What a trace shows stands below the plan's timeline."""
    return document(
        plan_text.heading(plan),
        plan.about,
        [_tiles(plan), *(section(*part) for part in _sections(plan, found))],
        ["page.css", "plan.css"],
        ["plan.js"] if plan.timeline is not None else [],
        package="jshard.plan.output",
    )


def _sections(plan: Plan, found: Comparison | None) -> Iterator[tuple[str, str]]:
    """Yields headings, and content as HTML."""
    timeline, traffic = plan.timeline, plan.traffic
    memory = _memory(plan.memory)
    if plan.notes:
        notes = "".join(note(f"{text[0].upper()}{text[1:]}.") for text in plan.notes)
        yield "What this plan does not know", notes
    if plan.pipeline is not None:
        memory += note(f"{plan_text.activations(plan.pipeline).capitalize()}.")
        if timeline is not None:
            idle = " ".join(plan_text.bubble(plan, plan.pipeline, timeline))
            yield "Pipeline", schedule_picture.render(timeline) + note(f"{idle}.")
    if timeline is not None:
        yield "Timeline", "".join(_charts(timeline, found))
    if found is not None:
        yield "Trace beside the plan", table(comparison_text.rows(found))
    yield "Memory per device", memory
    heading = ["", "dtype", "over", "count", "bytes", "at least", "busy"]
    rows = table(plan_text.traffic_rows(traffic), heading, "grid-table")
    if traffic.network_bytes:
        rows += note(f"{plan_text.network(traffic)}.")
    yield "Traffic per device and step", rows or note("none")
    if timeline is not None:
        heading = ["at", "lasts", "waits for", "between"]
        gaps = table(plan_text.gap_rows(timeline), heading, "grid-table")
        yield "Where no kernel runs", gaps or note("none: there is no gap")
        phases = Phases(timeline).seconds().items()
        rows = [(name, format_seconds(seconds)) for name, seconds in phases]
        yield "Kernels by phase", table(rows)
    if plan.options:
        rows = [
            (f"{name}={value}", why) for name, value, why in plan_text.options(plan)
        ]
        given = f"{len(rows)} options for this step"
        yield "XLA options", folded(given, table(rows, kind="options"))
    if plan.gpu is not None:
        model = assumed(plan.gpu.constants)
        yield "Model", note(f"{model}. {_NO_CONTENTION}")


def _tiles(plan: Plan) -> str:
    figures = []
    if plan.timeline is not None:
        seconds, exposed = plan.timeline.seconds, plan.timeline.exposed
        share = f"exposed communication, {exposed / seconds:.1%} of the step"
        sure = plan_text.step_range(plan) or f"not confirmed for {plan.kind}"
        figures = [
            (format_seconds(seconds), f"per step ({sure})"),
            *([] if plan.mfu is None else [(f"{plan.mfu:.1%}", "MFU")]),
            *_rates(plan.items_per_second, plan.unit, plan.devices),
            (format_seconds(exposed), share),
        ]
        if plan.pipeline is not None:
            idle = "bubble: a device waits for other stages"
            figures.append((f"{plan.timeline.bubble:.1%}", idle))
    of = "per device" if plan.memory.exact else "per device, about"
    if plan.memory.usable is not None:
        fits = "fits" if plan.fits else "does not fit"
        of = f"of {format_bytes(plan.memory.usable)} usable: {fits}"
    figures.append((format_bytes(plan.memory.total), of))
    return tiles(figures)


def _rates(
    per_second: float | None, unit: str, devices: int
) -> Iterator[tuple[str, str]]:
    if per_second is not None:
        yield format_count(per_second / devices), f"{unit}/s per GPU"
        yield format_count(per_second), f"{unit}/s"


def _charts(timeline: Timeline, found: Comparison | None) -> Iterator[str]:
    """Yields the legend, charts of the step and of a few layers, and their data."""
    data = _data(timeline, Phases(timeline), found)
    phases = Phases(timeline)
    used = {_kind(event.kind) for event in timeline.events}
    keys = "".join(
        f'<span class="kind kind-{i}">{escape(name)}</span>'
        for i, name in enumerate(KINDS)
        if i in used
    )
    gap = '<span class="kind kind-gap">no kernel runs</span>'
    yield f'<p class="legend">{keys}{gap}</p>'
    views = {
        "The complete step": (0.0, data["seconds"] / 1e6),
        "A few layers of the forward": phases.layers("forward"),
        "A few layers of the backward": phases.layers("backward"),
    }
    for title, view in views.items():
        if view is not None:
            start, end = (1e6 * seconds for seconds in view)
            yield (
                f'<figure class="timeline" data-start="{start:.2f}" '
                f'data-end="{end:.2f}"><figcaption>{title}'
                '<span class="buttons"><button data-zoom="0.5" title="closer">+'
                '</button><button data-zoom="2" title="farther">&minus;</button>'
                "<button data-reset>Reset</button></span></figcaption>"
                f'<canvas tabindex="0" role="img" aria-label="{title}: '
                'streams over time"></canvas></figure>'
            )
    yield note(
        "Drag or press arrow keys to move; zoom with Ctrl and the wheel, + and -, "
        "or a double click. Point at a box for details."
    )
    if found is not None:
        number, device = found.shown
        step = found.steps.numbers[number]
        yield note(f"Traced: step {step} on device {device}, below the plan.")
    written = script_json(data)
    yield f'<script type="application/json" id="timeline">{written}</script>'


def _data(
    timeline: Timeline, phases: Phases, found: Comparison | None
) -> dict[str, Any]:
    """Returns events as rows of numbers that refer to a table of distinct texts."""
    streams = timeline.streams
    shown = [(streams.index(e.stream), e) for e in timeline.events]
    end = timeline.seconds
    if found is not None:
        traced = _traced(timeline, found)
        streams = [*streams, *(f"traced {x}" for x in timeline.streams)]
        shown += [(streams.index(f"traced {e.stream}"), e) for e in traced]
        end = max([end, *(e.end for e in traced)])
    texts: dict[str, int] = {}

    def text(value: str) -> int:
        return texts.setdefault(value, len(texts))

    def us(seconds: float) -> float:
        return round(seconds * 1e6, 2)

    events = [
        [
            stream,
            _kind(e.kind),
            us(e.start),
            us(e.seconds),
            text(phases.words(e).rpartition(" (")[0]),
            text(phases.of(e)),
            text(e.source),
            text(e.name),
            e.bytes,
            round(e.flops),
        ]
        for stream, e in shown
    ]
    gaps = [[us(g.start), us(g.seconds), text(g.waits_for.kind)] for g in timeline.gaps]
    return {
        "seconds": us(end),
        "streams": streams,
        "events": events,
        "gaps": gaps,
        "texts": list(texts),
    }


def _traced(timeline: Timeline, found: Comparison) -> list[Event]:
    """Returns what ran in the shown step of a trace, as events of a plan."""
    planned = {event.name: event for event in timeline.events}
    number, device = found.shown
    ran = found.steps.ran[number][device]
    begin = min(x.start for x in ran.values())
    unknown = Event("", COMPUTE, MEMORY, 0.0, 0.0, "", 0)
    return [
        planned.get(place.name, unknown)._replace(
            name=place.name, start=x.start - begin, end=x.end - begin
        )
        for place, x in ran.items()
    ]


def _kind(kind: str) -> int:
    if LIMITS.get(kind) in ("matmul", "float8", "mxfp8", "nvfp4"):
        kind = MATRIX
    return KINDS.index(kind if kind in KINDS else "other collectives")


def _memory(memory: Memory) -> str:
    """Returns a bar of the parts, as shares of the card, and a table."""
    full = max(memory.usable or 0, memory.total)
    sizes = [(part.name, part.bytes) for part in memory.parts if part.bytes > 0]
    parts = [(name, size, format_bytes(size)) for name, size in sizes]
    marks = [f"part-{number}" for number in range(len(parts))]
    rows = plan_text.memory_rows(memory)
    drawn = bar(parts, full, marks, memory.usable)
    return drawn + table(rows, (), "numbers", marks)
