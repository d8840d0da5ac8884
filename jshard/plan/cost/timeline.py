"""When each kernel and collective of a step runs: the scheduled program, replayed.

XLA's schedule lists instructions in the order in which the host issues them. Kernels
run one after the other on the compute stream. A collective starts when the compute
stream reaches its start and the previous collective has ended; its ``-done`` makes the
compute stream wait. Copies to and from host memory have one stream for each direction,
and so do copies on the device that XLA issues beside its kernels. ``plan.cost.cost``
says how long each takes; what runs at the same time does not slow down.
"""

import collections
import dataclasses

from jshard.plan.cost.cost import FREE, UNKNOWN, transfer, work
from jshard.plan.hlo.hlo import Computation, Instruction, Module
from jshard.plan.topology import GPU

COMPUTE = "compute"
COLLECTIVES = "collectives"
COPIES = "copies"
TO_HOST = "to host"
FROM_HOST = "from host"
STREAMS = (COMPUTE, COLLECTIVES, COPIES, TO_HOST, FROM_HOST)

Loops = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something that occupies a stream.

    Attributes:
      name: of the instruction.
      stream: one of ``STREAMS``.
      kind: "matrix product", "attention", "memory", "all-gather", ..., "copy"; see
        also ``cost.UNKNOWN``.
      start: seconds since the step began.
      end: likewise.
      source: the JAX operation: ``jit(step)/jvp()/while/body/dot``.
      bytes: on the wire or the bus; for a kernel, read and written.
      flops: of a kernel's matrix products.
      loops: the while loops around it, outermost first, each with its trip from 0.
    """

    name: str
    stream: str
    kind: str
    start: float
    end: float
    source: str
    bytes: int
    flops: float = 0.0
    loops: Loops = ()

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end - self.start


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """A time in which the compute stream waits.

    Attributes:
      start: seconds since the step began.
      end: likewise.
      waits_for: the event that ends the gap.
      before: the last kernel before the gap, or None.
      after: the first kernel after it, or None.
    """

    start: float
    end: float
    waits_for: Event
    before: Event | None = None
    after: Event | None = None

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
      synchronous: names of the collectives that nothing can run beside.
    """

    events: tuple[Event, ...]
    gaps: tuple[Gap, ...]
    seconds: float
    synchronous: tuple[str, ...]

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
        """Seconds of the step with all collectives hidden."""
        return self.seconds - self.exposed

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
    return Timeline(events, gaps, end, tuple(replayed.synchronous))


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
            if x.opcode in FREE:
                continue
            if x.opcode == "while":
                for trip in range(1 if x.trips is None else x.trips):
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
        event = dataclasses.replace(cost, start=start, end=end, loops=loops)
        self.events.append(event)
        if event.stream == COMPUTE:
            self.last_kernel = event
            if self.gaps and self.gaps[-1].after is None:
                self.gaps[-1] = dataclasses.replace(self.gaps[-1], after=event)
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

        constants = self.gpu.constants
        moved = transfer(self.module, computation, x, self.num_devices)
        if moved is not None:
            alone = moved.group == 1
            seconds = constants.launch if alone else moved.seconds(self.gpu)
            return event(COLLECTIVES, moved.kind, seconds, moved.wire_bytes)
        if x.opcode in ("copy-start", "async-start"):
            nbytes = computation.by_name[x.operands[0]].arrays[0].bytes
            seconds = constants.launch + nbytes / constants.host_bus
            return event(_bus(computation, x), "copy", seconds, nbytes)
        done = work(self.module, computation, x)
        seconds, nbytes = done.seconds(self.gpu), done.bytes + done.host_bytes
        if x.opcode == "fusion-start":
            stream = _bus(computation, x) if done.host_bytes else COPIES
            return event(stream, "copy", seconds, nbytes)
        return event(COMPUTE, done.kind, seconds, nbytes, done.flops)


def _bus(computation: Computation, x: Instruction) -> str:
    """The direction in which an instruction copies between host and device."""
    given = computation.by_name[x.operands[0]].arrays[0]
    return FROM_HOST if given.on_host else TO_HOST
