"""Float8 products: beside a one-device run with the same quantization, and counted."""

import dataclasses
import functools
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from jshard.plan.start_up import describe, traffic
from jshard.sharding.step.checks import check_precisions

LAYERS, EXAMPLES, TIME, WIDTH, HIDDEN = 2, 32, 4, 128, 256
FLOAT8 = jshard.Precision(products="float8")


class Layer(nnx.Module):
    """Flax's linear layers, and weights of its own with and without ``matmul``."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.general = nnx.LinearGeneral(WIDTH, (4, 32), rngs=rngs)
        shape, bias_shape = (4, 32, WIDTH), (WIDTH,)
        self.mixed = nnx.Einsum("btnh,nhd->btd", shape, bias_shape, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        normal = nnx.initializers.normal(0.05)
        self.down = nnx.Param(normal(rngs.params(), (HIDDEN, WIDTH)), matmul=True)
        self.odd = nnx.Param(normal(rngs.params(), (WIDTH, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        x += self.mixed(jnp.tanh(self.general(self.norm(x))))
        h = nnx.remat(lambda up, x: jax.nn.gelu(up(x)))(self.up, x)
        x += jshard.nn.matmul(h, self.down)
        return x + jnp.dot(x, jnp.sin(self.odd[...]))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = jshard.Stack(Layer, LAYERS, rngs=rngs)
        self.head = jshard.Unit(nnx.Linear(WIDTH, WIDTH, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.layers(x))


class Listed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(model: Any, x: jax.Array) -> jshard.Mean:
    return jshard.Mean(jnp.sum(model(x) ** 2), x.size)


# The reference: one device, without jshard.


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Values of ``x`` that are float8 times a power of two."""
    ratio = jnp.max(jnp.abs(x)) / float(jnp.finfo(dtype).max)
    scale = 2.0 ** (jnp.floor(jnp.log2(ratio)) + 1)
    return (x / scale).astype(dtype).astype(jnp.float32) * scale


@jax.custom_vjp
def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
    return rounded(x, jnp.float8_e4m3fn) @ rounded(w, jnp.float8_e4m3fn)


