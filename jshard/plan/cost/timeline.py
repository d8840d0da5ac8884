"""When each kernel and collective of a step runs: the scheduled program, replayed.

XLA's schedule lists instructions in the order in which the host issues them. Kernels
run one after the other on the compute stream. A collective starts when the compute
stream reaches its start and the previous collective has ended; its ``-done`` makes the
compute stream wait. Copies to and from host memory have one stream for each direction,
and so do copies on the device that XLA issues beside its kernels. ``kernel_work`` and
``transfers`` say how long each takes; what runs at the same time does not slow down.
What collectives wait for the slowest host is added at the end.

The stages of a pipeline are replayed together, one device of each: what they send each
other starts when the last of them has reached it (``ticks``). The timeline is that of
the stage whose kernels take the longest.
"""

import collections
import dataclasses
import math

from jshard.plan.cost import streams
from jshard.plan.cost.kernel_work import UNKNOWN, work
from jshard.plan.cost.streams import COLLECTIVES, COMPUTE, Device, Event, Gap, Loops
from jshard.plan.cost.ticks import Cell, Pipeline, is_switch
from jshard.plan.cost.transfers import transfer
from jshard.plan.fit.hardware import GPU
from jshard.plan.hlo import Computation, Instruction, Module

# Instructions that take no time: names for values, not kernels.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "opt-barrier", "partition-id", "replica-id", "domain", "add-dependency",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A step, replayed."""

    events: tuple[Event, ...]  # in the order in which they were issued
    gaps: tuple[Gap, ...]  # in order of time
    seconds: float  # of the complete step
    synchronous: tuple[str, ...]  # names of collectives that nothing can run beside
    stragglers: float = 0.0  # seconds that collectives wait for the slowest host
    stage: int = 0  # of the pipeline, whose device this is
    cells: tuple[Cell, ...] = ()  # what every stage does in every tick of a pipeline
    idle: tuple[float, ...] = ()  # seconds in which each stage waits for others

    @property
    def bubble(self) -> float:
        """The part of the step in which a stage waits for others, on average."""
        stages = max(len(self.idle), 1)
        return sum(self.idle) / stages / self.seconds

    def waits(self, stream: str, kind: str = "") -> float:
        """Seconds in which the compute stream waits for another, or a kind of event."""
        awaited = ((gap.seconds, gap.waits_for) for gap in self.gaps)
        return sum(s for s, x in awaited if x.stream == stream and kind in ("", x.kind))

    @property
    def exposed(self) -> float:
        """Seconds in which the compute stream waits for collectives."""
        return self.waits(COLLECTIVES)

    @property
    def exposed_sends(self) -> float:
        """Those of them in which it waits for what stages send each other."""
        return self.waits(COLLECTIVES, "collective-permute")

    @property
    def waits_for_copies(self) -> float:
        """Seconds in which the compute stream waits for copies."""
        return sum(map(self.waits, streams.OF_COPIES))

    @property
    def floor(self) -> float:
        """Seconds of the step with all collectives hidden, and hosts alike."""
        return self.seconds - self.exposed - self.stragglers

    @property
    def streams(self) -> list[str]:
        """The streams that have events, in the order of ``streams.STREAMS``."""
        used = {event.stream for event in self.events}
        return [stream for stream in streams.STREAMS if stream in used]

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


def replay(
    module: Module, gpu: GPU, num_devices: int, pipeline: Pipeline | None = None
) -> Timeline:
    """Replays a program compiled for so many GPUs on the streams of one of them."""
    shown, cells = 0, ()
    idle: tuple[float, ...] = ()
    if pipeline is not None:
        rough = _Replay(module, gpu, num_devices, pipeline, shown=None)
        busy = [device.busy for device in rough.run_all()]
        shown = busy.index(max(busy))
    replayed = _Replay(module, gpu, num_devices, pipeline, shown)
    devices = replayed.run_all()
    if pipeline is not None:
        cells = tuple(replayed.cells)
        idle = tuple(device.idle for device in devices)
    device = devices[shown]
    end = max(device.free.values())
    if end > device.free[COMPUTE]:  # the step includes what nothing waits for
        device.wait(max(device.events, key=lambda e: e.end))
    doublings = sum(math.log2(event.hosts) for event in device.events)
    late = gpu.constants.straggle * doublings
    return Timeline(
        tuple(device.events),
        tuple(device.gaps),
        end + late,
        tuple(replayed.synchronous),
        late,
        shown,
        cells,
        idle,
    )


