"""The keys that every recipe shares: their defaults, help lines and ranges."""

import dataclasses
from pathlib import Path

from jshard.sharding.settings.policy import BY_MEMORY, Policy
from jshard.system.cli.knob import Knob, knobs

FIT = "fit"  # the value of a key that `training.fit` chooses
FITTED = tuple(f"policy.{name}" for name in BY_MEMORY)


def _policy() -> dict[str, Knob]:
    found = knobs(Policy, "policy.")
    for key in FITTED:
        also = (FIT, *found[key].also)
        help = f"{found[key].help}; fit: the fastest for which the memory suffices"
        found[key] = dataclasses.replace(found[key], also=also, help=help)
    return found


MOST_STEPS = 2**31 - 1  # steps are int32
_SEED = 2**32 - 1  # the largest seed of NumPy's and Grain's generators

# Keys that every recipe must set; the defaults here are never used.
REQUIRED = {
    "steps": Knob(
        1,
        "number of optimizer updates; or of epochs, rounded up to steps: 3epochs",
        noun="a whole number, or epochs like 3epochs",
        at_least=1,
    ),
    "batch_size": Knob(1, "global batch size, in examples", at_least=1),
}

# Keys that a recipe may leave at their defaults.
DEFAULTS = {
    "seed": Knob(
        0, "seed of initial values, dropout and data order", at_least=0, at_most=_SEED
    ),
    "log_every": Knob(10, "steps between two printed lines of metrics", at_least=1),
    "eval_every": Knob(0, "steps between two evaluations; 0 is never", at_least=0),
    "eval_batches": Knob(
        0, "largest number of batches to evaluate; 0 is all validation data", at_least=0
    ),
    "eval_tasks": Knob(
        (), "benchmarks of lm_eval to score at evaluations, e.g. hellaswag,lambada",
        noun="TASK,...",
    ),
    "eval_limit": Knob(
        0, "examples of each of these tasks; 0 is all", at_least=0
    ),
    "mesh.fsdp": Knob(
        -1, "number of shards of a parameter; -1 is all devices", also=(-1,),
        at_least=1,
    ),
    "mesh.replica": Knob(
        1, "number of replicas of the sharded model (HSDP); hosts is one per host",
        also=("hosts",), at_least=1,
    ),
    "mesh.context": Knob(1, "number of devices that share each sequence", at_least=1),
    "mesh.tensor": Knob(
        1, "number of devices that share the heads and features of each layer",
        at_least=1,
    ),
    "mesh.expert": Knob(
        1,
        "number of devices that share the experts of each layer",
        noun="a whole number (jshard.plan --search.mesh.expert=1,8 compares two)",
        at_least=1,
    ),
    "mesh.pipe": Knob(
        1, "number of stages that share the layers, in a pipeline", at_least=1
    ),
    "mesh.cpu_devices": Knob(
        8, "CPU devices per process without GPUs; JAX_NUM_CPU_DEVICES overrides it",
        at_least=1, at_most=1024,
    ),
    **_policy(),
    "compiler_options": Knob((), "options of XLA", noun="NAME=VALUE,..."),
    "checkpoint.every": Knob(500, "steps between two saves; 0 is never", at_least=0),
    "checkpoint.keep": Knob(3, "number of newest checkpoints to keep", at_least=1),
    "checkpoint.keep_every": Knob(
        0, "keep all checkpoints of steps that this divides; 0 is none", at_least=0
    ),
    "checkpoint.best": Knob("", "keep the best by this metric too, e.g. eval_loss"),
    "checkpoint.best_is": Knob(
        "lowest", "which value of that metric is best", choices=("lowest", "highest")
    ),
    "checkpoint.load_best": Knob(
        False, "in Python, end Trainer.fit with the state of the best checkpoint",
    ),
    "checkpoint.local": Knob(
        0, "steps between copies that hosts keep in case one is lost; 0 keeps none",
        at_least=0,
    ),
    "checkpoint.local_dir": Knob(
        "/dev/shm", "where each host keeps them, not shared with others", kind=Path
    ),
    "checkpoint.restore": Knob(
        "",
        "start from these parameters: a run's folder, with @best or @STEP at its "
        "end for another than the newest checkpoint, a checkpoint (Orbax's too), "
        "safetensors, or a Hugging Face folder or name",
        kind=Path, bucket=True, hub="model",
    ),
    "checkpoint.restore_optimizer": Knob(
        False, "restore the optimizer state from there, too"
    ),
    "checkpoint.adapters": Knob(
        "", "start from the LoRA adapters in this PEFT folder", kind=Path, hub="model"
    ),
    "checkpoint.accept": Knob(
        (), "keys or groups that may differ from those of the resumed run: A,B"
    ),
    "logger.wandb": Knob("", "log to this project of Weights & Biases, too"),
    "logger.mlflow": Knob("", "log to this experiment of MLflow, too"),
    "profile.steps": Knob(
        "", "steps to trace for Perfetto and XProf, the last included, e.g. 10:12",
        noun="FIRST:LAST",
    ),
    "watch.silence": Knob(
        8.0, "seconds without a heartbeat of a process until the job ends",
        at_least=2, at_most=60,  # JAX itself gives up after 100
    ),
    "watch.stuck": Knob(
        "auto", "seconds without progress in any process until the job ends; 0 is "
        "never, auto a minute or ten steps, whichever is longer", kind=float,
        also=("auto",), at_least=0, at_most=10_000_000,
    ),
}  # fmt: skip
SHARED = REQUIRED | DEFAULTS

# What these keys mean if a recipe has them as plain numbers.
COMMON = {
    "optimizer.learning_rate": Knob(
        0.0, "peak of the learning rate schedule", at_least=0, at_most=1000
    ),
    "optimizer.warmup_steps": Knob(0, "steps of linear warm-up", at_least=0),
    "optimizer.weight_decay": Knob(
        0.0, "weight decay, multiplied by the learning rate", at_least=0, at_most=1000
    ),
    "optimizer.clip_norm": Knob(1.0, "global norm to clip gradients to", above=0),
    "optimizer.momentum": Knob(0.0, "decay of the momentum", at_least=0, below=1),
    "optimizer.b1": Knob(0.0, "decay of the first moment", at_least=0, below=1),
    "optimizer.b2": Knob(0.0, "decay of the second moment", at_least=0, below=1),
    "optimizer.eps": Knob(
        0.0, "term added to the root of the second moment", at_least=0, at_most=1
    ),
}  # fmt: skip
