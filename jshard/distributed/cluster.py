"""Finds out which process of a job this is, from options or the environment."""

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jshard.cli.options import Option
from jshard.errors import UserError

_COUNT: dict[str, Any] = {"kind": int, "at_most": 999_999_999}
OPTIONS = {
    "coordinator": Option(
        None, "the host of process 0, and a free port there", kind=str,
        shown="HOST:PORT",
    ),
    "num_processes": Option(None, "the number of processes", at_least=1, **_COUNT),
    "process_id": Option(
        None, "the number of this process, from 0", at_least=0, shown="I", **_COUNT
    ),
    "local_device_ids": Option(
        None, "the GPUs of this process; by default all that it sees", kind=str,
        shown="0,1",
    ),
}  # fmt: skip

# Environment variables that jshard.launch sets for the processes it starts.
LOCAL = "JSHARD_LOCAL"  # "1/4": rank and number of processes on this host
ANY_PORT = "JSHARD_ANY_PORT"  # the launcher can pick another coordinator port
PORT_TAKEN = 98  # process 0's exit code if that port is taken (EADDRINUSE)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A job of several processes, seen from one of them."""

    process_id: int  # rank of this process
    num_processes: int
    # "HOST:PORT" of process 0. None lets JAX find it, which works under SLURM, Open MPI
    # 4 and on TPUs.
    coordinator: str | None
    local_device_ids: tuple[int, ...] | None  # GPUs of this host; None is all it sees
    found_by: str  # "options", "SLURM", ...


@dataclasses.dataclass(frozen=True)
class _Scheduler:
    """What the scheduler's environment variables say; None where they say nothing."""

    name: str
    process_id: int | None = None
    num_processes: int | None = None
    finds_coordinator: bool = False
    local: tuple[int, int] | None = None  # rank and number of processes on this host


def find_cluster(
    options: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> Cluster | None:
    """Returns the job that this process belongs to, or None if it runs alone.

    Options take precedence over the environment set by SLURM's srun, Open MPI's
    mpirun, an indexed Job (or JobSet) of Kubernetes, or Google Cloud's TPU hosts.

    Args:
      options: values of ``OPTIONS`` by name; None or absent if not given.
      environ: environment variables.

    Raises:
      UserError: an option is malformed, or one is missing.
    """
    found = _find_scheduler(environ)
    options = {name: options.get(name) for name in OPTIONS}
    options = {name: value for name, value in options.items() if value is not None}
    num_processes = options.get("num_processes", found.num_processes)
    process_id = options.get("process_id", found.process_id)
    address = environ.get("JAX_COORDINATOR_ADDRESS")
    coordinator = options.get("coordinator", address)
    found_by = "options" if "process_id" in options else found.name

    if num_processes is None:
        for name in ("coordinator", "process_id"):
            if name in options:
                raise UserError(f"--{name} also needs --num_processes=N")
        return None
    if num_processes == 1:
        return None
    if process_id is None:
        raise UserError(
            f"--num_processes={num_processes}: the rank of this process is unknown; "
            f"give --process_id=0 to {num_processes - 1}"
        )
    if process_id >= num_processes:
        raise UserError(
            f"--process_id={process_id}: must be less than the number of processes, "
            f"{num_processes}"
        )
    if coordinator is not None:
        _check_address(coordinator)
    elif not found.finds_coordinator or found_by == "options":
        raise UserError(
            "the address of process 0 is unknown; give --coordinator=HOST:PORT, a host "
            "that all processes can reach and a free port on it"
        )
    ids = options.get("local_device_ids", environ.get("JAX_LOCAL_DEVICE_IDS"))
    if ids is not None:
        devices = _device_ids(ids)
    elif found.local and "SLURM_GPUS_PER_TASK" not in environ:
        devices = share_of_gpus(*found.local, environ, found.name)
    else:  # all that it sees; with that variable SLURM shows each task its own
        devices = None
    return Cluster(process_id, num_processes, coordinator, devices, found_by)


def _find_scheduler(environ: Mapping[str, str]) -> _Scheduler:
    def number(name: str) -> int:
        return int(environ[name])

    if LOCAL in environ:
        rank, size = environ[LOCAL].split("/")
        return _Scheduler("launch", local=(int(rank), int(size)))
    # Variables of the job step that srun creates: a batch script has no rank itself.
    if {"SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"} <= set(environ):
        tasks = []  # of each node, from text like "4(x2),3"
        for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
            if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
                tasks += [int(match[1])] * int(match[2] or 1)
        node = int(environ.get("SLURM_NODEID", "0"))
        local = (number("SLURM_LOCALID"), tasks[node]) if node < len(tasks) else None
        size = number("SLURM_STEP_NUM_TASKS")
        return _Scheduler("SLURM", number("SLURM_PROCID"), size, True, local)
    if "OMPI_COMM_WORLD_SIZE" in environ:
        rank, size = number("OMPI_COMM_WORLD_RANK"), number("OMPI_COMM_WORLD_SIZE")
        finds = "OMPI_MCA_orte_hnp_uri" in environ  # not set by Open MPI 5
        local = None
        if "OMPI_COMM_WORLD_LOCAL_SIZE" in environ:
            local_rank = number("OMPI_COMM_WORLD_LOCAL_RANK")
            local = local_rank, number("OMPI_COMM_WORLD_LOCAL_SIZE")
        return _Scheduler("Open MPI", rank, size, finds, local)
    if "JOB_COMPLETION_INDEX" in environ:  # a pod is not told how many there are
        return _Scheduler("Kubernetes", number("JOB_COMPLETION_INDEX"))
    if "TPU_WORKER_HOSTNAMES" in environ:
        size = len(environ["TPU_WORKER_HOSTNAMES"].split(","))
        rank = int(environ.get("TPU_WORKER_ID", 0))
        return _Scheduler("Google Cloud", rank, size, True)
    return _Scheduler("options")


def _check_address(coordinator: str) -> None:
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
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    return len(list(filter(None, visible.split(","))))


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
