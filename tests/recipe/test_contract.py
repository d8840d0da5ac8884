"""What a recipe's own functions raise and return: their lines, or one line."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from ml_collections import ConfigDict

from jshard.recipe import contract as returns
from jshard.recipe.load import open_recipe
from jshard.system.errors import UserError

CONFIG = ConfigDict({"steps": 3})
RECIPE = """\
def get_config(): ...
def make_model(config, rngs): ...
def make_optimizer(config): ...
def loss_fn(model, batch): ...
def make_data(config, split): ...
def references(config): ...
"""
NNX_OPTIMIZER = nnx.Optimizer(
    nnx.Linear(1, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param
)


def returning(value):
    return lambda *_: value


def raising(error):
    def function(*_):
        raise error

    return function


@pytest.mark.parametrize(
    ("check", "value", "said"),
    [
        (returns.make_optimizer, None, "make_optimizer(config) returned None; it must"),
        (returns.make_optimizer, optax.adamw, "must return an optax transformation"),
        (returns.make_optimizer, 1e-3, "returned 0.001"),
        (returns.make_optimizer, NNX_OPTIMIZER, "returned Optimizer; it must return"),
        (returns.learning_rate, None, "learning_rate(config) returned None; it must"),
        (returns.learning_rate, 0.1, "returned 0.1; it must return a schedule"),
        (returns.learning_rate, lambda: 0.1, "is called as"),
        (returns.learning_rate, lambda step: None, "a number for step 0"),
        (returns.learning_rate, lambda step: jnp.ones(3), "a number for step 0"),
        (returns.references, None, "references(config) returned None; it must return"),
        (returns.references, [("a", 1.0)], "it must return a dict of name to loss"),
        (returns.references, {"a": "1.0"}, "'a': '1.0'"),
        (returns.references, {"a": math.nan}, "a finite number"),
        (returns.references, {3: 1.0}, "3: 1.0"),
        (returns.flops_per_token, None, "flops_per_token(config) returned None"),
        (returns.flops_per_token, -2.0, "a positive number"),
        (returns.flops_per_token, True, "a positive number"),
        (returns.sample, "abc", "sample(config) returned 'abc'; it must return (gen"),
        (returns.sample, (len, 1), "it must return (generate, prompts, decode)"),
        (returns.sample, (lambda model: 1, 1, str), "is called as generate of sample"),
    ],
)
def test_a_wrong_return_is_one_line_that_names_the_function(check, value, said):
    with pytest.raises(UserError) as caught:
        check(returning(value), CONFIG)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("check", [returns.learning_rate, returns.make_optimizer])
def test_a_warm_up_as_long_as_the_run_is_one_line_that_names_both_keys(check):
    def schedule(config):
        warmup = config.optimizer.warmup_steps
        return optax.warmup_cosine_decay_schedule(0.0, 1.0, warmup, config.steps)

    config = ConfigDict({"steps": 30, "optimizer": {"warmup_steps": 30}})
    with pytest.raises(UserError, match=r"--config\.steps=30") as caught:
        check(schedule, config)
    said = str(caught.value)
    assert said.startswith("--config.optimizer.warmup_steps=30: the warm-up must be")
    config.optimizer.warmup_steps = 29
    assert schedule(config)(29) == 1
    # Other errors of the recipe stay its own.
    with pytest.raises(ValueError, match="mine"):
        check(raising(ValueError("mine")), ConfigDict({"steps": 3}))


def test_what_is_right_passes():
    sgd = optax.sgd(0.1)
    assert returns.make_optimizer(returning(sgd), CONFIG) is sgd
    schedule = returns.learning_rate(returning(optax.linear_schedule(1, 0, 2)), CONFIG)
    assert schedule is not None
    assert schedule(1) == 0.5
    losses = {"a": 1, "b": np.float32(2), "c": jnp.float32(3)}
    assert returns.references(returning(losses), CONFIG) == {"a": 1, "b": 2, "c": 3}
    assert returns.flops_per_token(returning(np.int64(6)), CONFIG) == 6
    found = returns.sample(returning((lambda m, x: x, 1, lambda x: "text")), CONFIG)
    assert found is not None
    assert found[2](0) == "text"
    for function in (returns.learning_rate, returns.flops_per_token, returns.sample):
        assert function(None, CONFIG) is None
    assert returns.references(None, CONFIG) == {}


def test_a_decoder_that_makes_no_text_is_one_line():
    found = returns.sample(returning((lambda m, x: x, 1, list)), CONFIG)
    assert found is not None
    with pytest.raises(UserError, match=r"decode of sample\(config\) returned \[3\]"):
        found[2]([3])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("make_model(config, rngs)", "make_model(config)", "make_model(config, rngs)"),
        ("get_config()", "get_config(x)", "is called as bad.py: get_config()"),
        ("loss_fn(model, batch)", "loss_fn(*, model, batch)", "loss_fn(model, batch)"),
        ("references(config)", "references()", "references(config): too many"),
        ("make_data(config, split)", "make_data(c, s, x)", "missing a required"),
    ],
)
def test_a_signature_that_cannot_be_called_is_one_line_before_anything_runs(
    old, new, said, tmp_path
):
    (tmp_path / "bad.py").write_text(RECIPE.replace(old, new))
    with pytest.raises(UserError) as caught, open_recipe(tmp_path / "bad.py"):
        pass
    assert said in str(caught.value)


def test_signatures_that_can_be_called_pass():
    for name, arguments in returns.ARGUMENTS.items():
        returns.check_signature(lambda *args: 0, name, arguments)
        returns.check_signature(lambda *a, more=1: 0, name, arguments)
        returns.check_signature(functools.partial(max, 0), name, arguments)
        returns.check_signature(max, name, arguments)  # of C
    for name in ("loss_fn", "predict_fn"):
        returns.check_signature(
            lambda model, batch, rngs: 0, name, returns.ARGUMENTS[name]
        )
