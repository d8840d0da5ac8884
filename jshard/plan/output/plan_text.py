"""A plan as text for the terminal."""

import textwrap
from collections.abc import Iterator, Sequence

from jshard.plan.cost.assumptions import assumed
from jshard.plan.cost.phases import Phases
from jshard.plan.cost.streams import COLLECTIVES, COMPUTE, OF_COPIES
from jshard.plan.cost.ticks import Pipeline
from jshard.plan.cost.timeline import Timeline
from jshard.plan.cost.traffic import Traffic
from jshard.plan.memory.breakdown import Memory, Part
from jshard.plan.planning import Plan, RecipePlan
from jshard.system.compat import xla_options
from jshard.system.formatting import format_bytes, format_count, format_seconds

GAPS = 10


def lines(plan: Plan) -> Iterator[str]:
    """Yields the lines of the report."""
    yield heading(plan)
    yield plan.about
    for note in plan.notes:
        yield from textwrap.wrap(f"note: {note}", 96, subsequent_indent="    ")
    if plan.module.imbalance > 1:
        times = f"{plan.module.imbalance:g} times an even share"
        yield f"experts: a device sends at most {times} of its tokens to one expert"
    if isinstance(plan, RecipePlan) and plan.chosen:
        yield f"chosen: {plan.chosen}"
    yield ""
    rows = [("MEMORY per device", "", "", ""), *memory_rows(plan.memory)]
    yield from columns(rows, "<>><")
    if plan.pipeline is not None:
        yield activations(plan.pipeline)
    yield ""
    if plan.traffic.rows:
        names = ("TRAFFIC", "dtype", "over", "count", "per device", "at least", "busy")
        yield from columns([names, *traffic_rows(plan.traffic)], "<<<>>>>")
        if plan.traffic.network_bytes:
            yield network(plan.traffic)
    else:
        yield "TRAFFIC         none"
    yield ""
    if plan.timeline is None:
        why = "the speed of these devices is unknown"
        why = why if plan.gpu is None else "the program runs too many instructions"
        yield f"TIMELINE        none: {why}"
    else:
        yield from _timeline(plan, plan.timeline)
    if plan.options:
        yield ""
        yield "OPTIONS of XLA"
        for name, value, reason in options(plan):
            yield f"{name}={value}"
            yield from textwrap.wrap(
                reason, 96, initial_indent="    ", subsequent_indent="    "
            )
    if plan.gpu is not None:
        yield ""
        model = assumed(plan.gpu.constants)
        yield from textwrap.wrap(f"MODEL: {model}; docs/plan.md has its limits", 96)
    yield ""
    yield _verdict(plan)


def heading(plan: Plan) -> str:
    """Returns "llama:3-8b on 64 x NVIDIA H100 80GB HBM3", for example."""
    return f"{plan.name} on {plan.devices} x {plan.device_kind}"


def _verdict(plan: Plan) -> str:
    """Returns "fits: 9.6 of 75.2 GiB", for example."""
    total, usable = plan.memory.total, plan.memory.usable
    about = "" if plan.memory.exact else "about "
    if usable is None:
        return f"needs {about}{format_bytes(total)} per device; no GPU to compare with"
    does = "fits" if plan.fits else "does not fit"
    needs = f"{total / 2**30:.1f}" if total >= 2**30 else format_bytes(total)
    return f"{does}: {about}{needs} of {usable / 2**30:.1f} GiB"


def options(plan: Plan) -> list[tuple[str, object, str]]:
    """Returns (name, value, reason) of each XLA option."""
    known = xla_options.OPTIONS | xla_options.FLOAT8_OPTIONS
    known |= xla_options.DETERMINISTIC
    other = (None, "asked for by config.compiler_options")
    return [
        (name, value, known.get(name, other)[1]) for name, value in plan.options.items()
    ]


def memory_rows(memory: Memory) -> Iterator[tuple[str, str, str, str]]:
    """Yields rows of a table: part, bytes, share of the total, contents."""
    parts = [part for part in memory.parts if part.bytes]
    left = memory.unexplained
    rest = Part("unexplained", left, "")
    if left < 0:  # XLA reserves less than what is alive would take side by side
        rest = Part("shared", left, "values that are in the memory of later results")
    for part in (*parts, rest):
        share, sign = f"{part.bytes / memory.total:.1%}", "-" * (part.bytes < 0)
        yield part.name, f"{sign}{format_bytes(abs(part.bytes))}", share, part.what
    fits = ""
    if memory.usable is not None:
        does = "fits in" if memory.fits else "does not fit in"
        fits = f"{does} the {format_bytes(memory.usable)} that the GPU leaves free"
    yield "total", format_bytes(memory.total), "", fits
    if memory.host:
        kinds = ", ".join(f"{p.name} {format_bytes(p.bytes)}" for p in memory.host)
        number = memory.devices_a_host
        shared = format_bytes(memory.host_bytes * number)
        of = f"pinned per device: {kinds}; {shared} for the {number} of a host"
        yield "host", format_bytes(memory.host_bytes), "", of


def network(traffic: Traffic) -> str:
    """Describes the bytes that arrive through a device's own network port."""
    part, total = format_bytes(traffic.network_bytes), format_bytes(traffic.bytes)
    return f"over the network: {part} of {total} per device, through its own port"


