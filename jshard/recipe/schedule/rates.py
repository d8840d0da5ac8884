"""The keys of a learning rate by step, and the schedule that they say."""

import math

import optax
from ml_collections import ConfigDict

from jshard.recipe.config.keys import Key
from jshard.system.errors import UserError

SCHEDULES = ("cosine", "cosine_with_restarts", "linear", "constant", "wsd")


def rate_schedule(
    name: str,
    *,
    peak: float,
    steps: int,
    warmup_steps: int = 0,
    initial_fraction: float = 0.0,
    final_fraction: float = 0.0,
    cycles: int = 1,
    decay_steps: int = 0,
) -> optax.Schedule:
    """Returns the learning rate of update i, which is 0 for a run's first one.

    With the default fractions these are the schedules of transformers' `get_scheduler`,
    in which update 0 of a warm-up has a rate of 0.

    Args:
      name: What follows the warm-up: "cosine", half a wave; "cosine_with_restarts",
        `cycles` of these, each from the peak; "linear"; "constant", at the peak; or
        "wsd", the peak, and half a wave in the last `decay_steps`.
      peak: The largest rate.
      steps: The updates of the run, after which the rate stays at its end.
      warmup_steps: Updates of a linear warm-up; update `warmup_steps` has the peak.
      initial_fraction: Of the peak, where the warm-up starts.
      final_fraction: Of the peak, where the schedule ends, or each of its cycles.
      cycles: Of "cosine_with_restarts".
      decay_steps: Of "wsd"; 0 is a tenth of the run.

    Raises:
      UserError: The name is unknown, or the parts are longer than the run.
    """
    if name not in SCHEDULES:
        raise UserError(
            f"optimizer.schedule={name!r}: must be one of {', '.join(SCHEDULES)}"
        )
    if not 0 <= warmup_steps <= steps:
        raise UserError(
            f"optimizer.warmup_steps={warmup_steps}: must be at least 0 and at most "
            f"the run's steps={steps}"
        )
    if steps * cycles >= 2**31:  # steps are counted in 32 bits
        raise UserError(
            f"optimizer.cycles={cycles}: must be at most {2**31 // (steps + 1)} in a "
            f"run of {steps} steps"
        )
    end, left = peak * final_fraction, max(1, steps - warmup_steps)
    parts, starts = [], []
    if warmup_steps:
        parts = [optax.linear_schedule(peak * initial_fraction, peak, warmup_steps)]
        starts = [warmup_steps]
    if name == "constant":
        parts += [optax.constant_schedule(peak)]
    elif name == "linear":
        parts += [optax.linear_schedule(peak, end, left)]
    elif name == "wsd":
        decay_steps = decay_steps or max(1, min(steps // 10, left))
        if decay_steps > left:
            raise UserError(
                f"optimizer.decay_steps={decay_steps}: must be at most the {left} "
                "steps of the run after its warm-up"
            )
        decay = optax.cosine_decay_schedule(peak, decay_steps, final_fraction)
        parts += [optax.constant_schedule(peak), decay]
        starts += [steps - decay_steps]
    else:
        wave = optax.cosine_decay_schedule(peak, left, final_fraction)
        parts += [wave]
        if name == "cosine_with_restarts" and cycles > 1:
            # optax's restarts are after whole steps, transformers' need not be.
            parts[-1] = lambda step: wave(step * cycles % left)
            parts += [optax.constant_schedule(end)]
            starts += [steps]
    return optax.join_schedules(parts, starts)


def rate_keys(warmup_steps: int) -> dict[str, Key]:
    """Returns the keys of `learning_rate`, besides the peak, for a group "optimizer".

    Beside each stands the default of Hugging Face's Trainer.
    """
    return {
        "schedule": Key(
            "cosine",
            "what follows the warm-up (Hugging Face: linear); wsd is the peak, and a "
            "cosine at the end",
            choices=SCHEDULES,
        ),
        "final_fraction": Key(
            0.1,
            "share of the peak at the end, unless constant (Hugging Face: 0)",
            at_least=0,
            at_most=1,
        ),
        "warmup_steps": Key(
            warmup_steps,
            "steps of linear warm-up (Hugging Face: 0), or half of a run that has no "
            "more than these",
            at_least=0,
        ),
        "warmup_fraction": Key(
            0.0,
            "share of the run that is warm-up; 0 means warmup_steps",
            at_least=0,
            below=1,
        ),
        "initial_fraction": Key(
            "auto",
            "share of the peak at step 0 of the warm-up (Hugging Face: 0, which leaves "
            "the first step without an update); auto is 1 / (warmup_steps + 1)",
            kind=float,
            also=("auto",),
            at_least=0,
            at_most=1,
        ),
        "cycles": Key(1, "cosines of cosine_with_restarts", at_least=1, at_most=1000),
        "decay_steps": Key(
            0, "last steps, in which wsd falls; 0 is a tenth of the run", at_least=0
        ),
    }


def learning_rate(config: ConfigDict) -> optax.Schedule:
    """Returns the schedule of `config.optimizer` for a run of `config.steps`.

    Raises:
      UserError: Warm-up and decay are longer than the run.
    """
    options, steps = config.optimizer, config.steps
    warmup = options.warmup_steps
    if options.warmup_fraction:
        warmup = math.ceil(options.warmup_fraction * steps)
    elif warmup >= steps:
        warmup = steps // 2  # for short trials
    initial = options.initial_fraction
    return rate_schedule(
        options.schedule,
        peak=options.learning_rate,
        steps=steps,
        warmup_steps=warmup,
        initial_fraction=1 / (warmup + 1) if initial == "auto" else initial,
        final_fraction=options.final_fraction,
        cycles=options.cycles,
        decay_steps=options.decay_steps,
    )
