"""An optimizer makes of a Stack's layers what it makes of tensors, or is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from jshard.sharding.layout.layer_dims import mark_layers
from jshard.sharding.update.stacks import layers_apart
from jshard.sharding.update.stacks.layers_apart import check_layers
from jshard.system.errors import UserError

LAYERS = 3


def stacked(shape: tuple[int, ...], *paths: tuple[str, ...]) -> nnx.Param:
    """An abstract parameter with a layer dimension for each path in a layer."""
    variable = nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32))
    mark_layers(variable, inner=paths)
    return variable


PARAMS = nnx.State(
    {
        "blocks": {
            "bias": stacked((LAYERS, 32), ("bias",)),
            "kernel": stacked((LAYERS, 16, 32), ("kernel",)),
        },
        "head": {"kernel": stacked((16, 7))},
    }
)
NESTED = nnx.State(
    {"a": {"inner": {"w": stacked((2, LAYERS, 5), ("inner", "w"), ("w",))}}}
)
CLIP = optax.clip_by_global_norm(1.0)


def by_rank(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def by_size(params: Any) -> Any:
    return jax.tree.map(lambda p: p.size > 40, params)


def by_path(params: Any) -> Any:
    return nnx.map_state(lambda path, v: v.replace(path[-1] == "kernel"), params)


def by_one_path(params: Any) -> Any:
    chosen = ("blocks", "kernel")
    return nnx.map_state(lambda path, v: v.replace(path == chosen), params)


def by_end(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-2].key == "kernel", params
    )


def rank_label(params: Any) -> Any:
    return jax.tree.map(lambda p: "a" if p.ndim > 1 else "b", params)


def every(tx: Any, k: int = 2) -> Any:
    """In what hands on nothing of what is in it."""
    return optax.MultiSteps(tx, k).gradient_transformation()


def of_each(fn: Any) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, params: jax.tree.map(fn, updates, params))


BIAS, ANY = (f"its update of blocks.{x} is not that of each" for x in ("bias", ".*"))
REFUSED = {
    "a mask": (optax.adamw(1e-3, mask=by_rank), BIAS),
    "a mask by size": (optax.adamw(1e-3, mask=by_size), "it chooses by size, and"),
    "labels": (
        optax.multi_transform({"a": optax.adam(1.0), "b": optax.sgd(1.0)}, rank_label),
        BIAS,
    ),
    "hidden": (
        every(optax.chain(CLIP, optax.adamw(1e-3, weight_decay=1e-4, mask=by_rank))),
        ANY,
    ),
    "of one's own": (
        of_each(lambda g, p: g + 1e-4 * p if g.ndim >= 2 else g),
        "is not that of each layer alone; put what looks at ranks, .* in jshard",
    ),
    "rounded": (
        every(jshard.optim.bf16_moments(optax.adamw(1e-3, mask=by_rank))),
        "it does not treat a Stack's layers as tensors",
    ),
    "lamb": (optax.lamb(1e-3), ANY),
    "adaptive": (optax.adaptive_grad_clip(0.5), ANY),
    "muon": (optax.chain(CLIP, optax.contrib.muon(1e-3)), ANY),
    "sm3": (optax.sm3(1e-3), ANY),
}  # fmt: skip


@pytest.mark.quick("a mask", "of one's own")
@pytest.mark.parametrize("name", REFUSED)
def test_what_takes_layers_for_one_tensor_is_refused_with_what_to_write(name):
    tx, message = REFUSED[name]
    with pytest.raises(UserError, match=message) as error:
        check_layers(tx, PARAMS)
    assert "jshard.optim.per_layer" in str(error.value)
    assert "\n" not in str(error.value)
    check_layers(jshard.optim.per_layer(tx), PARAMS)


RATES = np.linspace(0.1, 1, LAYERS)


def by_layer(path: tuple, update: Any) -> Any:
    if path[0] != "blocks":
        return update
    value = update.get_value()
    return update.replace(value * RATES.reshape(-1, *[1] * (value.ndim - 1)))


def tree_of(fn: Any) -> Any:
    return fn(jax.tree.map(lambda _: 0, PARAMS))


LAMB, MUON = jshard.optim.per_layer(optax.lamb(1e-3)), jshard.optim.muon(1e-3)
WARM = optax.warmup_cosine_decay_schedule(0, 1e-3, 9, 99)
ACCEPTED = {
    "numbers": optax.chain(CLIP, optax.adamw(WARM)),
    "a mask by path": optax.chain(CLIP, optax.adamw(1e-3, mask=by_path)),
    "a tree": optax.chain(CLIP, optax.adamw(1e-3, mask=tree_of(by_path))),
    "all together": every(optax.chain(CLIP, LAMB, optax.adamw(1e-3, mask=by_end))),
    "all, and a tree": every(
        optax.chain(CLIP, optax.adamw(1e-3, mask=tree_of(by_one_path)))
    ),
    "rates by layer": optax.stateless(
        lambda updates, params: nnx.map_state(by_layer, updates)
    ),
    "noise": optax.noisy_sgd(1e-3, key=0),
    "of all gradients": optax.contrib.prodigy(1.0),
    "injected": optax.inject_hyperparams(optax.adamw, static_args="mask")(
        1e-3, mask=by_path
    ),
    "more than gradients": optax.chain(
        optax.adam(1e-3), optax.contrib.reduce_on_plateau()
    ),
    "finite": optax.apply_if_finite(optax.chain(CLIP, MUON), 3),
}


@pytest.mark.quick("numbers", "a tree", "all together", "rates by layer")
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_keeps_layers_apart_is_taken_as_it_is(name):
    check_layers(ACCEPTED[name], PARAMS)


POINTWISE = {
    "clipped": optax.chain(CLIP, optax.adamw(WARM), optax.scale(-1)),
    "adamw": optax.adamw(WARM, mask=by_path),
    "sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "lion": optax.lion(1e-3),
    "every second": every(optax.adabelief(1e-3)),
    "injected": optax.inject_hyperparams(optax.rmsprop)(1e-3),
    "labels": optax.multi_transform(
        {"a": optax.adagrad(1.0), "b": optax.sgd(1.0)},
        lambda params: nnx.map_state(
            lambda path, v: v.replace("ba"[path[0] == "blocks"]), params
        ),
    ),
}


@pytest.mark.quick("clipped")
@pytest.mark.parametrize("name", POINTWISE)
def test_what_is_pointwise_is_not_computed_and_would_be_right(name, monkeypatch):
    tx, params = POINTWISE[name], layers_apart.plain(PARAMS)
    assert layers_apart._not_apart(tx, params) is None
    assert layers_apart._chosen_by_size(tx, params) is None
    for name in ("_not_apart", "_chosen_by_size"):
        monkeypatch.setattr(layers_apart, name, lambda *_: "is computed")
    check_layers(tx, PARAMS)


def test_what_tiny_arrays_cannot_answer_is_said():
    rows = of_each(lambda g, p: g.reshape(-1, 16).reshape(g.shape))
    with pytest.warns(UserWarning, match="is not known: for tiny arrays it raises"):
        check_layers(rows, PARAMS)


@pytest.mark.slow  # test_whole_layers.py has layers of layers
def test_layers_of_layers_are_tensors_of_their_own():
    norm = optax.tree.norm
    of_all = lambda updates, params: jax.tree.map(lambda g: g / norm(updates), updates)
    check_layers(optax.stateless(of_all), NESTED)
    with pytest.raises(UserError, match=r"its update of a\.inner\.w is not that of"):
        check_layers(of_each(lambda g, p: g - jnp.mean(g)), NESTED)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = jshard.Stack(
            lambda rngs: nnx.Linear(6, 6, rngs=rngs), 2, rngs=rngs
        )


def test_a_state_is_not_made_for_a_mask_by_rank():
    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(min_shard_elements=0))
    model = filled(lambda: Model(nnx.Rngs(0)))
    with pytest.raises(UserError, match=r"blocks\.bias is not .*per_layer.* at paths"):
        fsdp.from_model(model, optax.adamw(1e-3, mask=by_rank))
    fsdp.from_model(model, jshard.optim.per_layer(optax.sgd(1e-3)))
