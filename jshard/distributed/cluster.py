"""Which process of which job this is, from options or from who started it."""

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path

from jshard.errors import UserError

OPTIONS = ("coordinator", "num_processes", "process_id", "local_device_ids")

# What jshard.launch tells the processes it starts, in their environment.
LOCAL = "JSHARD_LOCAL"  # "1/4": this one among the processes of its host
ANY_PORT = "JSHARD_ANY_PORT"  # another port would do where the coordinator's is taken
PORT_TAKEN = 98  # what process 0 exits with then: EADDRINUSE, quietly


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A job of several processes, seen from one of them.

    Attributes:
      process_id: which process this is.
      num_processes: how many there are.
      coordinator: "HOST:PORT" of process 0; None leaves it to JAX, which finds it
        under SLURM, Open MPI 4 and on TPUs.
      local_device_ids: the GPUs of this host that this process takes; None is all
        that it sees.
      found_by: who said so: "options", "SLURM", ...
    """

    process_id: int
    num_processes: int
    coordinator: str | None
    local_device_ids: tuple[int, ...] | None
    found_by: str


@dataclasses.dataclass(frozen=True)
class _Found:
    """What a scheduler's environment tells; None is nothing."""

    by: str
    process_id: int | None = None
    num_processes: int | None = None
    finds_coordinator: bool = False
    local: tuple[int, int] | None = None  # this one among the processes of its host


def find_cluster(
    options: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> Cluster | None:
    """Returns the job that this process is part of; None where it is alone.

    Options come first, then what the process was started by: SLURM's srun, Open MPI's
    mpirun, an indexed Job (or JobSet) of Kubernetes, Google Cloud's TPU hosts.

    Args:
      options: text of ``--coordinator``, ``--num_processes``, ``--process_id`` and
        ``--local_device_ids``, where given.
      environ: the environment.

    Raises:
      UserError: an option is no number, or something lacks.
    """
    found = _find(environ)
    num_processes = _number(options, "num_processes", 1)
    process_id = _number(options, "process_id", 0)
    coordinator = options.get("coordinator") or environ.get("JAX_COORDINATOR_ADDRESS")
    by = "options" if "process_id" in options else found.by
    num_processes = found.num_processes if num_processes is None else num_processes
    process_id = found.process_id if process_id is None else process_id

    if num_processes is None:
        given = [name for name in ("coordinator", "process_id") if name in options]
        if given:
            raise UserError(f"--{given[0]} is given: --num_processes=N is needed, too")
        return None
    if num_processes == 1:
        return None
    if process_id is None:
        raise UserError(
            f"--num_processes={num_processes}: which of them is this? give "
            f"--process_id=0 to {num_processes - 1}"
        )
    if process_id >= num_processes:
        raise UserError(
            f"--process_id={process_id}: must be below the {num_processes} processes"
        )
    if coordinator is None and not (found.finds_coordinator and by == found.by):
        raise UserError(
            "where is process 0? give --coordinator=HOST:PORT, a host that all reach "
            "and a free port of it"
        )
    if coordinator is not None:
        _check_address(coordinator)
    given = options.get("local_device_ids") or environ.get("JAX_LOCAL_DEVICE_IDS")
    own = "SLURM_GPUS_PER_TASK" in environ  # SLURM has dealt them out itself
    devices = _ids(given) if given else None
    if devices is None and found.local and not own:
        devices = share_of_gpus(*found.local, environ, found.by)
    return Cluster(process_id, num_processes, coordinator, devices, by)


def _find(environ: Mapping[str, str]) -> _Found:
    def number(name: str) -> int:
        return int(environ[name])

    if LOCAL in environ:
        index, size = environ[LOCAL].split("/")
        return _Found("launch", local=(int(index), int(size)))
    # Of the step, which srun makes: a batch script itself is no process of a job.
    if {"SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"} <= set(environ):
        # Tasks of each node, as in "4(x2),3"; SLURM numbers the nodes.
        tasks = []
        for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
            if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
                tasks += [int(match[1])] * int(match[2] or 1)
        node = int(environ.get("SLURM_NODEID", "0"))
        local = (number("SLURM_LOCALID"), tasks[node]) if node < len(tasks) else None
        size = number("SLURM_STEP_NUM_TASKS")
        return _Found("SLURM", number("SLURM_PROCID"), size, True, local)
    if "OMPI_COMM_WORLD_SIZE" in environ:
        local = None
        if "OMPI_COMM_WORLD_LOCAL_SIZE" in environ:
            rank = number("OMPI_COMM_WORLD_LOCAL_RANK")
            local = rank, number("OMPI_COMM_WORLD_LOCAL_SIZE")
        # Open MPI 5 no longer says where rank 0 is.
        finds = "OMPI_MCA_orte_hnp_uri" in environ
        rank, size = number("OMPI_COMM_WORLD_RANK"), number("OMPI_COMM_WORLD_SIZE")
        return _Found("Open MPI", rank, size, finds, local)
    if "JOB_COMPLETION_INDEX" in environ:  # of the pod; nobody tells it how many
        return _Found("Kubernetes", number("JOB_COMPLETION_INDEX"))
    if "TPU_WORKER_HOSTNAMES" in environ:
        size = len(environ["TPU_WORKER_HOSTNAMES"].split(","))
        return _Found("Google Cloud", int(environ.get("TPU_WORKER_ID", 0)), size, True)
    return _Found("options")


def _number(options: Mapping[str, str], name: str, least: int) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 9 or int(text) < least:
        raise UserError(
            f"--{name}={text}: must be a whole number from {least} to 999999999"
        )
    return int(text)


def _check_address(coordinator: str) -> None:
    match = re.fullmatch(r"(\S{1,255}):(\d{1,5})", coordinator)
    if match is None:
        raise UserError(f"--coordinator={coordinator}: must be HOST:PORT")
    if not 1 <= int(match[2]) <= 65_535:
        raise UserError(
            f"--coordinator={coordinator}: the port must be from 1 to 65535"
        )


def _ids(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    numbered = all(part.isdecimal() and len(part) <= 9 for part in parts)
    if not numbered or len(set(map(int, parts))) < len(parts):
        raise UserError(
            f"--local_device_ids={text}: must be different numbers, like 0,1,2,3"
        )
    return tuple(map(int, parts))


def _visible_gpus(environ: Mapping[str, str]) -> int:
    """How many GPUs of this host a process sees, and is to use."""
    if environ.get("JAX_PLATFORMS") == "cpu":
        return 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    return len(list(filter(None, visible.split(","))))


def share_of_gpus(
    index: int, processes: int, environ: Mapping[str, str], found_by: str = "launch"
) -> tuple[int, ...] | None:
    """Deals the GPUs of a host out to its processes, where each sees all of them.

    Args:
      index: of one among them.
      processes: how many the host has.
      environ: the environment.
      found_by: who started them.

    Returns:
      The GPUs of that process; None is all that it sees, or none.

    Raises:
      UserError: they cannot have equally many.
    """
    gpus = _visible_gpus(environ)
    each = gpus // processes
    dealt = not each and found_by != "launch"  # a scheduler shows each only its own
    if processes == 1 or not gpus or dealt:
        return None
    if gpus % processes:
        ids = "" if found_by == "launch" else ", or give --local_device_ids"
        raise UserError(
            f"{processes} processes cannot share the {gpus} GPUs of a host evenly: "
            f"start one for each GPU or one for each host{ids}"
        )
    return tuple(range(index * each, (index + 1) * each))
