"""When each kernel and collective of a step runs: the scheduled program, replayed.

XLA's schedule is a list of instructions in the order in which the host issues them.
Kernels run one after the other on the compute stream. A collective starts when the
compute stream reaches its start and the collectives before it are done; its ``-done``
makes the compute stream wait. Copies to and from host memory have a stream for each
direction, and so have copies on the device that XLA issues beside its kernels.
``plan.cost.cost`` says how long each takes; what runs at the same time does not slow
the other down.
"""

import dataclasses
from collections.abc import Callable

from jshard.plan.cost.cost import FREE, Transfer, is_start, transfer, work
from jshard.plan.hlo.hlo import HOST_SPACE, Computation, Instruction, Module
from jshard.plan.topology import GPU

COMPUTE = "compute"
COLLECTIVES = "collectives"
COPIES = "copies"
TO_HOST = "to host"
FROM_HOST = "from host"
STREAMS = (COMPUTE, COLLECTIVES, COPIES, TO_HOST, FROM_HOST)


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something that occupies a stream.

    Attributes:
      name: of the instruction.
      stream: "compute", "collectives", "copies", "to host" or "from host".
      kind: "matrix product", "attention", "memory", "all-gather", ..., "copy".
      start: seconds since the step began.
      end: likewise.
      source: the JAX operation, as ``jit(step)/jvp()/while/body/dot``.
      bytes: on the wire or the bus; of a kernel, read and written.
      flops: of a kernel's matrix products.
      loops: around it, outermost first: the while loop's name and the trip, from 0.
    """

    name: str
    stream: str
    kind: str
    start: float
    end: float
    source: str
    bytes: int
    flops: float = 0.0
    loops: tuple[tuple[str, int], ...] = ()

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.start


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """The compute stream waits.

    Attributes:
      start: seconds since the step began.
      end: likewise.
      waits_for: what arrives at the end.
      before: the last kernel that ran, or None.
      after: the first that runs then, or None.
    """

    start: float
    end: float
    waits_for: Event
    before: Event | None = None
    after: Event | None = None

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A step.

    Attributes:
      events: in the order in which they were issued.
      gaps: in time.
      seconds: of the whole step.
      synchronous: names of collectives that nothing can run beside.
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
        """Seconds in which the compute stream waits for copies, of the host too."""
        return sum(g.seconds for g in self.gaps if g.waits_for.stream != COLLECTIVES)

    @property
    def floor(self) -> float:
        """Seconds of the step with all collectives hidden."""
        return self.seconds - self.exposed

    def busy(self, stream: str) -> float:
        """Seconds in which a stream has something to do."""
        return sum(e.seconds for e in self.events if e.stream == stream)

    def largest_gaps(self, count: int = 10) -> list[Gap]:
        """The longest first."""
        return sorted(self.gaps, key=lambda gap: -gap.seconds)[:count]


def replay(module: Module, gpu: GPU, num_devices: int) -> Timeline:
    """Runs a scheduled program on the streams of one device.

    Args:
      module: as ``jshard.plan.hlo.hlo.parse`` reads it.
      gpu: what it is compiled for.
      num_devices: that it is compiled for.
    """
    streams = _Streams(module, gpu, num_devices)
    streams.run(module.entry)
    end = max(streams.free.values())
    if end > streams.now:  # what nothing waits for still ends within the step
        last = max(streams.events, key=lambda e: e.end)
        streams.wait(last)
    return Timeline(
        tuple(streams.events), tuple(streams.gaps), end, tuple(streams.synchronous)
    )


class _Streams:
    """The state of a replay."""

    def __init__(self, module: Module, gpu: GPU, num_devices: int):
        self.module, self.gpu, self.num_devices = module, gpu, num_devices
        self.events: list[Event] = []
        self.gaps: list[Gap] = []
        self.synchronous: dict[str, None] = {}
        self.free: dict[str, float] = dict.fromkeys(STREAMS, 0.0)
        self.last: Event | None = None  # kernel
        self.unfollowed: int | None = None  # index of a gap with no kernel after it
        self.loops: tuple[tuple[str, int], ...] = ()
        self.steps: dict[str, list[Callable[[dict[str, Event]], None]]] = {}

    @property
    def now(self) -> float:
        """Where the compute stream is."""
        return self.free[COMPUTE]

    def run(self, computation: Computation) -> None:
        """Replays one computation; starts and dones meet within it."""
        if computation.name not in self.steps:
            self.steps[computation.name] = [
                step
                for x in computation.instructions
                if (step := self.step(computation, x)) is not None
            ]
        flying: dict[str, Event] = {}
        for step in self.steps[computation.name]:
            step(flying)

    def step(
        self, computation: Computation, x: Instruction
    ) -> Callable[[dict[str, Event]], None] | None:
        """What an instruction does to the streams, made once for all its runs."""
        if x.opcode in FREE:
            return None
        if x.opcode in ("while", "call", "conditional"):
            return self.calls(x)
        if x.opcode.endswith("-done"):
            start = x.operands[0]
            return lambda flying: self.arrive(flying.pop(start, None))
        if x.opcode.endswith("-update"):
            before = x.operands[0]
            return lambda flying: flying.update({x.name: flying.pop(before)})
        moved = transfer(self.module, computation, x, self.num_devices)
        if moved is not None:
            return self.collective(x, moved)
        if x.opcode in ("copy-start", "async-start"):
            return self.copy(computation, x)
        cost = work(self.module, computation, x)
        seconds = cost.seconds(self.gpu)
        nbytes = cost.bytes + cost.host_bytes
        if x.opcode == "fusion-start":
            stream = COPIES if not cost.host_bytes else _bus(computation, x)

            def beside(flying: dict[str, Event]) -> None:
                flying[x.name] = self.occupy(stream, x, "copy", seconds, nbytes)

            return beside

        def kernel(flying: dict[str, Event]) -> None:
            self.last = self.occupy(COMPUTE, x, cost.kind, seconds, nbytes, cost.flops)
            if self.unfollowed is not None:
                index, self.unfollowed = self.unfollowed, None
                gap = self.gaps[index]
                self.gaps[index] = dataclasses.replace(gap, after=self.last)

        return kernel

    def calls(self, x: Instruction) -> Callable[[dict[str, Event]], None]:
        """A loop, a call, or a conditional (all of its branches: the worst case)."""
        if x.opcode != "while":
            inside = list(self.module.inside(x))

            def once(flying: dict[str, Event]) -> None:
                for computation in inside:
                    self.run(computation)

            return once
        body = self.module.body(x)

        def run(flying: dict[str, Event]) -> None:
            around = self.loops
            for trip in range(x.trips or 1):
                self.loops = (*around, (x.name, trip))
                self.run(body)
            self.loops = around

        return run

    def collective(
        self, x: Instruction, moved: Transfer
    ) -> Callable[[dict[str, Event]], None]:
        """On the stream of collectives; the compute stream goes on, if it may."""
        alone = moved.group == 1
        launch = self.gpu.constants.launch
        seconds = launch if alone else moved.seconds(self.gpu)
        waits = not is_start(x)

        def run(flying: dict[str, Event]) -> None:
            event = self.occupy(COLLECTIVES, x, moved.kind, seconds, moved.wire_bytes)
            if waits:
                self.synchronous[x.name] = None
                self.wait(event)
            flying[x.name] = event

        return run

    def copy(
        self, computation: Computation, x: Instruction
    ) -> Callable[[dict[str, Event]], None]:
        """Between host and device."""
        nbytes = computation.by_name[x.operands[0]].arrays[0].bytes
        stream = _bus(computation, x)
        reached = self.gpu.constants
        seconds = reached.launch + nbytes / reached.host_bus

        def run(flying: dict[str, Event]) -> None:
            flying[x.name] = self.occupy(stream, x, "copy", seconds, nbytes)

        return run

    def occupy(
        self,
        stream: str,
        x: Instruction,
        kind: str,
        seconds: float,
        nbytes: int,
        flops: float = 0.0,
    ) -> Event:
        """Appends to a stream what the host issues now."""
        start = max(self.free[stream], self.now)
        end = self.free[stream] = start + seconds
        event = Event(
            x.name, stream, kind, start, end, x.source, nbytes, flops, self.loops
        )
        self.events.append(event)
        return event

    def arrive(self, event: Event | None) -> None:
        """A ``-done``: nothing, where the compute stream has waited already."""
        if event is not None:
            self.wait(event)

    def wait(self, event: Event) -> None:
        """The compute stream goes on at the end of an event."""
        if event.end > self.now:
            self.unfollowed = len(self.gaps)
            self.gaps.append(Gap(self.now, event.end, event, self.last))
            self.free[COMPUTE] = event.end


def _bus(computation: Computation, x: Instruction) -> str:
    """Which way an instruction copies between host and device."""
    given = computation.by_name[x.operands[0]].arrays[0]
    return FROM_HOST if given.space == HOST_SPACE else TO_HOST
