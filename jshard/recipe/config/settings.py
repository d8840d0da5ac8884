"""What a run is: the keys that every recipe shares, each declared once, with a type."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, TypeVar

from ml_collections import ConfigDict

from jshard.sharding.settings.policy import BY_MEMORY, Policy
from jshard.system.cli.knob import Knob, knob, knobs

T = TypeVar("T")

FIT = "fit"  # the value of a key that `plan.fit` chooses
MOST_STEPS = 2**31 - 1  # steps are int32
_REMAT, _ACCUMULATE = BY_MEMORY
_SEED = 2**32 - 1  # the largest seed of NumPy's and Grain's generators


def _or_fit(name: str) -> Any:
    """Declares the key of a field of `Policy` that the memory may decide."""
    field = knobs(Policy)[name]
    help = f"{field.help}; fit: the fastest for which the memory suffices"
    changed = dataclasses.replace(field, also=(FIT, *field.also), help=help)
    return dataclasses.field(default=field.default, metadata={Knob: changed})


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """The sizes of the mesh's axes."""

    fsdp: int = knob(
        -1,
        "number of devices to shard each parameter over; -1 is all that remain",
        also=(-1,),
        at_least=1,
    )
    replica: int | Literal["hosts"] = knob(
        1,
        "number of copies of the sharded model (HSDP); hosts is one per host",
        also=("hosts",),
        at_least=1,
    )
    context: int = knob(1, "number of devices that share each sequence", at_least=1)
    tensor: int = knob(
        1,
        "number of devices that share the heads and features of each layer",
        at_least=1,
    )
    expert: int = knob(
        1,
        "number of devices that share the experts of each layer",
        noun="a whole number (jshard.plan --search.mesh.expert=1,8 compares two)",
        at_least=1,
    )
    pipe: int = knob(
        1, "number of stages that share the layers, in a pipeline", at_least=1
    )
    cpu_devices: int = knob(
        8,
        "CPU devices per process without GPUs; JAX_NUM_CPU_DEVICES overrides it",
        at_least=1,
        at_most=1024,
    )


@dataclasses.dataclass(frozen=True)
class OpenSettings:
    """The keys of the policy that a run may leave to what fits the memory.

    The others are those of `Policy` as they are (`make_policy`).
    """

    remat: str = _or_fit(_REMAT)
    accumulate: int | Literal["fit"] = _or_fit(_ACCUMULATE)

    @property
    def open_keys(self) -> list[str]:
        """What is left to the memory, by dotted key; empty if nothing is."""
        return [f"policy.{x}" for x in BY_MEMORY if getattr(self, x) == FIT]


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """What is saved, and what a run starts from."""

    every: int = knob(500, "steps between two saves; 0 is never", at_least=0)
    keep: int = knob(3, "number of newest checkpoints to keep", at_least=1)
    keep_every: int = knob(
        0,
        "also keep every checkpoint whose step is a multiple of this; 0 is none",
        at_least=0,
    )
    keep_hours: float = knob(
        0.0,
        "also keep one checkpoint for each period of this many hours; 0 is none",
        at_least=0,
    )
    best: str = knob(
        "", "also keep the checkpoint of the best value of this metric, e.g. eval_loss"
    )
    best_is: str = knob(
        "lowest",
        "whether the lowest or the highest value of that metric is best",
        choices=("lowest", "highest"),
    )
    load_best: bool = knob(
        False, "in Python, end Trainer.fit with the state of the best checkpoint"
    )
    local: int = knob(
        0,
        "steps between copies of the state in the memory of hosts, from which a job "
        "restarts if a host is lost; 0 makes none",
        at_least=0,
    )
    local_dir: str = knob(
        "/dev/shm", "each host's folder for these copies, not a shared one", kind=Path
    )
    restore: str = knob(
        "",
        "start from these parameters: a run's folder (append @best or @STEP for "
        "another checkpoint than the newest), a checkpoint (also one of Orbax), "
        "safetensors, or a Hugging Face folder or name",
        kind=Path,
        bucket=True,
        hub="model",
    )
    restore_optimizer: bool = knob(
        False, "also restore the optimizer state from checkpoint.restore"
    )
    adapters: str = knob(
        "", "start from the LoRA adapters in this PEFT folder", kind=Path, hub="model"
    )
    accept: tuple[str, ...] = knob(
        (), "keys or groups that may differ from those of the resumed run: A,B"
    )


