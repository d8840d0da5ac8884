"""What is said of optax's transformations by name is what they do."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jshard
from jshard.errors import UserError
from jshard.optim.reach import (
    OF_NUMBERS,
    OF_TENSORS,
    Reach,
    check_masks,
    reach,
    split,
)

pytestmark = pytest.mark.usefixtures("x64")

ARGUMENTS: dict[str, tuple] = {
    "adaptive_grad_clip": (0.1,),
    "add_decayed_weights": (0.1,),
    "clip": (0.1,),
    "clip_by_block_rms": (0.1,),
    "ema": (0.9,),
    "scale": (0.5,),
    "scale_by_rprop": (0.1,),
    "scale_by_schedule": (lambda count: 1 / (1 + count),),
    "trace": (0.9,),
}


def make(name: str) -> optax.GradientTransformation:
    module = optax if hasattr(optax, name) else optax.contrib
    return getattr(module, name)(*ARGUMENTS.get(name, ()))


def run(tx: optax.GradientTransformation, params: Any) -> Any:
    """Parameters after three steps with gradients that each number has of its own."""
    tx = optax.with_extra_args_support(tx)
    state = tx.init(params)
    for step in range(3):
        grads = jax.tree.map(lambda p, step=step: jnp.sin(7 * p + step), params)
        updates, state = tx.update(grads, state, params, value=step)
        params = optax.apply_updates(params, updates)
    return params


def close(got: Any, want: Any) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), got, want)


@pytest.mark.parametrize("name", sorted(OF_NUMBERS))
def test_what_is_said_to_look_at_numbers_does_not_see_others(name):
    assert reach(make(name).update) == Reach.NUMBER
    numbers = jnp.linspace(-1, 1, 6).reshape(2, 3)
    alone = [run(make(name), number) for number in numbers.ravel()]
    close(run(make(name), numbers).ravel(), jnp.stack(alone))


@pytest.mark.parametrize("name", sorted(OF_TENSORS))
def test_what_is_said_to_look_at_tensors_does_not_see_others(name):
    assert reach(make(name).update) == Reach.TENSOR
    tensors = {"a": jnp.linspace(-1, 1, 6).reshape(2, 3), "b": jnp.full((4, 2), 0.3)}
    alone = {key: run(make(name), x) for key, x in tensors.items()}
    close(run(make(name), tensors), alone)


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def own(updates: Any, state: Any, params: Any = None) -> Any:
    del params
    return updates, state


CLIP = optax.clip_by_global_norm(1.0)
OWN = optax.GradientTransformation(lambda params: (), own)


@pytest.mark.parametrize(
    ("tx", "looks_at"),
    [
        (optax.adamw(lambda count: 1e-3, mask=matrices), Reach.NUMBER),
        (optax.sgd(1e-3, momentum=0.9, nesterov=True), Reach.NUMBER),
        (optax.sgd(1e-3), Reach.NUMBER),
        (optax.lion(1e-3), Reach.NUMBER),
        (optax.rmsprop(1e-3, momentum=0.9, centered=True), Reach.NUMBER),
        (optax.nadamw(1e-3), Reach.NUMBER),
        (optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), Reach.NUMBER),
        (optax.inject_hyperparams(optax.lamb)(learning_rate=1e-3), Reach.TENSOR),
        (optax.multi_transform({0: optax.adam(1.0)}, lambda p: 0), Reach.NUMBER),
        (jshard.optim.bf16_moments(optax.adam(1e-3)), Reach.NUMBER),
        (optax.masked(optax.lamb(1e-3), matrices), Reach.TENSOR),
        (optax.adafactor(1e-3), Reach.TENSOR),
        (optax.lars(1e-3), Reach.TENSOR),
        (jshard.optim.per_layer(optax.lamb(1e-3)), Reach.TENSOR),
        (optax.chain(CLIP, optax.adam(1e-3)), Reach.EVERYTHING),
        (optax.masked(CLIP, matrices), Reach.EVERYTHING),
        (optax.zero_nans(), Reach.EVERYTHING),
        (optax.normalize_by_update_norm(), Reach.EVERYTHING),
        (optax.apply_if_finite(optax.sgd(1.0), 3), Reach.EVERYTHING),
        (
            optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation(),
            Reach.EVERYTHING,
        ),
        (optax.contrib.muon(1e-3), Reach.EVERYTHING),
        (OWN, Reach.EVERYTHING),
    ],
)
def test_combinations_look_at_what_their_parts_look_at(tx, looks_at):
    assert reach(tx.update) == looks_at


def test_a_chain_is_split_before_what_treats_layers_independently():
    tx = optax.chain(
        *(optax.adam(1e-3), CLIP, jshard.optim.per_layer(OWN)),
        *(optax.add_decayed_weights(0.1), optax.scale(-1e-3)),
    )
    front, layered = split(tx.update)
    assert (len(front), len(layered)) == (2, 3)
    assert reach(front[-1]) == Reach.EVERYTHING


def by_size(params: Any) -> Any:
    return jax.tree.map(lambda p: p.size > 20, params)


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(1e-3, mask=by_size),
        jshard.optim.bf16_moments(optax.masked(optax.adam(1e-3), by_size)),
        optax.multi_transform({True: optax.adam(1.0), False: optax.sgd(1.0)}, by_size),
        optax.inject_hyperparams(optax.adamw, static_args="mask")(1e-3, mask=by_size),
    ],
)
def test_a_mask_that_takes_one_layer_for_another_than_all_is_an_error(tx):
    full, layer = {"w": jnp.ones((3, 8))}, {"w": jnp.ones((1, 8))}
    with pytest.raises(UserError, match=r"the optimizer's mask by_size chooses"):
        check_masks([tx.update], full, layer)
    check_masks([jshard.optim.per_layer(tx).update], full, layer)
    check_masks([optax.adamw(1e-3, mask=matrices).update], full, layer)
