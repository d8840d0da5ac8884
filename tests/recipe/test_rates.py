"""Learning rates: those of transformers' schedules, update by update, by keys alone."""

import math
import re

import jax
import numpy as np
import optax
import pytest

import jshard
from jshard.recipe import contract
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config
from jshard.recipe.schedule.rates import rate_schedule

PEAK = 2e-3


# The factors of src/transformers/optimization.py, for update i of n with w of warm-up.
def half_wave(progress, waves=0.5):
    return 0.5 * (1 + math.cos(math.pi * 2 * waves * progress))


def after(i, n, w):
    return (i - w) / max(1, n - w)


def linear(i, n, w):
    return max(0.0, (n - i) / max(1, n - w))


def cosine(i, n, w):
    return max(0.0, half_wave(after(i, n, w)))


def with_min_lr(i, n, w, rate=0.3):
    return max(0, half_wave(after(i, n, w)) * (1 - rate) + rate)


def with_hard_restarts(i, n, w, cycles=3):
    progress = after(i, n, w)
    return 0.0 if progress >= 1 else max(0.0, half_wave(cycles * progress % 1))


def constant(i, n, w):
    return 1.0


def stable_decay(i, n, w, decay=6, rate=0.0):
    if i < n - decay:
        return 1.0
    if i < n:
        return half_wave((i - n + decay) / decay) * (1 - rate) + rate
    return rate


def polynomial(i, n, w, rate=0.25):
    return (1 - rate) * (1 - (i - w) / (n - w)) + rate


SCHEDULES = {
    "linear": (linear, {"schedule": "linear"}),
    "cosine": (cosine, {"schedule": "cosine"}),
    "cosine_with_min_lr": (
        with_min_lr,
        {"schedule": "cosine", "final_fraction": 0.3},
    ),
    "cosine_with_restarts": (
        with_hard_restarts,
        {"schedule": "cosine_with_restarts", "cycles": 3},
    ),
    "constant_with_warmup": (constant, {"schedule": "constant"}),
    "warmup_stable_decay": (stable_decay, {"schedule": "wsd", "decay_steps": 6}),
    "polynomial": (polynomial, {"schedule": "linear", "final_fraction": 0.25}),
}
# Steps of the run and of the warm-up.
RUNS = ((20, 5), (31, 1), (20, 14), (7, 0))


def transformers_rates(factor, steps, warmup):
    return [
        PEAK * (i / warmup if i < warmup else factor(i, steps, warmup))
        for i in range(steps)
    ]


@pytest.fixture(scope="module")
def finetune():
    with open_recipe(find_recipe("finetune.py")) as recipe:
        yield recipe


def by_keys(recipe, steps, **keys):
    """Returns the rates of the updates of a run."""
    keys = {f"optimizer.{key}": value for key, value in keys.items()}
    given = {"steps": steps, "optimizer.learning_rate": PEAK, **keys}
    schedule = recipe.learning_rate(make_config(recipe, given))
    return np.asarray(jax.jit(jax.vmap(schedule))(np.arange(steps)))


@pytest.mark.quick("linear", "warmup_stable_decay", "cosine_with_min_lr")
@pytest.mark.parametrize("name", SCHEDULES)
def test_by_keys_the_rate_of_each_update_is_that_of_transformers(finetune, name):
    factor, keys = SCHEDULES[name]
    keys = {"final_fraction": 0.0, "initial_fraction": 0.0, **keys}
    for steps, warmup in RUNS:
        got = by_keys(finetune, steps, warmup_steps=warmup, **keys)
        want = transformers_rates(factor, steps, warmup)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * PEAK)


def test_a_warm_up_of_a_fraction_is_that_of_transformers(finetune):
    keys = {"schedule": "linear", "final_fraction": 0.0, "initial_fraction": 0.0}
    got = by_keys(finetune, 30, warmup_fraction=0.31, **keys)
    want = transformers_rates(linear, 30, math.ceil(30 * 0.31))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * PEAK)


def test_by_default_the_rates_are_those_that_the_recipes_were_measured_with(finetune):
    for steps, warmup in ((200, 50), (4, 2), (1, 0)):
        want = optax.warmup_cosine_decay_schedule(
            PEAK / (warmup + 1), PEAK, warmup, steps, end_value=PEAK / 10
        )
        got = by_keys(finetune, steps)
        rates = jax.jit(jax.vmap(want))(np.arange(steps))
        np.testing.assert_allclose(got, rates, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"warmup_steps": 21}, "optimizer.warmup_steps=21: must be at least 0 and at"),
        ({"name": "wsd", "decay_steps": 16, "warmup_steps": 5}, "decay_steps=16: must"),
        ({"name": "one_cycle"}, "optimizer.schedule='one_cycle': must be one of cos"),
        (
            {"name": "cosine_with_restarts", "steps": 10_000_000, "cycles": 1000},
            "optimizer.cycles=1000: must be at most 214",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_is_refused(given, said):
    with pytest.raises(jshard.UserError, match=re.escape(said)):
        rate_schedule(**{"name": "cosine", "peak": 1.0, "steps": 20} | given)


def test_a_decay_longer_than_the_run_is_not_taken_for_a_warm_up(finetune):
    given = {"steps": 4, "optimizer.schedule": "wsd", "optimizer.decay_steps": 9}
    config = make_config(finetune, given)
    with pytest.raises(
        jshard.UserError, match=r"optimizer\.decay_steps=9: must be at m"
    ):
        contract.learning_rate(finetune.learning_rate, config)
