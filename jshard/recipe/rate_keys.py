"""The keys of a learning rate by step, and the schedule that they say."""

import math

import optax

from jshard.config.keys import Key
from jshard.config.run_config import Config
from jshard.recipe.rate_schedule import SCHEDULES, rate_schedule


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
            "share of the run to warm up for, instead of warmup_steps; 0 is those",
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


def learning_rate(config: Config) -> optax.Schedule:
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
