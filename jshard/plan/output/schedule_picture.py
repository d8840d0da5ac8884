"""A pipeline's schedule as the usual picture: devices down, time across."""

import itertools
from collections.abc import Iterator

from jshard.plan.cost.ticks import Cell
from jshard.plan.cost.timeline import Timeline
from jshard.system.formatting import format_seconds
from jshard.system.pages.charts import element

ROW, LEFT, AXIS = 22, 64, 22  # px: of a device, of its name, and of the times below
NARROWEST = 9  # px of a forward, on average; a wider picture scrolls
WIDTH = 1180


def render(timeline: Timeline) -> str:
    """Returns a legend and an SVG: boxes with the numbers of micro-batches from 1."""
    boxes = list(_boxes(timeline.cells))
    devices = 1 + max(box.device for box in boxes)
    start = min(box.start for box in timeline.cells)
    end = max(box.end for box in timeline.cells)
    forwards = [box.end - box.start for box in boxes if box.way == "forward"]
    needed = NARROWEST * (end - start) / (sum(forwards) / len(forwards))
    width = max(WIDTH, round(LEFT + needed))
    scale, height = (width - LEFT) / (end - start), ROW * devices
    parts = [
        element("text", f"device {device + 1}", x=0, y=ROW * device + 15)
        for device in range(devices)
    ]
    idle = {"class_": "schedule-idle", "x": LEFT, "y": 0}
    parts.append(element("rect", **idle, width=width - LEFT, height=height))
    parts += [_box(box, start, scale) for box in boxes]
    for part in range(5):
        x, anchor = LEFT + (width - LEFT) * part / 4, ("start", "middle", "end")
        parts.append(
            element(
                "text",
                format_seconds(start + (end - start) * part / 4),
                x=round(x, 1),
                y=height + 15,
                text_anchor=anchor[(part > 0) + (part == 4)],
            )
        )
    picture = element(
        "svg",
        "".join(parts),
        viewBox=f"0 0 {width} {height + AXIS}",
        style=f"min-width: {width * 0.85:.0f}px",
        role="img",
        aria_label="What each device of a pipeline does over time",
    )
    keys = "".join(
        f'<span class="kind schedule-{way}">{way}</span>'
        for way in ("forward", "backward", "idle")
    )
    chunks = "; paler: a later stage of the device" if _stages(timeline) > 1 else ""
    note = f'<span class="kind-note">numbers are micro-batches{chunks}</span>'
    legend = f'<p class="legend">{keys}{note}</p>'
    return f'{legend}<figure class="schedule">{picture}</figure>'


def _stages(timeline: Timeline) -> int:
    return 1 + max(cell.chunk for cell in timeline.cells)


def _boxes(cells: tuple[Cell, ...]) -> Iterator[Cell]:
    """Yields what each device does, the ticks of a backward as one."""
    ordered = sorted(cells, key=lambda cell: (cell.device, cell.start))
    key = lambda cell: (cell.device, cell.way, cell.micro, cell.chunk)
    for (_, way, *_), group in itertools.groupby(ordered, key=key):
        first, *others = group
        if way:
            last = others[-1] if others else first
            yield first._replace(end=last.end)


def _box(box: Cell, start: float, scale: float) -> str:
    x, y = LEFT + (box.start - start) * scale, ROW * box.device
    width = max((box.end - box.start) * scale - 0.5, 0.5)
    name = f"{box.way} of micro-batch {box.micro + 1}, device {box.device + 1}"
    stage = f", its stage {box.chunk + 1}" if box.chunk else ""
    lasts = format_seconds(box.end - box.start)
    title = element("title", f"{name}{stage}: {lasts}")
    kind = f"schedule-{box.way} chunk-{box.chunk % 4}"
    found = title + element(
        "rect", x=round(x, 1), y=y + 1, width=round(width, 1), height=ROW - 2
    )
    number = str(box.micro + 1)
    if width > 7 * len(number) + 2:
        found += element(
            "text", number, x=round(x + width / 2, 1), y=y + 15, text_anchor="middle"
        )
    return element("g", found, class_=kind)
