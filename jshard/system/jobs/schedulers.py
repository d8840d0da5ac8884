"""What the environment says of a process that a scheduler or launcher started.

Several may speak at once: mpirun and torchrun run within SLURM, and whole clusters
export RANK. The one that started the process itself knows best, so the innermost comes
first. Variable names are those of their documentation, of SLURM 26.11 and PyTorch 2.13.
"""

import dataclasses
import re
from collections.abc import Mapping

from jshard.system.errors import UserError

# Environment variable that jshard.launch sets for the processes it starts: "1/4", the
# rank and the number of processes on this host.
LOCAL = "JSHARD_LOCAL"


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """What the environment says; None where it says nothing.

    Attributes:
      name: of the scheduler.
      variable: the one that says that this is one of several processes.
      process_id: the rank.
      num_processes: the number of processes.
      coordinator: "HOST:PORT" of process 0.
      finds_coordinator: whether JAX finds it.
      local: rank and number of processes on this host; its number may be unknown.
    """

    name: str
    variable: str = ""
    process_id: int | None = None
    num_processes: int | None = None
    coordinator: str | None = None
    finds_coordinator: bool = False
    local: tuple[int, int | None] | None = None


# name, then the variables of: rank, number of processes, and both on this host. None:
# there is no such variable.
_MPI = (
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
     "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("JSM", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
     "JSM_NAMESPACE_LOCAL_SIZE"),
    ("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", None),
    ("PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMIx", "PMIX_RANK", None, None, None),
)  # fmt: skip


def find_scheduler(environ: Mapping[str, str]) -> Scheduler:
    """Returns what the innermost scheduler says of this process.

    Raises:
      UserError: a variable is not what its scheduler sets, or two schedulers, of which
        neither is known to be within the other, disagree.
    """
    if LOCAL in environ:
        rank, _, size = environ[LOCAL].partition("/")
        local = _pair({"rank": rank, "size": size}, "rank", "size")
        return Scheduler("launch", local=local)
    if "TORCHELASTIC_RUN_ID" in environ:
        return _pytorch("torchrun", environ)
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return _open_mpi(environ)
    slurm, mpi = _slurm(environ), _mpi(environ)
    # SLURM's plugins for MPI say what SLURM does; mpirun within a step does not.
    if mpi and not (slurm and _agree(slurm, mpi)):
        return mpi
    # Scripts of SLURM often export WORLD_SIZE alone.
    ranked = "RANK" in environ or ("WORLD_SIZE" in environ and not slurm)
    pytorch = _pytorch("PyTorch", environ) if ranked else None
    if slurm and pytorch and not _agree(slurm, pytorch):
        raise UserError(
            f"SLURM_PROCID and SLURM_STEP_NUM_TASKS say that this is process "
            f"{slurm.process_id} of {slurm.num_processes}, RANK and WORLD_SIZE "
            f"{pytorch.process_id} of {pytorch.num_processes}: unset those that do not "
            "hold"
        )
    if slurm:
        return slurm
    if pytorch:
        return pytorch
    if "JOB_COMPLETION_INDEX" in environ:  # a pod is not told how many there are
        index = _number(environ, "JOB_COMPLETION_INDEX")
        return Scheduler("Kubernetes", "JOB_COMPLETION_INDEX", index)
    if "TPU_WORKER_HOSTNAMES" in environ:
        size = len(environ["TPU_WORKER_HOSTNAMES"].split(","))
        rank = _number(environ, "TPU_WORKER_ID") or 0
        name = "TPU_WORKER_HOSTNAMES"
        return Scheduler("Google Cloud", name, rank, size, finds_coordinator=True)
    return Scheduler("options")


def _agree(slurm: Scheduler, other: Scheduler) -> bool:
    """Returns whether both say the same, of what the other one says."""
    same = slurm.process_id == other.process_id
    return same and other.num_processes in (None, slurm.num_processes)


def _number(environ: Mapping[str, str], name: str | None) -> int | None:
    """Returns the number in a variable, or None if it is not set."""
    if name is None or name not in environ:
        return None
    if not re.fullmatch(r"\d{1,9}", environ[name]):
        raise UserError(f"{name}={environ[name]}: must be a number; unset it")
    return int(environ[name])


def _pair(
    environ: Mapping[str, str], rank: str | None, size: str | None
) -> tuple[int, int | None] | None:
    first, second = _number(environ, rank), _number(environ, size)
    if first is None:
        return None
    if second is not None and first >= second:
        raise UserError(f"{rank}={first}: must be less than {size}={second}")
    return first, second


def _pytorch(name: str, environ: Mapping[str, str]) -> Scheduler:
    """Reads what torchrun, accelerate, DeepSpeed and a PyTorchJob set."""
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_size = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environ else "LOCAL_SIZE"
    local = _pair(environ, "LOCAL_RANK", local_size)
    each = environ.get("PET_NPROC_PER_NODE", "1")  # a PyTorchJob's, for torchrun
    if name != "torchrun" and "LOCAL_RANK" not in environ and each != "1":
        raise UserError(
            f"PET_NPROC_PER_NODE={each}: that many processes are to start in this pod, "
            "by torchrun; start jshard.train with it, or leave one process per pod"
        )
    host, port = environ.get("MASTER_ADDR"), _number(environ, "MASTER_PORT")
    coordinator = None
    if host and port is not None:
        # torchrun itself listens on its port.
        shared = environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        coordinator = f"{host}:{port + shared}"
    variable = "RANK" if "RANK" in environ else "WORLD_SIZE"
    return Scheduler(name, variable, rank, size, coordinator, local=local)


