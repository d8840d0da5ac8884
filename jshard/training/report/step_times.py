"""How long the steps of a run took, and what happened in the longest ones."""

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping

from jshard.system.pages.charts import Axes, element, labels, ticks
from jshard.system.pages.page import note, table
from jshard.training.report.save_table import format_wait

_WORST = 5
_FACTOR = math.log(1.05)  # the width of a bin, before neighbours are put together
_MOST_BINS = 40
# Width, height, and how many bins have a name; phones have the small one.
_SIZES = {"large": (940, 220, 8), "small": (320, 200, 3)}
_NOTED = 0.1  # of a step's time, from which on a part of it is named


class StepTimes:
    """The times of a run's steps, in bounded memory however long the run is."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()  # by the logarithm of the time
        self._worst: list[tuple[float, int, str]] = []  # a heap
        self._evaluated: set[int] = set()
        self._saved: set[int] = set()

    def add(self, line: Mapping[str, float | None]) -> None:
        """Adds a line of the run's metrics."""
        step, seconds = line["step"], line.get("step_time")
        assert isinstance(step, int)
        if "eval_loss" in line:
            self._evaluated.add(step)
        if "checkpoint_bytes" in line:
            self._saved.add(step)
        if seconds is None or not 0 < seconds < math.inf:
            return
        self._bins[math.floor(math.log(seconds) / _FACTOR)] += 1
        parts = {
            "waited {} for data": line.get("data_wait") or 0.0,
            "collected garbage for {}": line.get("collect_time") or 0.0,
        }
        what = [
            words.format(format_wait(x))
            for words, x in parts.items()
            if x >= _NOTED * seconds
        ]
        heapq.heappush(self._worst, (seconds, step, ", ".join(what)))
        if len(self._worst) > _WORST:
            heapq.heappop(self._worst)

    def render(self) -> str:
        """Returns a histogram and a table of the longest steps; "" without steps."""
        if not self._bins:
            return ""
        heading = ("step", "took", "what happened")
        rows = [
            (str(step), format_wait(seconds), self._happened(step, what))
            for seconds, step, what in sorted(self._worst, reverse=True)
        ]
        same = "Steps that were seen to end together share the mean of their times."
        return self._histogram() + table(rows, heading, "columns") + note(same)

    def _happened(self, step: int, what: str) -> str:
        before = {
            "first after an evaluation": step - 1 in self._evaluated,
            "a checkpoint was being written": step - 1 in self._saved,
        }
        known = [*filter(None, [what]), *(words for words, x in before.items() if x)]
        return ", ".join(known) or "no known cause"

    def _histogram(self) -> str:
        svgs = [self._drawn(size, *sizes) for size, sizes in _SIZES.items()]
        caption = "<figcaption>Steps by their time</figcaption>"
        return f'<figure class="wide">{caption}{"".join(svgs)}</figure>'

    def _drawn(self, size: str, width: int, height: int, named: int) -> str:
        bars = list(self._bars())
        most = ticks(0, max(count for _, count in bars), 4)
        box = (58.0, width - 14.0, 14.0, height - 34.0)  # in px
        axes = Axes(box, (0, len(bars)), (0, most[-1]))
        every = math.ceil(len(bars) / named)
        names: dict[float, str] = {
            i: format_wait(math.exp(_FACTOR * low))
            for i, (low, _) in enumerate(bars)
            if i % every == 0
        }
        parts = axes.grid(names, labels(most))
        for i, (_, count) in enumerate(bars):
            left, top = axes.across(i), axes.up(count)
            across = round(axes.across(i + 1) - left - 1, 1)
            up = round(box[3] - top, 1)
            at = {"x": left, "y": top, "width": across, "height": up}
            parts.append(element("rect", class_="column", **at))
        about = {"role": "img", "aria_label": "steps by their time", "class_": size}
        return element("svg", "".join(parts), viewBox=f"0 0 {width} {height}", **about)

    def _bars(self) -> Iterator[tuple[int, int]]:
        """Yields the lowest bin of each bar, and how many steps are in it."""
        first, last = min(self._bins), max(self._bins)
        group = math.ceil((last - first + 1) / _MOST_BINS)
        for low in range(first, last + 1, group):
            yield low, sum(self._bins[i] for i in range(low, low + group))
