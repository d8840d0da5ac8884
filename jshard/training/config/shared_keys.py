"""The keys that every recipe shares: what `--help` says of them, and their bounds."""

from pathlib import Path

from jshard.precision import FLOATING, ONE_BYTE
from jshard.training.keys import Key

_SEED = 2**32 - 1  # of numpy's and grain's generators

# A recipe gives these itself; the values here are never used.
REQUIRED = {
    "steps": Key(1, "updates of the parameters", at_least=1),
    "batch_size": Key(1, "examples a step, of all devices together", at_least=1),
}

# A recipe that leaves one out gets its default.
DEFAULTS = {
    "seed": Key(
        0, "seed of initial values, dropout and data", at_least=0, at_most=_SEED
    ),
    "log_every": Key(10, "steps between two lines of metrics", at_least=1),
    "eval_every": Key(0, "steps between two evaluations; 0 is never", at_least=0),
    "eval_batches": Key(
        0, "batches an evaluation at most; 0 is all validation data", at_least=0
    ),
    "mesh.fsdp": Key(
        -1, "shards of a parameter; -1 is all devices", also=(-1,), at_least=1
    ),
    "mesh.replica": Key(
        1, "copies of the sharded model; hosts is one a host", also=("hosts",),
        at_least=1,
    ),
    "mesh.cpu_devices": Key(
        8, "CPU devices a process, where it has no GPUs", at_least=1, at_most=1024
    ),
    "policy.remat": Key(
        "full",
        "recompute a layer in the backward: full, dots (keep products with weights), "
        "none, names:A+B (keep these), offload:A+B (these, in host memory)",
    ),
    "policy.first_k": Key(
        None, "remat applies to so many first layers; None is all", kind=int,
        also=(None,), at_least=0,
    ),
    "policy.reshard_after_forward": Key(
        True, "drop gathered weights until the backward; a number keeps them sharded "
        "over groups of so many devices", kind=int, also=(True, False), at_least=1,
    ),
    "policy.keep_last": Key(
        0, "so many last layers keep gathered weights for the backward", at_least=0
    ),
    "policy.prefetch": Key(
        None, "gather a layer's weights while the one before computes; None is on GPUs",
        kind=bool, also=(None,),
    ),
    "policy.reshard_root": Key(
        False, "as reshard_after_forward, for what is in no layer", kind=int,
        also=(True, False), at_least=1,
    ),
    "policy.accumulate": Key(
        1, "micro-batches a step: less memory for activations", at_least=1
    ),
    "policy.defer_scatter": Key(
        False, "gather and scatter once a step, not once a micro-batch"
    ),
    "policy.loss_scale": Key(False, "scale the loss, which float16 needs"),
    "policy.min_shard_elements": Key(
        4096, "parameters with fewer elements are not sharded", at_least=0
    ),
    "policy.ema_decay": Key(
        None, "keep moving averages of the parameters, by this decay", kind=float,
        also=(None,), above=0, below=1,
    ),
    "policy.offload": Key(
        None, "held in host memory: the optimizer's state, or all (parameters, too)",
        kind=str, also=(None,), choices=("optimizer", "all"),
    ),
    "policy.precision.param": Key(
        None, "dtype of stored parameters; None is the model's", kind=str,
        also=(None,), choices=FLOATING,
    ),
    "policy.precision.gather": Key(
        None, "dtype in which weights are gathered; None is that of compute", kind=str,
        also=(None,), choices=(*FLOATING, *ONE_BYTE),
    ),
    "policy.precision.compute": Key(
        None, "dtype of the computation; None is the model's", kind=str,
        also=(None,), choices=FLOATING,
    ),
    "policy.precision.reduce": Key(
        None, "dtype in which gradients are sent; None is that of compute", kind=str,
        also=(None,), choices=FLOATING,
    ),
    "policy.precision.sum": Key(
        None, "dtype in which gradients are added up; None is that of reduce", kind=str,
        also=(None,), choices=FLOATING,
    ),
    "policy.overrides": Key(
        (), "other values for some modules: PATTERN:KEY=VALUE,..., like "
        "blocks.norm*:compute=float32",
    ),
    "compiler_options": Key((), "options of XLA: NAME=VALUE,..."),
    "checkpoint.every": Key(500, "steps between two saves; 0 is never", at_least=0),
    "checkpoint.keep": Key(3, "how many of the newest stay", at_least=1),
    "checkpoint.keep_every": Key(
        0, "of steps that this divides all stay; 0 is none", at_least=0
    ),
    "checkpoint.best": Key(
        "", "the best by this metric stays, too, e.g. eval_loss"
    ),
    "checkpoint.best_is": Key(
        "lowest", "what is best", choices=("lowest", "highest")
    ),
    "checkpoint.restore": Key(
        "", "start from these parameters: a run's folder, a checkpoint, or safetensors",
        kind=Path,
    ),
    "checkpoint.restore_optimizer": Key(
        False, "and from the optimizer's state there, too"
    ),
    "checkpoint.accept": Key(
        (), "keys or groups that may differ from the run that is resumed: A,B"
    ),
    "watch.silence": Key(
        8.0, "seconds without a sign of one process until all end",
        at_least=2, at_most=60,  # JAX itself gives up after 100
    ),
    "watch.stuck": Key(
        "auto", "seconds without progress of any process until all end; 0 is never, "
        "auto a minute or ten of the run's own steps", kind=float, also=("auto",),
        at_least=0, at_most=10_000_000,
    ),
}  # fmt: skip
SHARED = REQUIRED | DEFAULTS

# What these keys mean where a recipe has them as plain numbers.
COMMON = {
    "optimizer.learning_rate": Key(
        0.0, "the peak of its schedule", at_least=0, at_most=1000
    ),
    "optimizer.warmup_steps": Key(
        0, "steps in which the learning rate rises", at_least=0
    ),
    "optimizer.weight_decay": Key(
        0.0, "how much of a weight decays, times the learning rate", at_least=0,
        at_most=1000,
    ),
    "optimizer.clip_norm": Key(
        1.0, "longer gradients are scaled down to this norm", above=0
    ),
    "optimizer.momentum": Key(0.0, "decay of past gradients", at_least=0, below=1),
    "optimizer.b1": Key(0.0, "decay of the mean of gradients", at_least=0, below=1),
    "optimizer.b2": Key(0.0, "decay of the mean of squares", at_least=0, below=1),
    "optimizer.eps": Key(0.0, "added to the root of squares", at_least=0, at_most=1),
}  # fmt: skip