def _open_mpi(environ: Mapping[str, str]) -> Scheduler:
    rank, size = (_number(environ, f"OMPI_COMM_WORLD_{x}") for x in ("RANK", "SIZE"))
    local = _pair(environ, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    finds = "OMPI_MCA_orte_hnp_uri" in environ  # not set by Open MPI 5
    name = "OMPI_COMM_WORLD_SIZE"
    return Scheduler("Open MPI", name, rank, size, None, finds, local)


def _mpi(environ: Mapping[str, str]) -> Scheduler | None:
    for name, rank, size, *local in _MPI:
        if rank in environ:
            numbers = _number(environ, rank), _number(environ, size)
            here = _pair(environ, *local)
            nodes = _number(environ, "FLUX_JOB_NNODES") if name == "Flux" else None
            if here and nodes is not None and nodes == numbers[1]:
                here = (0, 1)  # one on each, which Flux does not say
            return Scheduler(name, rank, *numbers, local=here)
    return None


def _slurm(environ: Mapping[str, str]) -> Scheduler | None:
    # Variables of the job step that srun creates: a batch script has no rank itself.
    if not {"SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"} <= set(
        environ
    ):
        return None
    node, tasks = _number(environ, "SLURM_NODEID") or 0, None
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        # Tasks of each node, as in "4(x2),3".
        if match := re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part):
            node -= int(match[2] or 1)
            if node < 0 and tasks is None:
                tasks = match[1]
    local = None
    if tasks is not None:
        here = {"SLURM_LOCALID": environ.get("SLURM_LOCALID", "0"), "tasks": tasks}
        local = _pair(here, "SLURM_LOCALID", "tasks")
    rank, size = (_number(environ, f"SLURM_{x}") for x in ("PROCID", "STEP_NUM_TASKS"))
    return Scheduler("SLURM", "SLURM_PROCID", rank, size, None, True, local)


def first_node(environ: Mapping[str, str]) -> str:
    """Returns the first node of a step of SLURM, where JAX looks for process 0."""
    # "node7", "node7,other" or "node[007-9,12],other"
    match = re.match(r"([^,[]*)(?:\[([^],-]*))?", environ["SLURM_STEP_NODELIST"])
    assert match is not None
    return match[1] + (match[2] or "")


def sees_its_own_gpus(environ: Mapping[str, str], tasks: int) -> bool:
    """Returns whether SLURM shows each of the tasks of a node GPUs that are its own.

    slurmstepd tells each task its binding, as in "gres/gpu:verbose,per_task:2": that of
    --gpu-bind or --tres-bind, or what --gpus-per-task, --ntasks-per-gpu or
    --tres-per-task stand for (srun(1), --tres-bind).

    Raises:
      UserError: tasks share GPUs, or may.
    """
    given = environ.get("SLURMD_TRES_BIND")
    if given is None:  # of a SLURM that does not tell
        return "SLURM_GPUS_PER_TASK" in environ
    found = re.search(r"(?:^|\+)(?:gres/)?gpu:(?:verbose,)?([^+]*)", given)
    kind, _, value = (found[1] if found else "none").partition(":")
    kind = kind.removesuffix("_gpu")  # of --gpu-bind; --tres-bind has map and mask
    if kind == "none" or tasks == 1:
        return kind != "none"
    apart = kind == "per_task" or (kind == "single" and value in ("", "1"))
    if kind in ("map", "mask"):
        apart = _are_apart(kind, value, tasks)
    if kind == "closest":  # each takes all that are near, and another may be as near
        seen, of_step = gpus_seen(environ), _number(environ, "SLURM_GPUS_ON_NODE")
        apart = seen is not None and of_step == seen * tasks
    if not apart:
        raise UserError(
            f"SLURM binds GPUs by {found[0].lstrip('+') if found else given}, by which "
            f"{tasks} tasks of a node may share one; give srun --gpu-bind=per_task:N, "
            "or --gpu-bind=none, by which jshard divides them"
        )
    return True


def _are_apart(kind: str, value: str, tasks: int) -> bool:
    """Returns whether lists like "0*2,1" give the tasks of a node different GPUs."""
    masks: list[int] = []
    for part in value.split(","):
        match = re.fullmatch(r"((?:0x)?[0-9a-f]{1,64})(?:\*(\d{1,4}))?", part.lower())
        number = r"\d{1,4}" if kind == "map" else r"\w+"
        if match is None or not re.fullmatch(number, match[1]):
            return False
        mask = 1 << int(match[1]) if kind == "map" else int(match[1], 16)
        masks += [mask] * int(match[2] or 1)
    if not masks:
        return False
    seen = 0
    for task in range(tasks):
        mask = masks[task % len(masks)]
        if seen & mask:
            return False
        seen |= mask
    return True


def gpus_seen(environ: Mapping[str, str]) -> int | None:
    """Returns the number of GPUs in CUDA_VISIBLE_DEVICES; None if it is not set.

    CUDA ignores what comes after the first that is none, such as -1 or NoDevFiles. On
    AMD GPUs the variable is ROCR_VISIBLE_DEVICES.
    """
    names = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    visible = [environ[name] for name in names if name in environ]
    if not visible:
        return None
    count = 0
    for name in visible[0].split(","):
        if not re.fullmatch(r"\s*(\d+|(GPU|MIG)-\S+)\s*", name):
            break
        count += 1
    return count
