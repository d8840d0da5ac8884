"""fsdp.put takes back what fsdp.fetch returned, changed, whatever holds it at rest."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from parity import make_mesh

WIDTH = 6  # which eight shards do not divide
TX = optax.adam(1e-3)
FIELDS = ("step", "params", "frozen", "model_state", "opt_state", "ema", "loss_scale")
BATCH = np.ones((8, WIDTH), np.float32)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.linear(x))


class Model(nnx.Module):
    """Padded, sharded, replicated and stacked parameters, and random keys."""

    def __init__(self, rngs: nnx.Rngs):
        self.stack = jshard.Stack(Layer, 2, rngs=rngs)
        self.head = jshard.Unit(nnx.Linear(WIDTH, 16, rngs=rngs))
        self.scale = nnx.Param(jnp.ones(()))
        self.frozen = jshard.Unit(nnx.Linear(16, WIDTH, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.frozen(self.head(self.stack(x))) * self.scale


def loss_fn(model: Model, x: jax.Array) -> jshard.Mean:
    return jshard.Mean(jnp.sum(model(x) ** 2), x.size)


def state_of(**knobs: Any) -> tuple[jshard.FSDP, jshard.TrainState]:
    policy = jshard.Policy(min_shard_elements=2, **knobs)
    fsdp = jshard.FSDP(make_mesh(1, 8), policy)
    model = filled(lambda: Model(nnx.Rngs(0)))
    is_trained = lambda path, v: isinstance(v, nnx.Param) and path[0] != "frozen"
    return fsdp, fsdp.from_model(model, TX, wrt=is_trained)


@pytest.mark.parametrize(
    "knobs", [{"offload": "all"}, {"ema_decay": 0.9, "loss_scale": True}], ids=str
)
def test_what_was_fetched_is_put_back_bit_for_bit(knobs):
    fsdp, state = state_of(**knobs)
    values = {name: fsdp.fetch(getattr(state, name)) for name in FIELDS}
    new = fsdp.put(state, **values)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    bits = lambda x: fsdp.fetch(x).tobytes()
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.sharding == other.sharding  # with its memory kind
        assert bits(one) == bits(other)


@pytest.fixture(scope="module")
def made():
    return state_of()


def test_values_that_were_changed_are_what_models_read(made):
    fsdp, state = made
    values = nnx.to_pure_dict(fsdp.fetch(state.params))
    values["head"]["kernel"] = 2 * values["head"]["kernel"]
    new = fsdp.put(state, params=values)
    evaluate, model = fsdp.eval_step(loss_fn), fsdp.model(new)
    np.testing.assert_array_equal(model.head.kernel[...], values["head"]["kernel"])  # pyright: ignore[reportAttributeAccessIssue]
    model.eval()
    want = np.mean(np.square(model(jnp.asarray(BATCH))))  # pyright: ignore[reportCallIssue]
    got = evaluate(new, fsdp.shard_batch(BATCH)).compute()["loss"]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def without(tree: dict) -> dict:
    return tree | {"head": {"bias": tree["head"]["bias"]}}


def with_kernel(kernel: Any) -> Any:
    return lambda tree: tree | {"head": tree["head"] | {"kernel": kernel}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without, "the values have no 'params.head.kernel', which the state has"),
        (lambda tree: tree | {"z": 1}, "the state has no 'params.z', which the values"),
        (
            with_kernel(np.ones((8, 16), np.float32)),
            r"'params.head.kernel' is given as float32\[8, 16\], and must be float32",
        ),
        (with_kernel(np.ones((6, 16))), r"is given as float64\[6, 16\], and must be"),
        (with_kernel("a"), r"'params.head.kernel' is given as <U1\[\]"),
        (lambda tree: 3, "have no 'params.head.bias'"),
    ],
)
def test_other_values_are_refused_by_their_path(made, change, message):
    fsdp, state = made
    values = change(nnx.to_pure_dict(fsdp.fetch(state.params)))
    with pytest.raises(jshard.UserError, match=f"^fsdp.put: .*{message}"):
        fsdp.put(state, params=values)


@pytest.mark.parametrize("field", ["graphdef", "parameters"])
def test_a_field_that_a_state_has_not_is_refused(made, field):
    fsdp, state = made
    with pytest.raises(jshard.UserError, match=f"params, step, but no '{field}'"):
        fsdp.put(state, **{field: 1})


def set_in_place(fsdp: jshard.FSDP, state: jshard.TrainState) -> jshard.TrainState:
    params: Any = jax.tree.map(jnp.copy, state.params)
    params["stack"]["linear"]["bias"].set_value(jnp.ones((2, WIDTH)))
    return dataclasses.replace(state, params=params)


def replaced(fsdp: jshard.FSDP, state: jshard.TrainState) -> jshard.TrainState:
    params = jax.tree.map(jnp.asarray, fsdp.fetch(state.params))
    return dataclasses.replace(state, params=params)


@pytest.mark.parametrize("surgery", [set_in_place, replaced])
def test_a_padded_parameter_that_was_set_without_padding_names_put(made, surgery):
    fsdp, state = made
    broken = surgery(fsdp, state)
    message = r"^parameter 'stack\.\S+' of the state .* fsdp\.put\(state, params=val"
    with pytest.raises(jshard.UserError, match=message):
        fsdp.eval_step(loss_fn)(broken, fsdp.shard_batch(BATCH))