def multiply_backward(saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = (rounded(value, jnp.float8_e4m3fn) for value in saved)
    dy = rounded(dy, jnp.float8_e5m2)
    return dy @ w.T, x.T @ dy


multiply.defvjp(lambda x, w: (multiply(x, w), (x, w)), multiply_backward)


def reference_layer(p: Any, x_BTD: jax.Array) -> jax.Array:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        y = multiply(x.reshape(-1, w.shape[0]), w)
        return y.reshape(*x_BTD.shape[:2], w.shape[1])

    x = x_BTD
    normed = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    general, up = p["general"], p["up"]
    y = product(normed * p["norm"]["scale"], general["kernel"].reshape(WIDTH, WIDTH))
    y = jnp.tanh(y + general["bias"].reshape(WIDTH))
    mixed = p["mixed"]
    x += product(y, mixed["kernel"].reshape(WIDTH, WIDTH)) + mixed["bias"]
    h = jax.nn.gelu(product(x, up["kernel"]) + up["bias"])
    x += product(h, p["down"])
    return x + x @ jnp.sin(p["odd"])


def reference(params: Any, x: np.ndarray, parts: int) -> tuple[Any, Any]:
    """Loss and gradients, each of ``parts`` parts of the batch quantized by itself."""

    size = x.size

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for i in range(LAYERS):
            x = reference_layer(jax.tree.map(lambda p, i=i: p[i], params["layers"]), x)
        head = params["head"]
        # As a step does: another factor than a power of two rounds otherwise.
        return jnp.sum((x @ head["kernel"] + head["bias"]) ** 2) / size

    run = jax.jit(jax.value_and_grad(loss))
    results = [jax.device_get(run(params, part)) for part in np.split(x, parts)]
    return jax.tree.map(lambda *sums: sum(sums), *results)


def inputs(examples: int = EXAMPLES) -> np.ndarray:
    shape = (examples, TIME, WIDTH)
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def gradients(
    fsdp: jshard.FSDP, make_model: Any = Model, examples: int = EXAMPLES
) -> tuple[dict, dict, jax.Array]:
    """(parameters, gradients, loss) of a step, by name."""
    tx = optax.sgd(1.0)
    state = fsdp.from_model(filled(lambda: make_model(nnx.Rngs(0)), 0.1), tx)
    before = nnx.to_pure_dict(fsdp.fetch(state.params))
    step = fsdp.train_step(loss_fn, tx)
    state, metrics = step(state, fsdp.shard_batch(inputs(examples)))
    after = nnx.to_pure_dict(fsdp.fetch(state.params))
    return before, jax.tree.map(np.subtract, before, after), metrics["loss"]


def check_close(got: Any, want: Any, bound: float) -> None:
    def check(path: Any, got: Any, want: Any) -> None:
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert error < bound, f"{jax.tree_util.keystr(path)}: {error}"

    jax.tree_util.tree_map_with_path(check, got, want)


@pytest.mark.quick("three devices")
@pytest.mark.parametrize(
    ("mesh", "knobs"),
    [
        pytest.param(
            {"devices": 3},
            {"remat": "dots", "min_shard_elements": 0},
            id="three devices",
        ),
        pytest.param({}, {"remat": "full"}, id="full"),
        pytest.param({}, {"remat": "dots"}, id="dots"),
        pytest.param({}, {"remat": "none", "reshard_after_forward": 2}, id="none"),
        pytest.param({}, {"prefetch": True, "remat": "dots"}, id="pipelined"),
        pytest.param(
            {"replica": 2},
            {"prefetch": True, "accumulate": 2, "reshard_after_forward": 2},
            id="hybrid",
        ),
        pytest.param({}, {"accumulate": 2, "defer_scatter": True}, id="deferred"),
        pytest.param({"fsdp": 1, "replica": 8}, {"first_k": 1}, id="replicated"),
        pytest.param({}, {"reshard_after_forward": False}, id="kept"),
        pytest.param(
            {"devices": 6},
            {"prefetch": True, "reshard_after_forward": 2, "min_shard_elements": 0},
            id="six devices",
        ),
    ],
)
def test_a_step_is_that_of_one_device_with_the_same_quantization(mesh, knobs):
    policy = jshard.Policy(precision=FLOAT8, **knobs)
    devices = jax.devices()[: mesh.get("devices", 8)]
    fsdp = jshard.FSDP(jshard.make_mesh(**mesh | {"devices": devices}), policy)
    examples = 4 * len(devices)
    params, grads, loss = gradients(fsdp, examples=examples)
    parts = len(devices) * policy.accumulate
    want_loss, want = reference(params, inputs(examples), parts)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    check_close(grads, want, 1e-4)


def plain_dot(*args: Any, **options: Any) -> jax.Array:
    """A product of the author's own."""
    return jax.lax.dot_general(*args, **options)


class Gated(nnx.Module):
    """A layer whose weights must not all be in float8."""

    def __init__(self, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.dense = linear(WIDTH, WIDTH)
        self.router = linear(WIDTH, 16)
        self.left_out = linear(WIDTH, WIDTH)
        self.replaced = linear(WIDTH, WIDTH, dot_general=plain_dot)
        self.experts = nnx.Einsum("bti,tio->bto", (TIME, WIDTH, WIDTH), rngs=rngs)
        normal = nnx.initializers.normal(0.05)
        self.exact = nnx.Param(normal(rngs.params(), (WIDTH, WIDTH)))
        self.table = nnx.Embed(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        gates = jax.nn.sigmoid(self.router(x)).repeat(WIDTH // 16, -1)
        looked_up = self.table(jnp.arange(TIME))
        y = self.dense(x) * gates + self.left_out(x) + looked_up
        return x + y + self.replaced(x) + self.experts(x) + x @ self.exact[...]


class GatedModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = jshard.Stack(Gated, LAYERS, rngs=rngs)
        self.head = jshard.Unit(nnx.Linear(WIDTH, WIDTH, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.layers(x.astype(jnp.bfloat16)))


def traced(fsdp: jshard.FSDP, make_model: Any) -> tuple[Any, jshard.TrainState]:
    tx = optax.sgd(1.0)
    state = fsdp.abstract_state(make_model, tx)
    x = jax.ShapeDtypeStruct((EXAMPLES, TIME, WIDTH), jnp.float32)
    return fsdp.train_step(loss_fn, tx).trace(state, x), state


@pytest.mark.quick("dots")
@pytest.mark.parametrize("remat", ["dots", "none"])
def test_weights_of_linear_layers_are_gathered_in_bytes_and_no_others(remat):
    bf16 = jshard.Precision(compute="bfloat16")
    float8 = dataclasses.replace(bf16, products="float8")
    overrides = {"layers.left_out": {"precision": bf16}}
    policy = jshard.Policy(
        precision=float8, overrides=overrides, min_shard_elements=0, remat=remat
    )
    fsdp = jshard.FSDP(jshard.make_mesh(), policy)
    program, _ = traced(fsdp, GatedModel)
    found = traffic(program.jaxpr.jaxpr, {"fsdp": 8, "replica": 1})
    # Of a layer `dense` alone: forward and backward, as none is kept.
    assert found["all-gather", "int8"].count == 2 * LAYERS
    assert found["all-gather", "int8"].wire_bytes == 2 * LAYERS * WIDTH**2 * 7 // 8
    # One reduction for the scales of all layers.
    assert found["all-reduce", "float32"].count == 1


def adapted(rngs: nnx.Rngs) -> Model:
    model = Model(rngs)
    jshard.nn.add_lora(model, rank=4, alpha=8.0, targets=("up",), rngs=rngs)
    return model


def test_frozen_weights_beside_adapters_are_gathered_in_bytes_too():
    tx = optax.sgd(1.0)
    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(precision=FLOAT8))
    state = fsdp.abstract_state(adapted, tx, nnx.LoRAParam)
    program = fsdp.train_step(loss_fn, tx).trace(state, inputs())
    found = traffic(program.jaxpr.jaxpr, {"fsdp": 8, "replica": 1})
    assert found["all-gather", "int8"].count == 2 * 4 * LAYERS


@pytest.mark.slow
def test_adapters_beside_weights_in_float8_are_trained():
    tx = optax.sgd(1.0)
    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(precision=FLOAT8))
    state = fsdp.init(adapted, tx, wrt=nnx.LoRAParam)
    step, x = fsdp.train_step(loss_fn, tx), fsdp.shard_batch(inputs())
    before = fsdp.fetch(nnx.to_pure_dict(state.params))
    state, metrics = step(state, x)
    after = fsdp.fetch(nnx.to_pure_dict(state.params))
    assert np.isfinite(metrics["loss"])
    assert np.any(before["layers"]["up"]["lora_b"] != after["layers"]["up"]["lora_b"])


class Reading(nnx.Module):
    """A linear layer whose kernel is read by other code."""

    def __init__(self, read: Any, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.read = read

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) + self.read(x, self.linear.kernel)


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda x, w: x @ w, id="product"),
        pytest.param(lambda x, w: x @ w[...], id="value"),
        pytest.param(lambda x, w: x @ jnp.sin(w[...]), id="function"),
        pytest.param(lambda x, w: x @ (2 * w[...]), id="arithmetic"),
        pytest.param(lambda x, w: x @ w[...].T, id="method"),
        pytest.param(lambda x, w: x + w[0], id="index"),
        pytest.param(lambda x, w: x + np.asarray(w[...])[0], id="numpy"),
        pytest.param(lambda x, w: x + jnp.stack(list(w)), id="loop"),
    ],
)
def test_a_weight_in_float8_that_is_read_otherwise_is_named_in_the_error(read):
    class Whole(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layer = jshard.Unit(Reading(read, rngs))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.layer(x)

    policy = jshard.Policy(precision=FLOAT8)
    error = re.escape("parameter 'layer.linear.kernel' is in float8")
    with pytest.raises(jshard.UserError, match=f"{error}.*give 'layer.linear' a"):
        traced(jshard.FSDP(jshard.make_mesh(), policy), Whole)


def test_matmul_wants_a_parameter_that_was_made_for_it():
    with pytest.raises(jshard.UserError, match=r"nnx\.Param\(value, matmul=True\)"):
        jshard.nn.matmul(jnp.ones((2, 3)), nnx.Param(jnp.ones((3, 4))))


def test_without_products_in_float8_nothing_changes():
    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy())
    assert "f8_" not in str(traced(fsdp, Model)[0].jaxpr)


