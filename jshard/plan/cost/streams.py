"""The streams of a device in a replay, and what runs on them."""

from typing import NamedTuple

COMPUTE = "compute"
COLLECTIVES = "collectives"
COPIES = "copies"
TO_HOST = "to host"
FROM_HOST = "from host"
STAGES = "other stages"  # what a device waits for; no stream of its own
OF_COPIES = (COPIES, TO_HOST, FROM_HOST)
STREAMS = (COMPUTE, COLLECTIVES, *OF_COPIES)

Loops = tuple[tuple[str, int], ...]


class Event(NamedTuple):
    """Something that occupies a stream."""

    name: str  # of the instruction
    stream: str  # one of `STREAMS`
    kind: str  # "copy", or that of a `Work` or a `Transfer`
    start: float  # seconds since the step began
    end: float  # likewise
    source: str  # the JAX operation: "jit(step)/jvp()/while/body/dot"
    bytes: int  # on the wire or the bus; for a kernel, read and written
    flops: float = 0.0  # of a kernel's matrix products
    loops: Loops = ()  # around it, outermost first, each with its trip from 0
    hosts: int = 1  # that a collective spans
    late: float = 0.0  # seconds that it waited for other stages before it started

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end - self.start


class Gap(NamedTuple):
    """A time in which the compute stream waits."""

    start: float  # seconds since the step began
    end: float  # likewise
    waits_for: Event  # ends the gap
    before: Event | None = None  # the last kernel before it
    after: Event | None = None  # the first kernel after it

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end - self.start


class Device:
    """The streams of a device, and what has run on them.

    Attributes:
      number: of its stage.
      shown: whether its events are kept, and not only counted.
      busy: seconds of kernels.
      idle: seconds in which the compute stream waits for other stages.
    """

    def __init__(self, number: int = 0, shown: bool = True):
        self.number, self.shown = number, shown
        self.events: list[Event] = []
        self.gaps: list[Gap] = []
        self.free: dict[str, float] = dict.fromkeys(STREAMS, 0.0)
        self.last_kernel: Event | None = None
        self.busy = self.idle = 0.0

    def ready(self, stream: str) -> float:
        """When a stream can start what is issued now."""
        return max(self.free[stream], self.free[COMPUTE])

    def issue(self, cost: Event, loops: Loops, start: float) -> Event:
        """Appends an event to its stream."""
        late = start - self.ready(cost.stream)
        end = self.free[cost.stream] = start + cost.end
        event = cost._replace(start=start, end=end, loops=loops, late=late)
        if event.stream == COMPUTE:
            self.busy += event.seconds
            self.last_kernel = event
        if self.shown:
            self.events.append(event)
            if event.stream == COMPUTE and self.gaps and self.gaps[-1].after is None:
                self.gaps[-1] = self.gaps[-1]._replace(after=event)
        return event

    def wait(self, event: Event) -> None:
        """Makes the compute stream wait for the end of an event."""
        if event.late > 0:
            begin, kind = event.start - event.late, "another stage"
            other = event._replace(start=begin, end=event.start, late=0.0)
            other = other._replace(kind=kind, stream=STAGES, bytes=0, hosts=1)
            self.idle += max(0.0, other.end - max(begin, self.free[COMPUTE]))
            self.wait(other)
        start = self.free[COMPUTE]
        if event.end > start:
            if self.shown:
                self.gaps.append(Gap(start, event.end, event, self.last_kernel))
            self.free[COMPUTE] = event.end
