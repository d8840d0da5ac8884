"""Finds out which process of a job this is, from options or the environment."""

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jshard.system.cli.options import Option
from jshard.system.errors import UserError
from jshard.system.jobs.schedulers import (
    Scheduler,
    find_scheduler,
    gpus_seen,
    sees_its_own_gpus,
)
from jshard.system.network.hosts import LONGEST_PATH, UNIX

_COUNT: dict[str, Any] = {"kind": int, "at_most": 999_999_999}
OPTIONS = {
    "coordinator": Option(
        None, "the host of process 0, and a free port on it; for processes of one "
        "host also unix:PATH, a file in a folder of mode 700",
        kind=str, shown="HOST:PORT",
    ),
    "num_processes": Option(None, "the number of processes", at_least=1, **_COUNT),
    "process_id": Option(
        None, "the number of this process, from 0", at_least=0, shown="I", **_COUNT
    ),
    "local_device_ids": Option(
        None, "the GPUs that this process uses; by default all that it sees", kind=str,
        shown="0,1",
    ),
}  # fmt: skip

# Environment variable that jshard.launch sets for the processes it starts.
ANY_PORT = "JSHARD_ANY_PORT"  # the launcher can pick another coordinator port
PORT_TAKEN = 98  # process 0's exit code if that port is taken (EADDRINUSE)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A job of several processes, seen from one of them."""

    process_id: int  # rank of this process
    num_processes: int
    # "HOST:PORT" of process 0, or "unix:PATH" of a socket, as gRPC writes them. None
    # lets JAX find it, which works under SLURM, Open MPI 4 and on TPUs.
    coordinator: str | None
    local_device_ids: tuple[int, ...] | None  # GPUs of this host; None is all it sees
    found_by: str  # "options", "SLURM", ...

    @property
    def socket(self) -> str | None:
        """The path of the coordinator's socket, if all processes are on this host."""
        if self.coordinator is None or not self.coordinator.startswith(UNIX):
            return None
        return self.coordinator.removeprefix(UNIX)


def find_cluster(
    options: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> Cluster | None:
    """Returns the job that this process belongs to, or None if it runs alone.

    Options take precedence over the environment that a scheduler sets
    (``find_scheduler``).

    Args:
      options: values of ``OPTIONS`` by name; None or absent if not given.
      environ: environment variables.

    Raises:
      UserError: an option is malformed, or one is missing; or the environment says that
        this is one of several processes, and not all that is needed to join them.
    """
    found = find_scheduler(environ)
    options = {name: options.get(name) for name in OPTIONS}
    options = {name: value for name, value in options.items() if value is not None}
    num_processes = options.get("num_processes", found.num_processes)
    process_id = options.get("process_id", found.process_id)
    address = environ.get("JAX_COORDINATOR_ADDRESS")
    coordinator = options.get("coordinator", address or found.coordinator)
    found_by = "options" if "process_id" in options else found.name

    if num_processes is None:
        for name in ("coordinator", "process_id"):
            if name in options:
                raise UserError(f"--{name} also needs --num_processes=N")
        told = found.variable or ("JAX_COORDINATOR_ADDRESS" if address else "")
        if told:
            raise UserError(
                f"{told}={environ[told]}: this is one of several processes, but their "
                "number is unknown; give --num_processes=N, or --num_processes=1 to "
                "train alone"
            )
        return None
    if num_processes == 1:
        return None
    if process_id is None:
        raise UserError(
            f"the rank of this process is unknown, one of {num_processes}; give "
            f"--process_id=0 to {num_processes - 1}"
        )
    if process_id >= num_processes:
        raise UserError(
            f"the rank of this process (--process_id) is {process_id}, but must be "
            f"less than the number of processes, {num_processes}"
        )
    if coordinator is not None:
        _check_address(coordinator)
    elif not found.finds_coordinator or found_by == "options":
        raise UserError(
            f"{_said(found, num_processes)}the address of process 0 is unknown; give "
            "--coordinator=HOST:PORT, a host that all processes can reach and a free "
            "port on it"
        )
    ids = options.get("local_device_ids", environ.get("JAX_LOCAL_DEVICE_IDS"))
    if ids is not None:
        devices = _device_ids(ids)
    else:
        devices = _own_devices(found, environ)
    return Cluster(process_id, num_processes, coordinator, devices, found_by)


def _own_devices(
    found: Scheduler, environ: Mapping[str, str]
) -> tuple[int, ...] | None:
    """Returns the GPUs of a process, by what started it; None is all that it sees."""
    if found.local is None or (gpus := _count_gpus(environ)) == 0:
        return None
    rank, processes = found.local
    if processes is None:
        if gpus == 1:
            return None
        raise UserError(
            f"{found.name} does not say how many processes share the {gpus} GPUs of "
            "this host; give each --local_device_ids"
        )
    if found.name == "SLURM" and sees_its_own_gpus(environ, processes):
        return None
    return share_of_gpus(rank, processes, environ, found.name)


def _said(found: Scheduler, num_processes: int) -> str:
    """Returns who says that there are several processes, for messages."""
    if not found.variable:
        return ""
    return f"{found.name} started {num_processes} processes ({found.variable}), but "


def _check_address(coordinator: str) -> None:
    if coordinator.startswith(UNIX):
        path = coordinator.removeprefix(UNIX)
        if not path.startswith("/") or len(os.fsencode(path)) > LONGEST_PATH:
            raise UserError(
                f"--coordinator={coordinator}: must be unix:PATH with an absolute path "
                f"of at most {LONGEST_PATH} bytes"
            )
        return
    match = re.fullmatch(r"\S{1,255}:(\d{1,5})", coordinator)
    if match is None or not 1 <= int(match[1]) <= 65_535:
        raise UserError(
            f"--coordinator={coordinator}: must be HOST:PORT, with a port from 1 to "
            "65535"
        )


def _device_ids(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    numeric = all(part.isdecimal() and len(part) <= 9 for part in parts)
    if not numeric or len(set(map(int, parts))) < len(parts):
        raise UserError(
            f"--local_device_ids={text}: must be distinct numbers, like 0,1,2,3"
        )
    return tuple(map(int, parts))


def _count_gpus(environ: Mapping[str, str]) -> int:
    """Returns how many GPUs of this host a process sees and may use."""
    if environ.get("JAX_PLATFORMS") == "cpu":
        return 0
    seen = gpus_seen(environ)
    return len(list(Path("/dev").glob("nvidia[0-9]*"))) if seen is None else seen


def share_of_gpus(
    index: int, processes: int, environ: Mapping[str, str], found_by: str = "launch"
) -> tuple[int, ...] | None:
    """Divides the GPUs of a host among its processes, each of which sees all of them.

    Args:
      index: rank of the process on its host.
      processes: number of processes on the host.
      environ: environment variables.
      found_by: what started them, as in `Cluster`.

    Returns:
      The GPUs of that process; None if it uses all that it sees, or there are none.

    Raises:
      UserError: the GPUs cannot be divided evenly.
    """
    gpus = _count_gpus(environ)
    each = gpus // processes
    # Fewer GPUs than processes: the scheduler shows each process only its own.
    assigned = not each and found_by != "launch"
    if processes == 1 or not gpus or assigned:
        return None
    if gpus % processes:
        ids = "" if found_by == "launch" else ", or give --local_device_ids"
        raise UserError(
            f"{processes} processes cannot share the {gpus} GPUs of a host evenly: "
            f"start one per GPU or one per host{ids}"
        )
    return tuple(range(index * each, (index + 1) * each))
