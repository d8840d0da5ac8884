"""The phase of a timeline's event, in words: "forward, layers", "update", ...

The direction comes from the JAX operation of an instruction, and so does the scope of
layers. Instructions that XLA adds have no operation: in a loop over layers they have
its direction, and elsewhere kernels belong to the phase of the kernel before them. The
words are also scopes (``jshard.scopes``), which a profile of the step shows.
"""

import collections
import re

from jshard.plan.cost.timeline import COMPUTE, Event, Timeline
from jshard.plan.hlo.hlo import direction
from jshard.scopes import LAYERS


def _in_layers(event: Event) -> bool:
    """Whether an event's JAX operation is in the scope of layers."""
    return re.search(rf"(^|[/(]){LAYERS}([/)]|$)", event.source) is not None


class Phases:
    """Names the phases of one timeline's events."""

    def __init__(self, timeline: Timeline):
        self._kernels = [e for e in timeline.events if e.stream == COMPUTE]
        self._gathers = [e for e in timeline.events if e.kind == "all-gather"]
        self._layer_loops = _layer_loops(timeline)
        self._spans: dict[str, list[float]] = {}
        for event in self._kernels:
            if self._trip(event) or _in_layers(event):
                span = self._spans.setdefault(
                    self._direction(event), [event.start, event.end]
                )
                span[1] = max(span[1], event.end)
        self._added: dict[float, Event] = {}  # by start: the kernel before
        known = None
        for event in self._kernels:
            if event.source or self._trip(event):
                known = event
            elif known:
                self._added[event.start] = known

    def _trip(self, event: Event) -> tuple[str, int] | None:
        """The loop over layers that an event is in, and the trip."""
        return next((x for x in event.loops if x[0] in self._layer_loops), None)

    def _direction(self, event: Event) -> str:
        """The direction of its loop over layers, or of its own JAX operation."""
        trip = self._trip(event)
        return self._layer_loops[trip[0]] if trip else direction(event.source)

    def of(self, event: Event) -> str:
        """Returns "forward, layers", "backward, before the layers", "update", ..."""
        if event.stream == COMPUTE:
            event = self._added.get(event.start, event)
        way = self._direction(event)
        if self._trip(event) or _in_layers(event):
            return f"{way}, {LAYERS}"
        if way not in self._spans:
            return way
        start, end = self._spans[way]
        if event.start < start:
            return f"{way}, before the {LAYERS}"
        where = f"after the {LAYERS}" if event.end > end else LAYERS
        return f"{way}, {where}"

    def words(self, event: Event | None) -> str:
        """Returns "all-gather (forward, layers)", for example; "nothing" for None."""
        if event is None:
            return "nothing"
        kind = event.kind
        if kind == "memory":  # the JAX operation says more, if XLA kept it
            operation = event.source.split(";")[0].rpartition("/")[2]
            kind = operation.split(".")[0] or kind
        again = "recomputed " if "rematted_computation" in event.source else ""
        return f"{again}{kind} ({self.of(event)})"

    def seconds(self) -> dict[str, float]:
        """Seconds of the compute stream by phase, in the order of the step."""
        found = collections.defaultdict[str, float](float)
        for event in self._kernels:
            found[self.of(event)] += event.seconds
        return dict(found)

    def layers(self, way: str) -> tuple[float, float] | None:
        """Start and end of a few layers: the middle trip of the longest loop.

        Without a loop it is the time between two gathers, and None without gathers.
        ``way`` is "forward" or "backward".
        """
        loops: dict[str, dict[int, list[float]]] = collections.defaultdict(dict)
        for event in self._kernels:
            trip = self._trip(event)
            if trip and self._direction(event) == way:
                span = loops[trip[0]].setdefault(trip[1], [event.start, event.end])
                span[1] = event.end
        if not loops:
            starts = [
                event.start
                for event in self._gathers
                if _in_layers(event) and self._direction(event) == way
            ]
            middle = len(starts) // 2
            return (starts[middle - 1], starts[middle]) if middle else None
        longest = max(
            loops.values(), key=lambda trips: sum(b - a for a, b in trips.values())
        )
        start, end = longest[sorted(longest)[len(longest) // 2]]
        return start, end


def _layer_loops(timeline: Timeline) -> dict[str, str]:
    """The loops over layers, each with its direction.

    A loop in the scope of layers with both directions is one over micro-batches.
    """
    ways: dict[str, dict[str, float]] = {}  # seconds by direction
    for event in filter(_in_layers, timeline.events):
        if event.loops:
            found = ways.setdefault(event.loops[-1][0], {})
            way = direction(event.source)
            found[way] = found.get(way, 0.0) + event.seconds
    return {
        name: max(found, key=found.__getitem__)
        for name, found in ways.items()
        if max(found.values()) > 0.9 * sum(found.values())
    }
