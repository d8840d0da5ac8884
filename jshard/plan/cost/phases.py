"""What an event of a timeline is, in words: "forward, layers", "update", ...

The JAX operation that an instruction comes from tells its direction; a loop with the
weights' collectives runs over layers.
"""

import collections
from collections.abc import Mapping, Sequence

from jshard.plan.cost.timeline import COLLECTIVES, COMPUTE, Event, Timeline
from jshard.plan.hlo.source import direction

LAYERS = "layers"


class Phases:
    """Words for the events of one timeline."""

    def __init__(self, timeline: Timeline):
        self._timeline = timeline
        self._layer_loops = _layer_loops(timeline)
        self._ways = _ways(timeline, self._layer_loops)
        spans: dict[str, list[float]] = {}
        for event in timeline.events:
            if event.stream == COMPUTE and self.in_layers(event):
                span = spans.setdefault(self.way(event), [event.start, event.end])
                span[1] = max(span[1], event.end)
        self._spans: Mapping[str, list[float]] = spans

    def in_layers(self, event: Event) -> bool:
        """Whether it is in a loop over layers."""
        return any(name in self._layer_loops for name, _ in event.loops)

    def way(self, event: Event) -> str:
        """What it is part of, as ``direction`` says; in a loop over layers, the loop's.

        Of some instructions in it XLA keeps no source.
        """
        name = next((x for x, _ in event.loops if x in self._ways), None)
        return direction(event.source) if name is None else self._ways[name]

    def of(self, event: Event) -> str:
        """As "forward, layers", "backward, before the layers", "update"."""
        way = self.way(event)
        if self.in_layers(event):
            return f"{way}, {LAYERS}"
        if way not in self._spans:
            return way
        start, end = self._spans[way]
        if event.start < start:
            return f"{way}, before the layers"
        return f"{way}, after the layers" if event.end > end else f"{way}, {LAYERS}"

    def trip(self, event: Event) -> tuple[str, int] | None:
        """The loop over layers that an event is in, and the trip."""
        return next((x for x in event.loops if x[0] in self._layer_loops), None)

    def words(self, event: Event | None) -> str:
        """As "all-gather (forward, layers)"; "nothing" for None."""
        if event is None:
            return "nothing"
        kind = operation(event) if event.kind == "memory" else event.kind
        again = "recomputed " if is_recomputed(event) else ""
        return f"{again}{kind} ({self.of(event)})"

    def seconds(self) -> dict[str, float]:
        """Of the compute stream, by phase, in the order of the step."""
        found: dict[str, float] = {}
        for event in self._timeline.events:
            if event.stream == COMPUTE:
                phase = self.of(event)
                found[phase] = found.get(phase, 0.0) + event.seconds
        return found

    def layers(self, way: str) -> tuple[float, float] | None:
        """From when to when a few layers run: the middle trip of the longest loop.

        Args:
          way: "forward" or "backward".
        """
        trips: dict[str, dict[int, list[float]]] = {}
        for event in self._timeline.events:
            inside = self.trip(event)
            if event.stream == COMPUTE and inside and self.way(event) == way:
                span = trips.setdefault(inside[0], {}).setdefault(
                    inside[1], [event.start, event.end]
                )
                span[1] = event.end
        if not trips:
            return None
        longest = max(
            trips.values(), key=lambda spans: sum(b - a for a, b in spans.values())
        )
        start, end = longest[sorted(longest)[len(longest) // 2]]
        return start, end


def _total(spans: Mapping[int, Sequence[float]]) -> float:
    return sum(end - start for start, end in spans.values())


def _ways(timeline: Timeline, loops: set[str]) -> dict[str, str]:
    """The direction of each loop: that of most of its time."""
    seconds: dict[str, dict[str, float]] = {name: {} for name in loops}
    for event in timeline.events:
        for name in {name for name, _ in event.loops} & loops:
            way = direction(event.source)
            seconds[name][way] = seconds[name].get(way, 0.0) + event.seconds
    return {
        name: max(found, key=lambda way: found[way])
        for name, found in seconds.items()
        if found
    }


def is_recomputed(event: Event) -> bool:
    """Whether the backward repeats what the forward did."""
    return "rematted_computation" in event.source


def operation(event: Event) -> str:
    """The JAX operation, as ``reduce_sum``; the kind where XLA kept none."""
    last = event.source.split(";")[0].rpartition("/")[2]
    return last.split(".")[0] or event.kind


def _layer_loops(timeline: Timeline) -> set[str]:
    """Loops with collectives; where there are none, those with most of the products."""
    inner: set[str] = set()
    outer: set[str] = set()
    flops: dict[str, float] = collections.defaultdict(float)
    for event in timeline.events:
        names = [name for name, _ in event.loops]
        if names and event.flops:
            flops[names[-1]] += event.flops
        if names and event.stream == COLLECTIVES:
            inner.add(names[-1])
            outer.update(names[:-1])
    if inner - outer:
        return inner - outer
    most = max(flops.values(), default=0)
    return {name for name, count in flops.items() if count > most / 4}