class _Replay:
    """The state of a replay."""

    def __init__(
        self,
        module: Module,
        gpu: GPU,
        num_devices: int,
        pipeline: Pipeline | None,
        shown: int | None,
    ):
        self.module, self.gpu, self.num_devices = module, gpu, num_devices
        self.pipeline, self.shown = pipeline, shown
        self.synchronous: dict[str, None] = {}
        self.costs: dict[str, Event] = {}
        self.partners: dict[str, tuple[tuple[int, ...], ...] | None] = {}
        self.tick = 0
        self.cells: list[Cell] = []
        # Of the branches that were run once, for all ticks: by name, stage and chunk.
        self.branches: dict[tuple[str, int, int], Device] = {}

    def run_all(self) -> list[Device]:
        """Replays the program on a device of each stage."""
        stages = range(self.pipeline.number if self.pipeline else 1)
        devices = [Device(stage, stage == self.shown) for stage in stages]
        self.run(self.module.entry, devices)
        return devices

    def run(
        self, computation: Computation, devices: list[Device], loops: Loops = ()
    ) -> None:
        """Replays a computation. Starts and dones meet within it."""
        started: dict[str, list[Event]] = {}  # of each device
        for x in computation.instructions:
            if x.opcode in _FREE:
                continue
            if x.opcode == "while":
                for trip in range(self.module.trips(x)):
                    self.run(self.module.body(x), devices, (*loops, (x.name, trip)))
            elif x.opcode == "conditional" and self.pipeline:
                self.choose(x, self.pipeline, devices, loops)
            elif x.opcode in ("call", "conditional"):  # all branches: the worst case
                for inside in self.module.inside(x):
                    self.run(inside, devices, loops)
            elif x.opcode.endswith("-done"):
                events = started.pop(x.operands[0], [])
                for device, event in zip(devices, events, strict=False):
                    device.wait(event)
            elif x.opcode.endswith("-update"):
                started[x.name] = started.pop(x.operands[0], [])
            else:
                started[x.name] = self.issue(computation, x, devices, loops)

    def choose(
        self, x: Instruction, pipeline: Pipeline, devices: list[Device], loops: Loops
    ) -> None:
        """Replays the branches of a conditional that each device takes."""
        for device in devices:
            start, tick = device.free[COMPUTE], self.tick
            names = pipeline.branches(x, device.number, tick)
            bodies = [self.module.computations[name] for name in names]
            if is_switch(x) and not device.shown and start >= max(device.free.values()):
                chunk = int(pipeline.chunk[tick, device.number])
                self.again(bodies[0], device, chunk)
            else:
                for body in bodies:
                    self.run(body, [device], loops)
            if is_switch(x):
                end = device.free[COMPUTE]
                self.cells.append(pipeline.cell(device.number, tick, start, end))
        self.tick += is_switch(x)

    def again(self, body: Computation, device: Device, chunk: int) -> None:
        """Lets a device run a branch, which takes as long in each tick of a stage."""
        key = body.name, device.number, chunk
        if key not in self.branches:
            self.branches[key] = Device(device.number, shown=False)
            self.run(body, [self.branches[key]])
        alone, start = self.branches[key], device.free[COMPUTE]
        for stream, end in alone.free.items():
            device.free[stream] = start + end
        device.busy += alone.busy
        device.last_kernel = alone.last_kernel

    def issue(
        self,
        computation: Computation,
        x: Instruction,
        devices: list[Device],
        loops: Loops,
    ) -> list[Event]:
        """Appends an event to its stream on each device; waits if it is synchronous."""
        if x.name not in self.costs:
            of = self.module, computation, x
            self.costs[x.name] = cost(*of, self.gpu, self.num_devices)
            moved = transfer(*of, self.num_devices, self.gpu.domain)
            if moved is not None and self.pipeline:
                self.partners[x.name] = self.pipeline.partners(moved.groups)
        found = self.costs[x.name]
        starts = [device.ready(found.stream) for device in devices]
        if partners := self.partners.get(x.name):
            starts = [max(starts[stage] for stage in with_) for with_ in partners]
        events = [
            device.issue(found, loops, start)
            for device, start in zip(devices, starts, strict=True)
        ]
        if found.stream == COLLECTIVES:
            if not x.opcode.endswith("-start") or '"is_sync":true' in x.text:
                self.synchronous[x.name] = None
                for device, event in zip(devices, events, strict=True):
                    device.wait(event)
        return events


def cost(
    module: Module, computation: Computation, x: Instruction, gpu: GPU, num_devices: int
) -> Event:
    """Returns the event of an instruction as if it started at 0, outside of loops."""

    def event(
        stream: str, kind: str, seconds: float, nbytes: int, flops: float = 0.0
    ) -> Event:
        return Event(x.name, stream, kind, 0.0, seconds, x.source, nbytes, flops)

    def bus() -> str:
        on_host = computation.given(x)[0].on_host
        return streams.FROM_HOST if on_host else streams.TO_HOST

    moved = transfer(module, computation, x, num_devices, gpu.domain)
    if moved is not None:
        alone = moved.group == 1
        seconds = gpu.constants.launch if alone else moved.seconds(gpu)
        found = event(COLLECTIVES, moved.kind, seconds, moved.wire_bytes)
        return found._replace(hosts=moved.hosts)
    if x.opcode in ("copy-start", "async-start"):
        nbytes = computation.given(x)[0].bytes
        seconds = gpu.constants.launch + nbytes / gpu.host_bus
        return event(bus(), "copy", seconds, nbytes)
    done = work(module, computation, x)
    seconds, nbytes = done.seconds(gpu), done.bytes + done.host_bytes
    if x.opcode == "fusion-start":
        stream = bus() if done.host_bytes else streams.COPIES
        return event(stream, "copy", seconds, nbytes)
    return event(COMPUTE, done.kind, seconds, nbytes, done.flops)
