"""Reads what ``jax.profiler`` writes: the operations of devices, and their hosts' work.

A kernel or collective belongs to the HLO instruction that its ``hlo_op`` names. On GPUs
a device is a plane, and its lines are streams. On CPUs the plane of the host has lines
of threads: those of XLA's clients and pools (``tf_...``) run the operations of all its
devices, each with its ``device_ordinal`` and ``run_id``; the others are Python's.
"""

import collections
import contextlib
import dataclasses
import gc
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jshard.plan.trace.chrome_trace import read_chrome
from jshard.plan.trace.rows import Row
from jshard.plan.trace.xspace import began, open_xspace
from jshard.system.errors import UserError

XPLANE, CHROME, PERFETTO = "*.xplane.pb", "*.trace.json.gz", "perfetto_trace.json.gz"
_NSYS = (".nsys-rep", ".qdrep", ".sqlite")
_GPU = re.compile(r"/device:GPU:(\d+)")
_OF_XLA = "tf_"  # how names of XLA's threads begin
_NO_WORK = ("ThreadpoolListener", "end: ", "Wait for ", "ThunkExecutor::")
_WAITS = ("Rendezvous", "InvokeRendezvous", "Wait: ")  # of XLA's threads
_GRAPH = ("cuda_graph_exec_id", "cuda_graph_id", "graph_id", "cuda_graph_node_id")
_COMMAND_BUFFER = "command_buffer"
DISPATCH = "Execute ("  # of the event in which a host starts a program


class Operation(NamedTuple):
    """What a device did for an HLO instruction, once."""

    name: str  # of the instruction
    start: float  # seconds, on one clock for all hosts
    end: float  # likewise
    run: int | None  # of the program; None where the profile does not say

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end - self.start


class HostEvent(NamedTuple):
    """What a thread of Python's did."""

    name: str
    start: float  # seconds, on the clock of the operations
    end: float  # likewise


@dataclasses.dataclass
class Profile:
    """What ran during a profile.

    Attributes:
      path: its folder, or file.
      programs: operations by program, (name of the module, id; -1 if unknown), and by
        number of the device.
      host: events by number of the host.
      host_of: number of its host, by that of the device.
      marks: (number, start) of each annotated step on the first host.
      nameless: kernels of GPUs without an instruction, most of them in command buffers.
    """

    path: Path
    programs: dict[tuple[str, int], dict[int, list[Operation]]]
    host: dict[int, list[HostEvent]]
    host_of: dict[int, int]
    marks: list[tuple[int, float]]
    nameless: int = 0


def read_profile(path: str | Path) -> Profile:
    """Reads a profile.

    Args:
      path: a file, or a folder with ``plugins/profile/DATE`` anywhere below it, such as
        a run's. The newest date counts, with the files of all its hosts.

    Raises:
      UserError: there is none, or it cannot be read, or no device ran anything in it.
    """
    path = Path(path)
    files = _files(path)
    folder = path if path.is_file() else files[0].parent
    found, clocks = Profile(folder, {}, {}, {}, []), []
    with _without_collector():
        for number, file in enumerate(files):
            of_xla = file.name.endswith(".pb")
            with _refusing(file):
                clocks.append(began(file) if of_xla else 0)
            rows = _rows(file) if of_xla else read_chrome(file)
            _add_host(found, number, rows, 1e-9 * (clocks[-1] - clocks[0]))
    for devices in found.programs.values():
        for operations in devices.values():
            operations.sort(key=lambda x: x.start)
    for events in found.host.values():
        events.sort(key=lambda x: x.start)
    if not found.programs:
        refuse_nameless(found)
        raise UserError(
            f"--profile={path}: only hosts are in this profile, no kernel of a device: "
            "trace steps after the first, and wait for them "
            "(jax.block_until_ready) before the trace ends"
        )
    return found


def refuse_nameless(found: Profile) -> None:
    """Raises UserError if there are kernels without the name of an instruction."""
    if found.nameless:
        raise UserError(
            f"--profile={found.path}: {found.nameless} kernels have no names of "
            "instructions, as in command buffers: trace again with "
            "XLA_FLAGS=--xla_gpu_enable_command_buffer="
        )


