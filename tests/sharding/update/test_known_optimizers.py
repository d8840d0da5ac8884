"""What is said of optax's transformations by name is what they do."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from jshard.sharding.layout.layer_dims import mark_layers
from jshard.sharding.update.stacks.known import (
    OF_LAYERS,
    OF_NUMBERS,
    OF_TENSORS,
    check_masks,
    unknown_part,
    with_whole_layers,
)
from jshard.system.errors import UserError

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
    """Parameters after two steps with gradients that each number has of its own."""
    tx = optax.with_extra_args_support(tx)
    state = tx.init(params)
    for step in range(2):
        grads = jax.tree.map(lambda p, step=step: jnp.sin(7 * p + step), params)
        updates, state = tx.update(grads, state, params, value=step)
        params = optax.apply_updates(params, updates)
    return params


def close(got: Any, want: Any) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), got, want)


@pytest.mark.parametrize("name", sorted(OF_NUMBERS))
def test_what_is_said_to_look_at_numbers_does_not_see_others(name):
    assert unknown_part(make(name), OF_NUMBERS) is None
    numbers = jnp.linspace(-1, 0.8, 3).reshape(1, 3)
    fn = functools.partial(run, make(name))
    close(*jax.jit(lambda x: (fn(x).ravel(), jax.vmap(fn)(x.ravel())))(numbers))


@pytest.mark.parametrize("name", sorted(OF_TENSORS))
def test_what_is_said_to_look_at_tensors_does_not_see_others(name):
    assert unknown_part(make(name), OF_NUMBERS) == name
    assert unknown_part(make(name), OF_NUMBERS | OF_TENSORS) is None
    tensors = {"a": jnp.linspace(-1, 1, 6).reshape(2, 3), "b": jnp.full((4, 2), 0.3)}
    fn = functools.partial(run, make(name))
    alone = lambda tensors: {key: fn(x) for key, x in tensors.items()}
    close(*jax.jit(lambda tensors: (fn(tensors), alone(tensors)))(tensors))


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def own(updates: Any, state: Any, params: Any = None) -> Any:
    del params
    return updates, state


CLIP = optax.clip_by_global_norm(1.0)
OWN = optax.GradientTransformation(lambda params: (), own)


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(lambda count: 1e-3, mask=matrices),
        optax.sgd(1e-3, momentum=0.9, nesterov=True),
        optax.sgd(1e-3),
        optax.lion(1e-3),
        optax.rmsprop(1e-3, momentum=0.9, centered=True),
        optax.nadamw(1e-3),
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
        optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-3, 0, 10)),
        optax.multi_transform({0: optax.adam(1.0)}, lambda p: 0),
        jshard.optim.bf16_moments(optax.adam(1e-3)),
    ],
)
def test_what_combines_numbers_looks_at_numbers(tx):
    assert unknown_part(tx, OF_NUMBERS) is None


@pytest.mark.parametrize(
    ("tx", "of_numbers", "of_tensors", "of_layers"),
    [
        (
            optax.inject_hyperparams(optax.lamb)(learning_rate=1e-3),
            *("scale_by_trust_ratio", None, "scale_by_trust_ratio"),
        ),
        (
            optax.masked(optax.lamb(1e-3), matrices),
            *("scale_by_trust_ratio", None, "scale_by_trust_ratio"),
        ),
        (
            optax.adafactor(1e-3),
            *("scale_by_factored_rms", None, "scale_by_factored_rms"),
        ),
        (
            optax.lars(1e-3),
            *("scale_by_trust_ratio", None, "scale_by_trust_ratio"),
        ),
        (
            jshard.optim.per_layer(optax.lamb(1e-3)),
            *("scale_by_trust_ratio", None, None),
        ),
        (jshard.optim.per_layer(OWN), *("own", "own", None)),
        (optax.chain(CLIP, optax.adam(1e-3)), *["clip_by_global_norm"] * 3),
        (optax.masked(CLIP, matrices), *["clip_by_global_norm"] * 3),
        (optax.zero_nans(), *["zero_nans"] * 3),
        (optax.normalize_by_update_norm(), *["normalize_by_update_norm"] * 3),
        (optax.apply_if_finite(optax.sgd(1.0), 3), *["apply_if_finite"] * 3),
        (
            optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation(),
            *["MultiSteps"] * 3,
        ),
        (optax.contrib.muon(1e-3), *["scale_by_muon"] * 3),
        (OWN, *["own"] * 3),
    ],
)
def test_what_may_look_at_more_is_named(tx, of_numbers, of_tensors, of_layers):
    assert unknown_part(tx, OF_NUMBERS) == of_numbers
    assert unknown_part(tx, OF_NUMBERS | OF_TENSORS) == of_tensors
    assert unknown_part(tx, OF_LAYERS) == of_layers


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
    kernel = nnx.Param(jnp.ones((3, 8)))
    mark_layers(kernel, outer=[("w",)])
    params = nnx.State({"w": kernel})
    with pytest.raises(UserError, match=r"the optimizer's mask by_size chooses"):
        check_masks(tx, params)
    check_masks(jshard.optim.per_layer(tx), params)
    check_masks(optax.adamw(1e-3, mask=matrices), params)


TALL = optax.contrib.MuonDimensionNumbers((0, 1), 2)
CUBES = lambda params: jax.tree.map(lambda p: TALL if p.ndim == 3 else None, params)


@pytest.mark.quick("numbers")
@pytest.mark.parametrize(
    "tx",
    [
        optax.contrib.muon(1e-2),
        optax.contrib.muon(1e-2, nesterov=False, adaptive=True, weight_decay=0.1),
        optax.contrib.muon(1e-2, preconditioning="aol", mu_dtype=jnp.float32),
        optax.contrib.muon(1e-2, ns_coeffs="dion"),
        optax.contrib.muon(1e-2, muon_weight_dimension_numbers=CUBES),
        optax.masked(optax.contrib.muon(1e-2, beta=0.5), matrices),
        optax.chain(optax.clip(0.1), optax.contrib.muon(1e-2, ns_steps=3)),
    ],
    ids="muon adaptive aol dion numbers masked chained".split(),
)
def test_muon_on_whole_layers_is_muon_with_the_same_state(tx):
    shapes = {"tall": (5, 3), "wide": (4, 6), "cube": (2, 3, 4), "bias": (5,)}
    rng = np.random.default_rng(0)
    params = {name: jax.device_put(rng.normal(size=s)) for name, s in shapes.items()}
    other = with_whole_layers(tx)
    assert other is not tx
    both = jax.jit(lambda params: (run(other, params), run(tx, params)))
    close(*both(params))
    same = lambda x, y: x.shape == y.shape and x.dtype == y.dtype
    starts = [jax.eval_shape(x.init, params) for x in (other, tx)]
    assert jax.tree.all(jax.tree.map(same, *starts))
    _, after = jax.eval_shape(other.update, params, starts[0], params)
    assert jax.tree.all(jax.tree.map(same, after, starts[1]))


def test_what_has_no_muon_in_it_is_left_as_it_is():
    tx = optax.chain(CLIP, optax.masked(optax.lamb(1e-3), matrices))
    assert with_whole_layers(tx) is tx


def test_muon_in_injected_hyperparameters_is_an_error_that_says_what_to_do():
    tx = optax.inject_hyperparams(optax.contrib.muon)(learning_rate=1e-3)
    with pytest.raises(UserError, match="put inject_hyperparams around it rather"):
        jshard.optim.per_layer(tx)
