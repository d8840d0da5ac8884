"""A model that exists already, pretrained or with adapters: ``fsdp.from_model``."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from parity import make_mesh, make_update
from runs import check_close, loss_fn
from zoo_layers import WIDTH, Residual, example, make_stack

TX = optax.adam(1e-2)
POLICY = jshard.Policy(min_shard_elements=0)
HALF = jshard.Precision(param="bfloat16")


class Model(nnx.Module):
    """Parameters of all kinds, streams and statistics."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Residual(rngs) for _ in range(2)])
        self.stack = make_stack(Residual, rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = jshard.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.dropout(self.norm(self.stack(x)))


def whole(fsdp: jshard.FSDP, state: jshard.TrainState, kind: Any = np.asarray) -> Any:
    """The model of a state with full arrays, as one that somebody loaded."""

    def full(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.device_put(x, jax.devices()[0])
        return kind(fsdp.fetch(x))

    return jax.tree.map(full, fsdp.model(state))


def raw(x: Any) -> Any:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


@pytest.mark.slow  # foreign/test_programs.py trains one as it
@pytest.mark.parametrize(
    ("mesh", "kind", "policy"),
    [
        ((1, 8), np.asarray, POLICY),
        ((2, 2), jnp.asarray, jshard.Policy(min_shard_elements=0, ema_decay=0.9)),
        ((1, 1), np.asarray, jshard.Policy(precision=HALF, loss_scale=True)),
    ],
)
def test_a_model_that_exists_gets_the_state_of_one_that_is_made(mesh, kind, policy):
    fsdp = jshard.FSDP(make_mesh(*mesh), policy, units=(Residual,))
    made = fsdp.init(Model, TX)
    sharded = fsdp.from_model(whole(fsdp, made, kind), TX)
    assert jax.tree.structure(sharded) == jax.tree.structure(made)
    for got, want in zip(jax.tree.leaves(sharded), jax.tree.leaves(made), strict=True):
        assert (got.sharding, got.dtype) == (want.sharding, want.dtype)
        np.testing.assert_array_equal(raw(got), raw(want))
    # Nor does anything else tell a step which of them it gets.
    for got, want in zip(jax.tree.leaves(sharded), jax.tree.leaves(made), strict=True):
        assert (jax.typeof(got), got.committed) == (jax.typeof(want), want.committed)
    evaluate = fsdp.eval_step(loss_fn)
    batch = fsdp.shard_batch(np.asarray(example()))
    losses = [evaluate(state, batch).compute()["loss"] for state in (made, sharded)]
    assert losses[0] == losses[1]


def test_its_arrays_stay_as_they_are_and_may_change():
    fsdp = jshard.FSDP(make_mesh(1, 1), POLICY)
    model: Any = filled(lambda: Model(nnx.Rngs(0)))
    linear: Any = model.blocks[0]
    linear.kernel.set_value(np.array(linear.kernel.get_value()))
    kernel = model.blocks[0].kernel.get_value()
    before = kernel.copy()
    tx = optax.sgd(0.1)
    state = fsdp.from_model(model, tx)
    step = fsdp.train_step(loss_fn, tx)
    params: Any = state.params
    first = params["blocks"][0]["kernel"].get_value()
    kernel += 1
    np.testing.assert_array_equal(first, before)
    state, _ = step(state, fsdp.shard_batch(np.asarray(example())))
    np.testing.assert_array_equal(kernel, before + 1)
    model.eval()
    jax.jit(lambda x: model(x))(example())  # still a model


class Large(nnx.Module):
    def __init__(self, layers: list[Any]):
        self.layers = nnx.List([nnx.Param(kernel) for kernel in layers])

    def __call__(self, x: jax.Array) -> jax.Array:
        for kernel in self.layers:
            x = x @ kernel[...]
        return x


@pytest.fixture
def no_large_constants():
    """A warning, which is an error here, wherever a program holds 64 KiB."""
    name = "jax_captured_constants_warn_bytes"
    before = jax.config.values[name]
    jax.config.update(name, 1 << 16)
    yield
    jax.config.update(name, before)


@pytest.mark.usefixtures("no_large_constants")
@pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit")
def test_no_program_holds_its_values():
    fsdp = jshard.FSDP(make_mesh(1, 8), POLICY)
    kernels = [np.full((256, 256), float(i), np.float32) for i in range(3)]
    loss = lambda model, x: jshard.Mean(jnp.sum(model(x)), len(x))
    batch = fsdp.shard_batch(np.ones((8, 256), np.float32))
    step = fsdp.train_step(loss, TX)
    for array in (np.asarray, jnp.asarray):
        state = fsdp.from_model(Large(list(map(array, kernels))), TX)
        step(state, batch)
    with pytest.warns(UserWarning, match="constants"):  # what it is spared
        fsdp.init(lambda rngs: Large(list(map(jnp.asarray, kernels))), TX)


@pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit")
def test_what_is_copied_at_a_time_is_one_shard(monkeypatch):
    fsdp = jshard.FSDP(make_mesh(1, 8), POLICY)
    model = Large([np.zeros((256, 256), np.float32) for _ in range(2)])
    put, shapes = jax.device_put, []

    def record(x: Any, *args: Any, **kwargs: Any) -> Any:
        shapes.append(np.shape(x))
        return put(x, *args, **kwargs)

    monkeypatch.setattr(jax, "device_put", record)
    fsdp.from_model(model, optax.identity())
    assert shapes == [(32, 256)] * 16


class Adapted(nnx.Module):
    """A frozen model whose layers have adapters."""

    def __init__(self, rngs: nnx.Rngs):
        linear = lambda: nnx.Linear(
            WIDTH, WIDTH, param_dtype=jnp.float64, dtype=jnp.float64, rngs=rngs
        )
        self.layers = nnx.List([linear() for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


def with_lora(model: Any, rngs: nnx.Rngs) -> Any:
    """``model`` with adapters on all its layers, of which none is zero."""
    for i, layer in enumerate(model.layers):
        lora = nnx.LoRA(
            WIDTH,
            2,
            WIDTH,
            base_module=layer,
            dtype=jnp.float64,
            param_dtype=jnp.float64,
            b_initializer=nnx.initializers.normal(),
            rngs=rngs,
        )
        model.layers[i] = lora
    return model


@pytest.mark.quick("mesh1")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mesh", [(1, 8), (2, 2)])
def test_adapters_train_and_the_model_below_them_is_frozen_and_sharded(mesh):
    model = filled(lambda: with_lora(Adapted(nnx.Rngs(0)), nnx.Rngs(1)))
    nnx.update(model, jax.tree.map(jax.device_put, nnx.state(model)))  # not NumPy's
    fsdp = jshard.FSDP(make_mesh(*mesh), POLICY, units=(nnx.LoRA,))
    state = fsdp.from_model(model, TX, wrt=nnx.LoRAParam)
    frozen: Any = state.frozen
    kernel = frozen["layers"][0]["base_module"]["kernel"].get_value()
    assert kernel.sharding.spec == jax.P("fsdp")
    assert len(jax.tree.leaves(state.params)) == 4

    graphdef, params, rest = nnx.split(model, nnx.LoRAParam, ...)
    update, opt_state = make_update(TX), jax.jit(TX.init)(params)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        return loss_fn(nnx.merge(graphdef, params, rest), example()).compute()

    step = fsdp.train_step(loss_fn, TX)
    for _ in range(3):
        state, metrics = step(state, fsdp.shard_batch(np.asarray(example())))
        want, grads = loss(params)
        params, opt_state = update(grads, opt_state, params)
        np.testing.assert_allclose(metrics["loss"], want, rtol=1e-9)
    leaves = lambda tree: [np.asarray(x) for x in jax.tree.leaves(tree)]
    check_close(leaves(fsdp.fetch(state.params)), leaves(params), 1e-9)
    kept = fsdp.fetch(state.frozen)
    check_close(leaves(kept), leaves(nnx.filter_state(rest, nnx.Param)), 0)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model, r"model is the type Model; .* goes to fsdp\.init"),
        (lambda rngs: Model(rngs), r"model is a function; .* goes to fsdp\.init"),
        (
            {"kernel": np.ones(8)},
            r"model is a dict; fsdp\.from_model takes an nnx\.Module",
        ),
        (
            nnx.eval_shape(lambda: Model(nnx.Rngs(0))),
            r"'blocks\.0\.bias' holds a Shape",
        ),
    ],
)
def test_what_is_no_model_with_arrays_is_refused_in_one_line(model, message):
    fsdp = jshard.FSDP(make_mesh(1, 8), POLICY)
    with pytest.raises(jshard.UserError, match=message) as error:
        fsdp.from_model(model, TX)
    assert "\n" not in str(error.value)
