"""Of an optimizer it is known by dataflow and values what may be updated alone."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jshard
from jshard.sharding.layout.layer_dims import mark_layers
from jshard.sharding.update.stacks.layers_alone import streams


def stacked(*shape: int) -> nnx.Param:
    variable = nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32))
    mark_layers(variable, inner=[("w",)])
    return variable


PARAMS = nnx.State(
    {
        "a": {"w": stacked(3, 8)},
        "b": {"w": stacked(2, 3, 8)},
        "head": nnx.Param(jax.ShapeDtypeStruct((4, 5), jnp.float32)),
        "scale": nnx.Param(jax.ShapeDtypeStruct((5,), jnp.float32)),
    }
)
CLIP = optax.clip_by_global_norm(1.0)
FAR = optax.clip_by_global_norm(1e30)  # which no gradient reaches


def by_path(params: Any) -> Any:
    return nnx.map_state(lambda path, _: path[0] == "b", params)


def by_rank(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def by_size(params: Any) -> Any:
    return jax.tree.map(lambda p: p.size > 20, params)


def rounds(tx: Any) -> Any:
    return optax.MultiSteps(tx, 2).gradient_transformation()


def late() -> Any:
    """From the tenth update on the norm of all counts."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        clipped, _ = CLIP.update(updates, optax.EmptyState())
        used = optax.tree.where(state > 10, clipped, updates)
        return used, state + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), int), update)


ALONE = {
    "masked": optax.adamw(lambda count: 1e-3, mask=by_path),
    "mask by rank": optax.adamw(1e-3, mask=by_rank),  # a layer keeps its (1, ...)
    "momentum": optax.sgd(1e-3, momentum=0.9, nesterov=True),
    "injected": optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1, 0, 9)),
    "labels": optax.multi_transform({0: optax.adam(1.0)}, lambda p: 0),
    "rounded": jshard.optim.bf16_moments(optax.sgd(1e-3, momentum=0.9)),
    "plateau": optax.contrib.reduce_on_plateau(),
    "lamb": jshard.optim.per_layer(optax.lamb(1e-3)),
    "muon": jshard.optim.muon(1e-3),
    "injected muon": optax.inject_hyperparams(jshard.optim.muon)(learning_rate=1e-3),
    "every second": rounds(optax.sgd(1e-3)),
    "sizes in per_layer": jshard.optim.per_layer(optax.adamw(1e-3, mask=by_size)),
}


@pytest.mark.quick("masked", "muon", "every second")
@pytest.mark.parametrize("name", ALONE)
def test_what_treats_layers_apart_may_be_streamed(name):
    assert streams(ALONE[name], PARAMS) == (None, True)


def test_what_couples_parameters_outside_of_stacks_may_be_streamed_beside_them():
    tx = jshard.optim.per_layer(optax.chain(CLIP, optax.sgd(1e-3)))
    assert streams(tx, PARAMS) == (None, False)


COUPLED = {
    "clip": (optax.chain(CLIP, optax.sgd(1e-3)), "the update of a depends on b"),
    "far": (optax.chain(optax.sgd(1e-3), FAR), "the update of a depends on b"),
    "late": (late(), "the update of a depends on b"),
    "one stack": (optax.masked(FAR, by_path), "a layer alone is updated otherwise"),
    "finite": (optax.apply_if_finite(optax.sgd(1.0), 3), "the update of a depends"),
    "a norm": (optax.normalize_by_update_norm(), "the update of a depends on b"),
    "layers": (
        optax.stateless(lambda g, p: jax.tree.map(lambda x: x / jnp.sum(x * x), g)),
        "a layer alone is updated otherwise",
    ),
    "factors": (optax.scale_by_factored_rms(), r"one array of \[1\] for all of a"),
    "nans": (optax.zero_nans(), r"one array of \[\] for all of a"),
    "noise": (optax.noisy_sgd(1e-3, key=0), "a layer alone is updated otherwise"),
    "size": (optax.adamw(1e-3, mask=by_size), "a mask or label chooses otherwise"),
    "labels": (
        optax.multi_transform({True: optax.adam(1.0), False: optax.sgd(1.0)}, by_size),
        "a mask or label chooses otherwise",
    ),
    "rounded": (
        jshard.optim.bf16_moments(optax.masked(optax.adam(1e-3), by_size)),
        "a mask or label chooses otherwise",
    ),
    "injected": (
        optax.inject_hyperparams(optax.adamw, static_args="mask")(1e-3, mask=by_size),
        "a mask or label chooses otherwise",
    ),
}


@pytest.mark.quick("far", "late", "one stack", "finite", "size", "layers")
@pytest.mark.parametrize("name", COUPLED)
def test_what_couples_layers_is_named_whatever_its_threshold(name):
    tx, said = COUPLED[name]
    problem, _ = streams(tx, PARAMS)
    assert problem
    assert re.search(said, problem)
