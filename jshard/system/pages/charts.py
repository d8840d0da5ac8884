"""Line charts as SVG elements."""

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 34  # margins, in px
_SMALL, _LARGE = (320, 210), (940, 340)  # px; the page scales them
_MOST = {_SMALL: 150, _LARGE: 600}  # points that a screen can show


@dataclasses.dataclass(frozen=True)
class Axes:
    """The area of a plot and the values at its edges."""

    box: tuple[float, float, float, float]  # left, right, top and bottom, in px
    x: tuple[float, float]  # the values at the left and right edge
    y: tuple[float, float]  # the values at the bottom and top edge
    log: bool = False  # whether both axes are logarithmic

    def across(self, value: float) -> float:
        """Returns the position of an x value, in px."""
        left, right, _, _ = self.box
        return round(left + self._share(value, *self.x) * (right - left), 1)

    def up(self, value: float) -> float:
        """Returns the position of a y value, in px."""
        _, _, top, bottom = self.box
        return round(bottom - self._share(value, *self.y) * (bottom - top), 1)

    def _share(self, value: float, low: float, high: float) -> float:
        if self.log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return (value - low) / (high - low)

    def level(self, y: float, **attributes: object) -> str:
        """Returns a horizontal line at a y value."""
        left, right, _, _ = self.box
        return element("path", **attributes, d=f"M{left} {self.up(y)}H{right}")

    def grid(self, x: Mapping[float, str], y: Mapping[float, str]) -> list[str]:
        """Returns labels of x and y values, and lines at the y values.

        An x value outside the axes is left out.
        """
        left, _, _, bottom = self.box
        parts = []
        for value, label in y.items():
            parts.append(self.level(value, class_="grid"))
            parts.append(_tick(label, left - 8, self.up(value) + 4, "end"))
        for value, label in x.items():
            if self.x[0] <= value <= self.x[1]:
                parts.append(_tick(label, self.across(value), bottom + 18, "middle"))
        return parts

    def line(self, points: Points, **attributes: object) -> str:
        """Returns a line through points."""
        corners = "L".join(f"{self.across(x)} {self.up(y)}" for x, y in points)
        return element("path", **attributes, d=f"M{corners}")

    def dot(self, x: float, y: float, **attributes: object) -> str:
        """Returns a mark at a point."""
        return element("circle", **attributes, cx=self.across(x), cy=self.up(y), r=3)


def element(tag: str, content: str = "", /, **attributes: object) -> str:
    """Returns an SVG element; `text_anchor` sets text-anchor, and `class_` class."""
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{given}>{content}</{tag}>" if content else f"<{tag}{given}/>"


def _tick(label: str, x: float, y: float, anchor: str) -> str:
    return element("text", escape(label), class_="tick", x=x, y=y, text_anchor=anchor)


def line_chart(
    title: str,
    series: Mapping[str, Points],
    *,
    references: Mapping[str, float] | None = None,
    wide: bool = False,
) -> str:
    """Draws lines over steps.

    Args:
      title: The chart's heading, with the unit.
      series: (step, value) points in order of steps, by the line's name.
      references: Values to show as labelled horizontal lines.
      wide: Whether the chart takes the page's full width. It is drawn twice: phones
        show the one whose text they can show in a size to read.

    Returns:
      A `<figure>`, or "" if there are no points. It embeds the data from which
      `page.js` shows the values under the pointer.
    """
    series = {name: points for name, points in series.items() if points}
    if not series:
        return ""
    legend = "".join(
        f'<span class="key key-{index}">{escape(name)}</span>'
        for index, name in enumerate(series)
        if len(series) > 1
    )
    sizes = (_LARGE, _SMALL) if wide else (_SMALL,)
    drawings = "".join(_drawing(title, series, references or {}, x) for x in sizes)
    return (
        f'<figure class="{"wide" if wide else "small"}">'
        f"<figcaption>{escape(title)}{legend}</figcaption>{drawings}</figure>"
    )


def _drawing(
    title: str,
    series: Mapping[str, Points],
    references: Mapping[str, float],
    size: tuple[int, int],
) -> str:
    """Returns an `<svg>` of a size, and its data."""
    lines = {name: _thin(points, _MOST[size]) for name, points in series.items()}
    width, height = size
    steps = [step for points in lines.values() for step, _ in points]
    values = [value for points in lines.values() for _, value in points]
    first, last = min(steps), max(steps)
    y_ticks = ticks(*_span([*values, *references.values()]), 5)
    axes = Axes(
        (_LEFT, width - _RIGHT, _TOP, height - _BOTTOM),
        (first, max(last, first + 1)),
        (y_ticks[0], y_ticks[-1]),
    )
    parts = axes.grid(
        labels(ticks(first, last, 10 if size == _LARGE else 4)), labels(y_ticks)
    )
    for name, value in references.items():
        # Below the line, where a falling curve ends, except at the very bottom.
        low = axes.up(value) + 20 > height - _BOTTOM
        at = {"x": _LEFT + 6, "y": axes.up(value) + (-5 if low else 14)}
        words = f"{escape(name)} {value:.4g}"
        parts.append(axes.level(value, class_="reference"))
        parts.append(element("text", words, class_="reference-label", **at))
    for index, points in enumerate(lines.values()):
        parts.append(axes.line(points, class_=f"line line-{index}"))
        if len(points) == 1:  # a path of one point is invisible
            parts.append(axes.dot(*points[0], class_=f"dot line-{index}"))
    parts.append(_tick("step", width - _RIGHT, height - 3, "end"))
    svg = element(
        "svg",
        "".join(parts),
        viewBox=f"0 0 {width} {height}",
        class_="large" if size == _LARGE else "small",
        role="img",
        aria_label=f"{title} by step",
    )
    data = {
        "x": [*axes.x, *axes.box[:2]],
        "y": [*axes.y, axes.box[3], axes.box[2]],
        "lines": lines,
    }
    return f'{svg}<script type="application/json">{script_json(data)}</script>'


def ticks(low: float, high: float, count: int) -> list[float]:
    """Returns about `count` round numbers that enclose [low, high]."""
    rough = (high - low) / count or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def labels(values: Sequence[float]) -> dict[float, str]:
    """Returns the labels of ticks, such as "20k"."""
    largest = max(map(abs, values))
    units = ((1e9, "G"), (1e6, "M"), (1e3, "k")) if largest >= 1e4 else ()
    size, suffix = next((unit for unit in units if largest >= unit[0]), (1.0, ""))
    return {
        x: f"{x / size:g}{suffix}" if abs(x) > 1e-9 * largest else "0" for x in values
    }


def script_json(value: object) -> str:
    """Returns JSON that cannot end the `<script>` element around it."""
    return json.dumps(value).replace("<", "\\u003c")


def _thin(points: Points, most: int) -> list[tuple[float, float]]:
    """Averages neighbouring points to keep the report of a long run small."""
    group = math.ceil(len(points) / most)
    groups = [points[i : i + group] for i in range(0, len(points), group)]
    return [(part[-1][0], statistics.fmean(y for _, y in part)) for part in groups]


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    margin = abs(low) / 10 or 1.0  # puts a constant line in the middle
    return low - margin, high + margin