@pytest.mark.slow
def test_existing_layers_as_units_multiply_in_float8():
    policy = jshard.Policy(precision=FLOAT8)
    fsdp = jshard.FSDP(jshard.make_mesh(), policy, units=(Layer,))
    params, grads, _ = gradients(fsdp, Listed)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for i in range(LAYERS):
            x = reference_layer(params["layers"][i], x)
        return jnp.sum(x**2) / inputs().size

    run = jax.jit(jax.grad(loss))
    parts = [run(params, part) for part in np.split(inputs(), 8)]
    check_close(grads, jax.tree.map(lambda *x: sum(x), *parts), 1e-4)


def test_the_start_up_note_says_how_much_is_multiplied_in_float8():
    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(precision=FLOAT8))
    tx = optax.sgd(1.0)
    state = fsdp.abstract_state(Model, tx)
    note = describe(fsdp, state, inputs(), fsdp.train_step(loss_fn, tx))
    # In units of a square product: each has two in the backward, and full remat repeats
    # all but the last one of a layer, which is not in float8, and neither is the head.
    # What is in a remat of its own, `up`, is repeated twice.
    float8 = LAYERS * (4 + 4 + 2 * 5 + 2 * 4)
    part = float8 / (float8 + LAYERS * 3 + 3)
    assert f"{part:.0%} of the FLOPs of products with weights" in note


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jshard.Precision(products="int8"), "precision.products: 'int8'"),  # pyright: ignore[reportArgumentType]
        (
            lambda: jshard.Precision(products="float8", compute="float64"),
            "compute='float64'",
        ),
        (
            lambda: check_precisions(
                jshard.Policy(offload="all", precision=FLOAT8), jshard.make_mesh()
            ),
            "policy.offload='all'",
        ),
        (
            lambda: check_precisions(jshard.Policy(precision=FLOAT8), a100()),
            "NVIDIA A100 has 8.0",
        ),
    ],
)
def test_what_cannot_multiply_in_float8_is_an_error(make, message):
    with pytest.raises(jshard.UserError, match=re.escape(message)) as error:
        make()
    assert "\n" not in str(error.value)


def a100() -> Any:
    """What ``check_precisions`` reads of a mesh of A100s."""
    device = types.SimpleNamespace(
        platform="gpu", compute_capability="8.0", device_kind="NVIDIA A100"
    )
    return types.SimpleNamespace(devices=np.array([device]))
