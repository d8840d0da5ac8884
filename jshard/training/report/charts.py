"""Line charts as SVG: in pages that need no network, and as files."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 34  # margins, in px


@dataclasses.dataclass(frozen=True)
class Axes:
    """The area of a plot, and the values at its edges.

    Attributes:
      box: left, right, top and bottom, in px.
      x: the values at left and right.
      y: the values at bottom and top.
      log: whether both axes are logarithmic.
    """

    box: tuple[float, float, float, float]
    x: tuple[float, float]
    y: tuple[float, float]
    log: bool = False

    def across(self, value: float) -> float:
        """Where a value of x is, in px."""
        left, right, _, _ = self.box
        return round(left + self._share(value, *self.x) * (right - left), 1)

    def up(self, value: float) -> float:
        """Where a value of y is, in px."""
        _, _, top, bottom = self.box
        return round(bottom - self._share(value, *self.y) * (bottom - top), 1)

    def _share(self, value: float, low: float, high: float) -> float:
        if self.log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return (value - low) / (high - low)

    def level(self, y: float, **attributes: object) -> str:
        """A horizontal line at a value of y."""
        left, right, _, _ = self.box
        return element("path", **attributes, d=f"M{left} {self.up(y)}H{right}")

    def grid(self, x: Mapping[float, str], y: Mapping[float, str]) -> list[str]:
        """Lines at values of y, and labels of values of both, where they are inside."""
        left, _, _, bottom = self.box
        parts = []
        for value, label in y.items():
            at = {"x": left - 8, "y": self.up(value) + 4, "text_anchor": "end"}
            parts.append(self.level(value, class_="grid"))
            parts.append(element("text", escape(label), class_="tick", **at))
        for value, label in x.items():
            if self.x[0] <= value <= self.x[1]:
                x_px, y_px = self.across(value), bottom + 18
                at = {"x": x_px, "y": y_px, "text_anchor": "middle"}
                parts.append(element("text", escape(label), class_="tick", **at))
        return parts

    def line(self, points: Points, **attributes: object) -> str:
        """A line through points."""
        corners = "L".join(f"{self.across(x)} {self.up(y)}" for x, y in points)
        return element("path", **attributes, d=f"M{corners}")

    def dot(self, x: float, y: float, **attributes: object) -> str:
        """A point."""
        return element("circle", **attributes, cx=self.across(x), cy=self.up(y), r=3)


def element(tag: str, content: str = "", /, **attributes: object) -> str:
    """An SVG element; ``class_`` and ``text_anchor`` are ``class``, ``text-anchor``."""
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{given}>{content}</{tag}>" if content else f"<{tag}{given}/>"


def picture(size: tuple[int, int], label: str, style: str, parts: list[str]) -> str:
    """An SVG file.

    Args:
      size: width and height, in px.
      label: what it shows, for those who do not see it.
      style: CSS.
      parts: its elements.
    """
    content = "\n".join([f"<style>{style}</style>", *parts])
    return element(
        "svg",
        f"\n{content}\n",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {size[0]} {size[1]}",
        font_family="sans-serif",
        font_size=12,
        role="img",
        aria_label=label,
    )


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
      wide: Whether the chart takes the page's whole width.

    Returns:
      A `<figure>`, or "" when there is no point to draw. `report.js` shows values
      under the pointer from the data that it carries.
    """
    # More points than this cannot be told apart on a screen.
    most = 600 if wide else 150
    lines = {name: _thin(points, most) for name, points in series.items() if points}
    if not lines:
        return ""
    references = references or {}
    width, height = (940, 340) if wide else (320, 210)  # px; the page scales them
    steps = [step for points in lines.values() for step, _ in points]
    values = [value for points in lines.values() for _, value in points]
    first, last = min(steps), max(steps)
    x_ticks = ticks(first, last, 10 if wide else 4)
    y_ticks = ticks(*_span([*values, *references.values()]), 5)
    axes = Axes(
        (_LEFT, width - _RIGHT, _TOP, height - _BOTTOM),
        (first, max(last, first + 1)),
        (y_ticks[0], y_ticks[-1]),
    )
    parts = axes.grid(labels(x_ticks), labels(y_ticks))
    for name, value in references.items():
        # Below the line, where a falling curve is last; above it at the very bottom.
        low = axes.up(value) + 20 > height - _BOTTOM
        at = {"x": _LEFT + 6, "y": axes.up(value) + (-5 if low else 14)}
        words = f"{escape(name)} {value:.4g}"
        parts.append(axes.level(value, class_="reference"))
        parts.append(element("text", words, class_="reference-label", **at))
    for index, points in enumerate(lines.values()):
        parts.append(axes.line(points, class_=f"line line-{index}"))
        if len(points) == 1:  # a path of one point is invisible
            parts.append(axes.dot(*points[0], class_=f"dot line-{index}"))
    at = {"x": width - _RIGHT, "y": height - 3, "text_anchor": "end"}
    parts.append(element("text", "step", class_="tick", **at))
    svg = element(
        "svg",
        "".join(parts),
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=f"{title} by step",
    )
    legend = "".join(
        f'<span class="key key-{index}">{escape(name)}</span>'
        for index, name in enumerate(lines)
        if len(lines) > 1
    )
    data = {
        "x": [*axes.x, *axes.box[:2]],
        "y": [*axes.y, axes.box[3], axes.box[2]],
        "lines": lines,
    }
    return (
        f'<figure class="{"wide" if wide else "small"}">'
        f"<figcaption>{escape(title)}{legend}</figcaption>{svg}"
        f'<script type="application/json">{script_json(data)}</script></figure>'
    )


def ticks(low: float, high: float, count: int) -> list[float]:
    """Returns about `count` round numbers that enclose [low, high]."""
    rough = (high - low) / count or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def script_json(value: object) -> str:
    """Returns JSON that cannot end the `<script>` element it stands in."""
    return json.dumps(value).replace("<", "\\u003c")


def _thin(points: Points, most: int) -> list[tuple[float, float]]:
    """Averages neighbours, so that a long run's report stays small."""
    group = math.ceil(len(points) / most)
    groups = [points[i : i + group] for i in range(0, len(points), group)]
    return [
        (part[-1][0], sum(value for _, value in part) / len(part)) for part in groups
    ]


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    margin = abs(low) / 10 or 1.0  # a constant line runs through the middle
    return low - margin, high + margin


def labels(values: Sequence[float]) -> dict[float, str]:
    """What to write at ticks, as "20k"."""
    largest = max(map(abs, values))
    units = ((1e9, "G"), (1e6, "M"), (1e3, "k")) if largest >= 1e4 else ()
    size, suffix = next((unit for unit in units if largest >= unit[0]), (1.0, ""))
    return {
        x: f"{x / size:g}{suffix}" if abs(x) > 1e-9 * largest else "0" for x in values
    }
