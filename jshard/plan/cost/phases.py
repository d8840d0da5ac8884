"""The phase of a timeline's event, in words: "forward, layers", "update", ...

The direction comes from the JAX operation of an instruction, and so does the scope of
layers. Instructions that XLA adds have no operation: in a loop over layers they have
its direction, and elsewhere kernels belong to the phase of the kernel before them. The
words are also scopes (``jshard.sharding.settings.scopes``), which a profile of the step
shows.
"""

import bisect
import collections
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jshard.plan.cost.streams import COMPUTE, Event, Loops
from jshard.plan.cost.timeline import Timeline
from jshard.plan.hlo.program_text import BACKWARD, FORWARD, STEP, direction
from jshard.sharding.settings.scopes import LAYERS


def _in_layers(event: Event) -> bool:
    """Whether an event's JAX operation is in the scope of layers."""
    return re.search(rf"(^|[/(]){LAYERS}([/)]|$)", event.source) is not None


class _Run(NamedTuple):
    """Layers of one direction in a row: those of a micro-batch."""

    way: str  # their direction
    batch: Loops  # the loops over micro-batches that they are in, with their trips
    kernels: list[Event]  # in order of time

    @property
    def start(self) -> float:
        return self.kernels[0].start

    @property
    def end(self) -> float:
        return self.kernels[-1].end


class Phases:
    """Names the phases of one timeline's events."""

    def __init__(self, timeline: Timeline):
        self._kernels = [e for e in timeline.events if e.stream == COMPUTE]
        self._gathers = [e for e in timeline.events if e.kind == "all-gather"]
        self._layer_loops = _layer_loops(timeline)
        ways_found = {direction(event.source) for event in self._kernels}
        self._has_gradient = bool(ways_found & {FORWARD, BACKWARD})
        layers, others, spent = [], {}, 0.0
        for event in self._kernels:
            if self._trip(event) or _in_layers(event):
                layers.append(event)
                others[event.start] = spent
            else:
                spent += event.seconds
        ways: dict[str, set[str]] = collections.defaultdict(set)
        for event in layers:
            for name, _ in event.loops:
                ways[name].add(self._direction(event))
        self._batch_loops = {name for name, found in ways.items() if len(found) > 1}
        self._runs = [
            _Run(way, self._batch(kernels[0]), kernels)
            for way, kernels in _runs(((self._direction(e), e) for e in layers), others)
        ]
        self._added: dict[float, Event] = {}  # by start: the kernel before
        known = None
        for event in self._kernels:
            if event.source or self._trip(event):
                known = event
            elif known:
                self._added[event.start] = known

    def _batch(self, event: Event) -> Loops:
        """The loops over micro-batches that an event is in, with their trips."""
        return tuple(loop for loop in event.loops if loop[0] in self._batch_loops)

    def _trip(self, event: Event) -> tuple[str, int] | None:
        """The loop over layers that an event is in, and the trip."""
        return next((x for x in event.loops if x[0] in self._layer_loops), None)

    def _direction(self, event: Event) -> str:
        """The direction of its loop over layers, or of its own JAX operation."""
        if trip := self._trip(event):
            return self._layer_loops[trip[0]]
        return direction(event.source) if self._has_gradient else STEP

    def of(self, event: Event) -> str:
        """Returns "forward, layers", "backward, before the layers", "update", ..."""
        if event.stream == COMPUTE:
            event = self._added.get(event.start, event)
        way = self._direction(event)
        if self._trip(event) or _in_layers(event):
            return f"{way}, {LAYERS}"
        runs = [run for run in self._runs if run.batch == self._batch(event)]
        if not any(run.way == way for run in runs):
            return way
        number = bisect.bisect_right(runs, event.start, key=lambda run: run.start)
        earlier = [run for run in runs[:number] if run.way == way]
        within = number > 0 and event.start < runs[number - 1].end
        follows = not within and any(r.way == way for r in runs[number : number + 1])
        if earlier and event.end <= earlier[-1].end:
            return f"{way}, {LAYERS}"
        if follows or not earlier:
            return f"{way}, before the {LAYERS}"
        return f"{way}, after the {LAYERS}"

    def words(self, event: Event | None) -> str:
        """Returns "all-gather (forward, layers)", for example; "nothing" for None."""
        if event is None:
            return "nothing"
        kind = event.kind
        if kind == "memory":  # the JAX operation says more, if XLA kept it
            operation = event.source.split(";")[0].rpartition("/")[2]
            kind = operation.partition("[")[0].split(".")[0] or kind
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

        Of one micro-batch. Without a loop it is the time between two gathers, and None
        without gathers. ``way`` is "forward" or "backward".
        """
        runs = [run for run in self._runs if run.way == way]
        if not runs:
            return None
        run = max(runs, key=lambda run: run.end - run.start)
        loops: dict[str, dict[int, list[float]]] = collections.defaultdict(dict)
        for event in run.kernels:
            if trip := self._trip(event):
                span = loops[trip[0]].setdefault(trip[1], [event.start, event.end])
                span[1] = event.end
        if not loops:
            starts = [
                event.start
                for event in self._gathers
                if _in_layers(event)
                and self._direction(event) == way
                and run.start <= event.start <= run.end
            ]
            middle = len(starts) // 2
            return (starts[middle - 1], starts[middle]) if middle else None
        lasts = lambda trips: sum(end - start for start, end in trips.values())
        longest = max(loops.values(), key=lasts)
        start, end = longest[sorted(longest)[len(longest) // 2]]
        return start, end


def _runs(
    kernels: Iterable[tuple[str, Event]], others: Mapping[float, float]
) -> list[tuple[str, list[Event]]]:
    """Returns the runs of kernels of layers, given with their directions.

    ``others`` holds the seconds of other kernels before each, by its start.
    XLA moves a few kernels far from the others, also to those of the other direction.
    """
    found = [
        (way, [event for _, event in group])
        for way, group in itertools.groupby(kernels, key=lambda kernel: kernel[0])
    ]
    longest = max((_busy(events) for _, events in found), default=0.0)
    joined: list[tuple[str, list[Event]]] = []
    for way, events in found:
        if _busy(events) < longest / 20:
            continue
        if joined and joined[-1][0] == way:
            joined[-1][1].extend(events)
        else:
            joined.append((way, events))
    return [(way, _densest(events, others)) for way, events in joined]


def _busy(events: list[Event]) -> float:
    return sum(event.seconds for event in events)


def _densest(events: list[Event], others: Mapping[float, float]) -> list[Event]:
    """Returns the row with the most time in it, less that of kernels between."""
    best, total, first, bounds = 0.0, 0.0, 0, (0, 0)
    for number, event in enumerate(events):
        if number:
            total -= others[event.start] - others[events[number - 1].start]
        if total <= 0:
            total, first = 0.0, number
        total += event.seconds
        if total > best:
            best, bounds = total, (first, number + 1)
    return events[slice(*bounds)]


def _layer_loops(timeline: Timeline) -> dict[str, str]:
    """The loops over layers, each with its direction.

    A loop in the scope of layers with both directions is one over micro-batches.
    """
    seconds: dict[str, dict[str, float]] = {}  # by loop and direction
    for event in filter(_in_layers, timeline.events):
        if event.loops:
            found = seconds.setdefault(event.loops[-1][0], {})
            way = direction(event.source)
            found[way] = found.get(way, 0.0) + event.seconds
    return {
        name: max(found, key=found.__getitem__)
        for name, found in seconds.items()
        if max(found.values()) > 0.9 * sum(found.values())
    }