def traffic_rows(traffic: Traffic) -> Iterator[tuple[str, ...]]:
    """Yields rows of a table: kind, dtype, link, count, bytes, least bytes, time."""
    left = dict(traffic.least)
    for row in traffic.rows:
        least = left.pop((row.kind, row.dtype), None)
        yield (
            row.kind,
            row.dtype,
            f"{row.link}, {row.group} devices",
            f"{row.count:,}",
            format_bytes(row.bytes),
            "" if least is None else format_bytes(least),
            "" if row.seconds is None else format_seconds(row.seconds),
        )
    for (kind, dtype), least in left.items():  # in another dtype, or not at all
        yield kind, dtype, "", "0", "0 B", format_bytes(least), ""


def _timeline(plan: Plan, timeline: Timeline) -> Iterator[str]:
    yield from columns([("TIMELINE", "", ""), *_facts(plan, timeline)], "<><")
    phases = Phases(timeline).seconds().items()
    yield ""
    yield "KERNELS by phase"
    yield from columns([(format_seconds(s), name) for name, s in phases], "><")
    if timeline.gaps:
        yield ""
        yield "GAPS in which no kernel runs, the longest first"
        names = ("at", "lasts", "waits for", "between")
        yield from columns([names, *gap_rows(timeline)], ">><<")


def _facts(plan: Plan, timeline: Timeline) -> Iterator[tuple[str, str, str]]:
    """Yields rows of a table of a step's times: name, value, remark."""
    speed = ""
    if plan.items_per_second is not None:
        one = format_count(plan.items_per_second / plan.devices)
        speed = f"{format_count(plan.items_per_second)} {plan.unit}/s, {one} per GPU"
    floor = "with all communication hidden"
    seconds, exposed = timeline.seconds, timeline.exposed
    if plan.mfu is not None:
        speed += f", MFU {plan.mfu:.1%}"
        floor += f", MFU {plan.mfu * seconds / timeline.floor:.1%}"
    yield "step", format_seconds(seconds), speed
    yield "", "", step_range(plan) or f"not confirmed for {plan.kind}"
    yield "floor", format_seconds(timeline.floor), floor
    sent = format_seconds(timeline.busy(COLLECTIVES))
    share = f"{exposed / seconds:.1%} of the step, of {sent} of collectives"
    yield "exposed", format_seconds(exposed), share
    if plan.pipeline is not None:
        yield "bubble", *bubble(plan, plan.pipeline, timeline)
        sent = "of the exposed time: what stages send each other after each tick"
        yield "sends", format_seconds(timeline.exposed_sends), sent
    if timeline.stragglers:
        late = "of the step: waiting for the slowest host"
        yield "stragglers", format_seconds(timeline.stragglers), late
    kernels = format_seconds(timeline.busy(COMPUTE))
    yield "kernels", kernels, "on the compute stream"
    copied = sum(map(timeline.busy, OF_COPIES))
    if copied:
        waits = format_seconds(timeline.waits_for_copies)
        yield "copies", format_seconds(copied), f"beside kernels; {waits} waited for"
    for target, calls in timeline.unknown.items():
        yield (
            "unknown",
            f"{calls:,} x",
            f"{target}: timed by its memory traffic alone",
        )


def step_range(plan: Plan) -> str:
    """Returns "660.1 ms to 780.3 ms, given published runs"; "" if there are none."""
    if plan.seconds_range is None:
        return ""
    low, high = map(format_seconds, plan.seconds_range)
    return f"{low} to {high}, given published runs"


def bubble(plan: Plan, pipeline: Pipeline, timeline: Timeline) -> tuple[str, str]:
    """Returns ("12.1 %", what it is of the step), in words."""
    share, number = f"{timeline.bubble:.1%}", pipeline.number
    alone = f"by the schedule alone {pipeline.bubble:.1%} of {len(pipeline.does)} ticks"
    waits = "of the step a device waits for other stages, on average"
    which = (
        f"the timeline is that of stage {timeline.stage + 1} of {number}, the busiest"
    )
    return share, f"{waits} ({alone}); {which}"


def activations(pipeline: Pipeline) -> str:
    """Says whose activations stages keep, and that they reserve the same."""
    first, last = pipeline.alive[0], pipeline.alive[-1]
    of = "of a stage" if pipeline.chunk.max() else "of its stage"
    return (
        "all stages run the same program, so every device reserves the same memory; "
        f"the first keeps activations {of} for {first} micro-batches, the last for "
        f"{last}"
    )


def gap_rows(timeline: Timeline) -> Iterator[tuple[str, str, str, str]]:
    """Yields rows of a table: start, duration, what it waits for, kernels around it."""
    phases = Phases(timeline)
    for gap in timeline.largest_gaps(GAPS):
        what, size = gap.waits_for, f" of {format_bytes(gap.waits_for.bytes)}"
        yield (
            format_seconds(gap.start),
            format_seconds(gap.seconds),
            f"{what.kind}{size if what.bytes else ''} ({phases.of(what)})",
            f"{phases.words(gap.before)} | {phases.words(gap.after)}",
        )


def columns(rows: Sequence[tuple[str, ...]], sides: str) -> Iterator[str]:
    """Aligns the cells of each column to its side, "<" or ">"."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0] = max(widths[0], 14 if sides[0] == "<" else 9)
    for row in rows:
        cells = zip(row, sides, widths, strict=True)
        yield "  ".join(f"{cell:{side}{width}}" for cell, side, width in cells).rstrip()
