"""The keys that every recipe shares: what `--help` says of them, and their bounds."""

from pathlib import Path

from jshard.knob import Knob, knobs
from jshard.policy import Policy

_SEED = 2**32 - 1  # of numpy's and grain's generators

# A recipe gives these itself; the values here are never used.
REQUIRED = {
    "steps": Knob(1, "updates of the parameters", at_least=1),
    "batch_size": Knob(1, "examples a step, of all devices together", at_least=1),
}

# A recipe that leaves one out gets its default.
DEFAULTS = {
    "seed": Knob(
        0, "seed of initial values, dropout and data", at_least=0, at_most=_SEED
    ),
    "log_every": Knob(10, "steps between two lines of metrics", at_least=1),
    "eval_every": Knob(0, "steps between two evaluations; 0 is never", at_least=0),
    "eval_batches": Knob(
        0, "batches an evaluation at most; 0 is all validation data", at_least=0
    ),
    "mesh.fsdp": Knob(
        -1, "shards of a parameter; -1 is all devices", also=(-1,), at_least=1
    ),
    "mesh.replica": Knob(
        1, "copies of the sharded model; hosts is one a host", also=("hosts",),
        at_least=1,
    ),
    "mesh.cpu_devices": Knob(
        8, "CPU devices a process, where it has no GPUs", at_least=1, at_most=1024
    ),
    **knobs(Policy, "policy."),
    "compiler_options": Knob((), "options of XLA", noun="NAME=VALUE,..."),
    "checkpoint.every": Knob(500, "steps between two saves; 0 is never", at_least=0),
    "checkpoint.keep": Knob(3, "how many of the newest stay", at_least=1),
    "checkpoint.keep_every": Knob(
        0, "of steps that this divides all stay; 0 is none", at_least=0
    ),
    "checkpoint.best": Knob(
        "", "the best by this metric stays, too, e.g. eval_loss"
    ),
    "checkpoint.best_is": Knob(
        "lowest", "what is best", choices=("lowest", "highest")
    ),
    "checkpoint.restore": Knob(
        "", "start from these parameters: a run's folder, a checkpoint, or safetensors",
        kind=Path,
    ),
    "checkpoint.restore_optimizer": Knob(
        False, "and from the optimizer's state there, too"
    ),
    "checkpoint.accept": Knob(
        (), "keys or groups that may differ from the run that is resumed: A,B"
    ),
    "watch.silence": Knob(
        8.0, "seconds without a sign of one process until all end",
        at_least=2, at_most=60,  # JAX itself gives up after 100
    ),
    "watch.stuck": Knob(
        "auto", "seconds without progress of any process until all end; 0 is never, "
        "auto a minute or ten of the run's own steps", kind=float, also=("auto",),
        at_least=0, at_most=10_000_000,
    ),
}  # fmt: skip
SHARED = REQUIRED | DEFAULTS

# What these keys mean where a recipe has them as plain numbers.
COMMON = {
    "optimizer.learning_rate": Knob(
        0.0, "the peak of its schedule", at_least=0, at_most=1000
    ),
    "optimizer.warmup_steps": Knob(
        0, "steps in which the learning rate rises", at_least=0
    ),
    "optimizer.weight_decay": Knob(
        0.0, "how much of a weight decays, times the learning rate", at_least=0,
        at_most=1000,
    ),
    "optimizer.clip_norm": Knob(
        1.0, "longer gradients are scaled down to this norm", above=0
    ),
    "optimizer.momentum": Knob(0.0, "decay of past gradients", at_least=0, below=1),
    "optimizer.b1": Knob(0.0, "decay of the mean of gradients", at_least=0, below=1),
    "optimizer.b2": Knob(0.0, "decay of the mean of squares", at_least=0, below=1),
    "optimizer.eps": Knob(0.0, "added to the root of squares", at_least=0, at_most=1),
}  # fmt: skip