@dataclasses.dataclass(frozen=True)
class LoggerSettings:
    """The services that a run logs to, by the names of their packages."""

    wandb: str = knob("", "also log to this project of Weights & Biases")
    mlflow: str = knob("", "also log to this experiment of MLflow")


@dataclasses.dataclass(frozen=True)
class ProfileSettings:
    """What is traced."""

    steps: str = knob(
        "",
        "steps to trace for Perfetto and XProf, the last one included, e.g. 10:12",
        noun="FIRST:LAST",
    )


@dataclasses.dataclass(frozen=True)
class WatchSettings:
    """How long processes wait for each other, and what else ends a run."""

    silence: float = knob(
        8.0,
        "end the job when a process has sent no heartbeat for this many seconds",
        at_least=2,
        at_most=60,  # JAX itself gives up after 100
    )
    stuck: float | Literal["auto"] = knob(
        "auto",
        "end the job when no process has made progress for this many seconds; 0 "
        "is never, auto is a minute or ten steps, whichever is longer",
        kind=float,
        also=("auto",),
        at_least=0,
        at_most=10_000_000,
    )
    spikes: int = knob(
        20,
        "steps in a row that skip_spikes may skip until the run ends, its state saved",
        at_least=1,
    )
    replay: int = knob(
        0,
        "steps between two that are computed again on other devices, whose bits must "
        "be the same; 0 is never",
        at_least=0,
    )
    replay_state: str = knob(
        "device",
        "where the state before a step waits while replay computes the step again: "
        "device, beside a second one; or host, in host memory, where it does not fit "
        "twice on the devices",
        choices=("device", "host"),
    )
    replicas: int = knob(
        0,
        "steps between two comparisons of what several devices hold copies of; 0 is "
        "never",
        at_least=0,
    )
    on_difference: str = knob(
        "end",
        "what a difference that one of these finds does: end the run, or go_on with a "
        "warning",
        choices=("end", "go_on"),
    )

    @property
    def limit(self) -> float | None:
        """The seconds of `stuck`; None lets the job decide."""
        return None if self.stuck == "auto" else self.stuck


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """A run, besides what its recipe's own keys say.

    A recipe must set `steps` and `batch_size`; their defaults here are never used.
    """

    steps: int = knob(
        1,
        "number of optimizer updates, or of epochs, rounded up to steps: 3epochs",
        noun="a whole number, or epochs like 3epochs",
        at_least=1,
    )
    batch_size: int = knob(1, "global batch size, in examples", at_least=1)
    seed: int = knob(
        0, "seed of initial values, dropout and data order", at_least=0, at_most=_SEED
    )
    deterministic: bool = knob(
        False,
        "whether the same run has the same bits each time, on GPUs, too, where that "
        "takes slower operations",
    )
    log_every: int = knob(10, "steps between two printed lines of metrics", at_least=1)
    eval_every: int = knob(0, "steps between two evaluations; 0 is never", at_least=0)
    eval_batches: int = knob(
        0,
        "largest number of batches per evaluation; 0 is all validation data",
        at_least=0,
    )
    eval_tasks: tuple[str, ...] = knob(
        (),
        "benchmarks of lm_eval to score at evaluations, e.g. hellaswag,lambada",
        noun="TASK,...",
    )
    eval_limit: int = knob(0, "examples per task of eval_tasks; 0 is all", at_least=0)
    mesh: MeshSettings = MeshSettings()
    policy: OpenSettings = OpenSettings()
    compiler_options: tuple[str, ...] = knob(
        (), "options of XLA", noun="NAME=VALUE,..."
    )
    checkpoint: CheckpointSettings = CheckpointSettings()
    logger: LoggerSettings = LoggerSettings()
    profile: ProfileSettings = ProfileSettings()
    watch: WatchSettings = WatchSettings()


def settings_of(config: ConfigDict) -> RunSettings:
    """Returns the keys of a complete config that every recipe shares."""
    return _filled(RunSettings(), config)


def _filled(defaults: T, config: ConfigDict) -> T:
    """Returns settings with the values of a config in place of all defaults."""
    values = {}
    for field in dataclasses.fields(defaults):  # pyright: ignore[reportArgumentType]
        value = config[field.name]
        is_group = dataclasses.is_dataclass(field.default)
        values[field.name] = _filled(field.default, value) if is_group else value
    return type(defaults)(**values)