def _files(path: Path) -> list[Path]:
    """Returns the files of a profile, one of each host."""
    if path.suffix in _NSYS:
        raise UserError(
            f"--profile={path}: reports of Nsight Systems are not read: trace with "
            "jax.profiler"
        )
    if path.is_file():
        return [path]
    for pattern in (XPLANE, CHROME, PERFETTO):
        if files := sorted(path.rglob(pattern)):
            folder = max(file.parent for file in files)
            return [file for file in files if file.parent == folder]
    problem = "holds no profile of JAX" if path.is_dir() else "does not exist"
    raise UserError(
        f"--profile={path}: {problem}: give a folder that jax.profiler wrote, or that "
        "of a run with --config.profile.steps=FIRST:LAST; a process that is killed "
        "while it traces writes none"
    )


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Keeps Python's collector from going through millions of rows again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextlib.contextmanager
def _refusing(file: Path) -> Iterator[None]:
    """Says what is wrong with a file of XLA's."""
    try:
        yield
    except EOFError as error:
        raise UserError(
            f"--profile={file}: is cut off ({error}): trace again, and let the trace "
            "end before its process does"
        ) from error
    except (RuntimeError, ValueError, OSError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"--profile={file}: is no profile of JAX ({why})") from error


def _rows(file: Path) -> Iterator[Row]:
    pieces = open_xspace(file)
    while True:
        with _refusing(file):
            data = next(pieces, None)
        if data is None:
            return
        for plane in data.planes:
            of = plane.name
            for line in plane.lines:
                name = line.name
                for event in line.events:
                    start, seconds = 1e-9 * event.start_ns, 1e-9 * event.duration_ns
                    yield Row(of, name, event.name, start, seconds, event)


def _add_host(found: Profile, number: int, rows: Iterable[Row], later: float) -> None:
    """Adds the events of one host's file, whose clock began so much later."""
    names: dict[str, str] = {}
    before = len(found.host_of)  # devices of the hosts before
    runs: dict[tuple[str, int], dict[int, list[Operation]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    events: list[HostEvent] = []
    for row in rows:
        if row.name.startswith(_NO_WORK):
            continue
        of_xla = row.line.startswith(_OF_XLA)
        if of_xla and row.name.startswith(_WAITS):
            continue
        gpu = _GPU.search(row.plane)
        if gpu and not row.line.startswith("Stream"):
            continue  # lines that sum others up
        if gpu or of_xla:
            stats = row.stats()
            operation = stats.get("hlo_op")
            if operation is None or operation.startswith(_COMMAND_BUFFER):
                found.nameless += bool(gpu) and _is_graph(stats, operation)
                continue
            device = int(gpu[1] if gpu else stats.get("device_ordinal", 0))
            key = (stats.get("hlo_module", ""), int(stats.get("program_id", -1)))
            run = stats.get("run_id")
            runs[key][device].append(
                Operation(
                    names.setdefault(operation, sys.intern(operation)),
                    row.start + later,
                    row.start + later + row.seconds,
                    None if run is None else int(run),
                )
            )
        elif row.seconds > 0:
            start = row.start + later
            events.append(HostEvent(row.name, start, start + row.seconds))
            if number == 0 and row.name == "step":
                if "step_num" in (stats := row.stats()):
                    found.marks.append((int(stats["step_num"]), row.start))
    local = {device for devices in runs.values() for device in devices}
    order = {device: before + i for i, device in enumerate(sorted(local))}
    for key, devices in runs.items():
        into = found.programs.setdefault(key, {})
        for device, operations in devices.items():
            into[order[device]] = operations
    found.host_of |= dict.fromkeys(order.values(), number)
    found.host[number] = events


def _is_graph(stats: Mapping[str, Any], operation: str | None) -> bool:
    return operation is not None or any(name in stats for name in _GRAPH)
