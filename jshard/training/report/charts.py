"""Line charts as inline SVG, for pages that need no network."""

import json
import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 34  # margins, in px


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
    x_ticks = ticks(min(steps), max(steps), 10 if wide else 4)
    y_ticks = ticks(*_span([*values, *references.values()]), 5)
    x_low, x_high = min(steps), max(max(steps), min(steps) + 1)
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def x(step: float) -> float:
        plot = width - _LEFT - _RIGHT
        return round(_LEFT + (step - x_low) / (x_high - x_low) * plot, 1)

    def y(value: float) -> float:
        plot = height - _TOP - _BOTTOM
        return round(_TOP + (y_high - value) / (y_high - y_low) * plot, 1)

    parts = []
    for tick in y_ticks:
        parts.append(f'<path class="grid" d="M{_LEFT} {y(tick)}H{width - _RIGHT}"/>')
        label = f'<text class="tick" x="{_LEFT - 8}" y="{y(tick) + 4}" '
        parts.append(f'{label}text-anchor="end">{_label(tick, y_ticks)}</text>')
    for tick in x_ticks:
        if x_low <= tick <= x_high:
            label = f'<text class="tick" x="{x(tick)}" y="{height - _BOTTOM + 18}" '
            parts.append(f'{label}text-anchor="middle">{_label(tick, x_ticks)}</text>')
    for name, value in references.items():
        # Below the line, where a falling curve is last; above it at the very bottom.
        low = y(value) + 20 > height - _BOTTOM
        label_y = y(value) + (-5 if low else 14)
        parts.append(
            f'<path class="reference" d="M{_LEFT} {y(value)}H{width - _RIGHT}"/>'
            f'<text class="reference-label" x="{_LEFT + 6}" y="{label_y}">'
            f"{escape(name)} {value:.4g}</text>"
        )
    for index, points in enumerate(lines.values()):
        corners = "L".join(f"{x(step)} {y(value)}" for step, value in points)
        parts.append(f'<path class="line line-{index}" d="M{corners}"/>')
        if len(points) == 1:  # a path of one point is invisible
            step, value = points[0]
            dot = f'cx="{x(step)}" cy="{y(value)}" r="3"'
            parts.append(f'<circle class="dot line-{index}" {dot}/>')

    legend = "".join(
        f'<span class="key key-{index}">{escape(name)}</span>'
        for index, name in enumerate(lines)
        if len(lines) > 1
    )
    data = {
        "x": [x_low, x_high, _LEFT, width - _RIGHT],
        "y": [y_low, y_high, height - _BOTTOM, _TOP],
        "lines": lines,
    }
    return (
        f'<figure class="{"wide" if wide else "small"}">'
        f"<figcaption>{escape(title)}{legend}</figcaption>"
        f'<svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)} by step">{"".join(parts)}'
        f'<text class="tick" x="{width - _RIGHT}" y="{height - 3}" '
        'text-anchor="end">step</text></svg>'
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


def _label(tick: float, all_ticks: Sequence[float]) -> str:
    largest = max(abs(t) for t in all_ticks)
    if largest >= 1e4:
        for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if largest >= size:
                return f"{tick / size:g}{suffix}" if tick else "0"
    if largest < 1e-2:
        return f"{tick:.3g}"
    return f"{round(tick, 10):g}"
