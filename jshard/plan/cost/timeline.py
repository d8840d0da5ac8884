"""When each kernel and collective of a step runs: the scheduled program, replayed.

XLA's schedule lists instructions in the order in which the host issues them. Kernels
run one after the other on the compute stream. A collective starts when the compute
stream reaches its start and the previous collective has ended; its ``-done`` makes the
compute stream wait. Copies to and from host memory have one stream for each direction,
and so do copies on the device that XLA issues beside its kernels. ``kernel_work`` and
``transfers`` say how long each takes; what runs at the same time does not slow down.
What collectives wait for the slowest host is added at the end.
"""

import collections
import dataclasses
import math
from typing import NamedTuple

from jshard.fit.hardware import GPU
from jshard.plan.cost.kernel_work import UNKNOWN, work
from jshard.plan.cost.transfers import transfer
from jshard.plan.hlo import Computation, Instruction, Module

COMPUTE = "compute"
COLLECTIVES = "collectives"
COPIES = "copies"
TO_HOST = "to host"
FROM_HOST = "from host"
STREAMS = (COMPUTE, COLLECTIVES, COPIES, TO_HOST, FROM_HOST)
# Instructions that take no time: names for values, not kernels.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "opt-barrier", "partition-id", "replica-id", "domain", "add-dependency",
}  # fmt: skip

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


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A step, replayed.

    Attributes:
      events: in the order in which they were issued.
      gaps: in order of time.
      seconds: of the complete step.
      stragglers: those of them in which collectives wait for the slowest host.
      synchronous: names of the collectives that nothing can run beside.
    """

    events: tuple[Event, ...]
    gaps: tuple[Gap, ...]
    seconds: float
    synchronous: tuple[str, ...]
    stragglers: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds in which the compute stream waits for collectives."""
        return sum(g.seconds for g in self.gaps if g.waits_for.stream == COLLECTIVES)

    @property
    def waits_for_copies(self) -> float:
        """Seconds in which the compute stream waits for copies."""
        return sum(g.seconds for g in self.gaps if g.waits_for.stream != COLLECTIVES)

    @property
    def floor(self) -> float:
        """Seconds of the step with all collectives hidden, and hosts alike."""
        return self.seconds - self.exposed - self.stragglers

    @property
    def streams(self) -> list[str]:
        """The streams that have events, in the order of ``STREAMS``."""
        used = {event.stream for event in self.events}
        return [stream for stream in STREAMS if stream in used]

    @property
    def unknown(self) -> dict[str, int]:
        """How often kernels run whose products nothing is known of, by target."""
        targets = [e.kind for e in self.events if e.kind.startswith(UNKNOWN)]
        return collections.Counter(kind.removeprefix(UNKNOWN) for kind in targets)

    def busy(self, stream: str) -> float:
        """Seconds in which a stream is occupied."""
        return sum(e.seconds for e in self.events if e.stream == stream)

    def largest_gaps(self, count: int | None = None) -> list[Gap]:
        """The longest gaps first, by default all of them."""
        return sorted(self.gaps, key=lambda gap: -gap.seconds)[:count]


def replay(module: Module, gpu: GPU, num_devices: int) -> Timeline:
    """Replays a program compiled for so many GPUs on the streams of one of them."""
    replayed = _Replay(module, gpu, num_devices)
    replayed.run(module.entry)
    end = max(replayed.free.values())
    if end > replayed.free[COMPUTE]:  # the step includes what nothing waits for
        replayed.wait(max(replayed.events, key=lambda e: e.end))
    events, gaps = tuple(replayed.events), tuple(replayed.gaps)
    doublings = sum(math.log2(event.hosts) for event in events)
    late = gpu.constants.straggle * doublings
    return Timeline(events, gaps, end + late, tuple(replayed.synchronous), late)


class _Replay:
    """The state of a replay."""

    def __init__(self, module: Module, gpu: GPU, num_devices: int):
        self.module, self.gpu, self.num_devices = module, gpu, num_devices
        self.events: list[Event] = []
        self.gaps: list[Gap] = []
        self.synchronous: dict[str, None] = {}
        self.free: dict[str, float] = dict.fromkeys(STREAMS, 0.0)
        self.last_kernel: Event | None = None
        self.costs: dict[str, Event] = {}

    def run(self, computation: Computation, loops: Loops = ()) -> None:
        """Replays a computation. Starts and dones meet within it."""
        started: dict[str, Event] = {}
        for x in computation.instructions:
            if x.opcode in _FREE:
                continue
            if x.opcode == "while":
                for trip in range(self.module.trips(x)):
                    self.run(self.module.body(x), (*loops, (x.name, trip)))
            elif x.opcode in ("call", "conditional"):  # all branches: the worst case
                for inside in self.module.inside(x):
                    self.run(inside, loops)
            elif x.opcode.endswith("-done"):
                if event := started.pop(x.operands[0], None):
                    self.wait(event)
            elif x.opcode.endswith("-update"):
                started[x.name] = started.pop(x.operands[0])
            else:
                if x.name not in self.costs:
                    self.costs[x.name] = self.cost(computation, x)
                started[x.name] = self.issue(x, self.costs[x.name], loops)

    def issue(self, x: Instruction, cost: Event, loops: Loops) -> Event:
        """Appends an event to its stream; waits for a synchronous collective."""
        start = max(self.free[cost.stream], self.free[COMPUTE])
        end = self.free[cost.stream] = start + cost.end
        event = cost._replace(start=start, end=end, loops=loops)
        self.events.append(event)
        if event.stream == COMPUTE:
            self.last_kernel = event
            if self.gaps and self.gaps[-1].after is None:
                self.gaps[-1] = self.gaps[-1]._replace(after=event)
        elif event.stream == COLLECTIVES:
            if not x.opcode.endswith("-start") or '"is_sync":true' in x.text:
                self.synchronous[x.name] = None
                self.wait(event)
        return event

    def wait(self, event: Event) -> None:
        """Makes the compute stream wait for the end of an event."""
        start = self.free[COMPUTE]
        if event.end > start:
            self.gaps.append(Gap(start, event.end, event, self.last_kernel))
            self.free[COMPUTE] = event.end

    def cost(self, computation: Computation, x: Instruction) -> Event:
        """The event of an instruction as if it started at 0, outside of loops."""

        def event(
            stream: str, kind: str, seconds: float, nbytes: int, flops: float = 0.0
        ) -> Event:
            return Event(x.name, stream, kind, 0.0, seconds, x.source, nbytes, flops)

        def bus() -> str:
            return FROM_HOST if computation.given(x)[0].on_host else TO_HOST

        constants = self.gpu.constants
        near = self.gpu.domain
        moved = transfer(self.module, computation, x, self.num_devices, near)
        if moved is not None:
            alone = moved.group == 1
            seconds = constants.launch if alone else moved.seconds(self.gpu)
            found = event(COLLECTIVES, moved.kind, seconds, moved.wire_bytes)
            return found._replace(hosts=moved.hosts)
        if x.opcode in ("copy-start", "async-start"):
            nbytes = computation.given(x)[0].bytes
            seconds = constants.launch + nbytes / self.gpu.host_bus
            return event(bus(), "copy", seconds, nbytes)
        done = work(self.module, computation, x)
        seconds, nbytes = done.seconds(self.gpu), done.bytes + done.host_bytes
        if x.opcode == "fusion-start":
            return event(bus() if done.host_bytes else COPIES, "copy", seconds, nbytes)
        return event(COMPUTE, done.kind, seconds, nbytes, done.flops)
