"""A small model that all axes but "expert" split, to be asked about each of them.

The reference is the model outside of a mesh, on one device, in float64.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jshard
import parity
from jshard.sharding.axes.context import on_whole_sequences

EXAMPLES, TIME, WIDTH, HEAD = 8, 8, 8, 2
TX = optax.sgd(1.0)  # parameters differ by their gradients


def attend(q_BTNH: Any, k_BTNH: Any, v_BTNH: Any, *_: Any) -> Any:
    scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BTNH)
    past_TS = jnp.tri(scores_BNTS.shape[-1], dtype=bool)
    shares_BNTS = jax.nn.softmax(jnp.where(past_TS, scores_BNTS, -jnp.inf))
    return jnp.einsum("BNTS,BSNH->BTNH", shares_BNTS, v_BTNH)


class Layer(nnx.Module):
    tensor_split = jshard.nn.Split(columns=("qkv", "up"), rows=("out", "down"))

    def __init__(self, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, param_dtype=jnp.float64, rngs=rngs)
        # The projections of a head are side by side, so that heads can be split.
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)

    def attention(self, x_BTD: jax.Array) -> jax.Array:
        qkv_BTNH = self.qkv(x_BTD).reshape(*x_BTD.shape[:2], -1, 3 * HEAD)
        q_BTNH, k_BTNH, v_BTNH = jnp.split(qkv_BTNH, 3, axis=-1)
        y_BTNH = on_whole_sequences(attend, q_BTNH, k_BTNH, v_BTNH, None)
        return self.out(y_BTNH.reshape(*x_BTD.shape[:2], -1))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = x_BTD + jshard.nn.tensor_parallel(self.attention, x_BTD)
        mlp = lambda x: self.down(jnp.tanh(self.up(x)))
        return x_BTD + jshard.nn.tensor_parallel(mlp, x_BTD)


class Model(nnx.Module):
    splits_sequences = True

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = jshard.Stack(Layer, 5, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        places_T = jshard.nn.positions(x_BTD.shape[1], jnp.float64) / TIME
        return self.blocks(x_BTD + places_T[:, None])


def loss_fn(model: Any, batch: Any) -> Any:
    error_BT = jnp.sum((model(batch["x"]) - batch["y"]) ** 2, axis=-1)
    total = jnp.sum(error_BT * batch["weights"])
    return jshard.Mean(total, jnp.sum(batch["weights"]))


def batch() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, EXAMPLES, TIME, WIDTH))
    weights = 1.0 * (rng.random((EXAMPLES, TIME)) > 0.3)
    return {"x": x, "y": y, "weights": weights}


@functools.cache
def made() -> Model:
    """The model with values by NumPy: to compile JAX's random numbers takes long."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda x: jax.device_put(rng.normal(size=x.shape) / 3), params
    )
    return nnx.merge(graphdef, params)


@functools.cache
def reference() -> tuple[float, dict]:
    """The loss, and parameters after a step."""
    graphdef, params = nnx.split(made())

    @jax.jit
    @jax.value_and_grad
    def loss(params: Any) -> jax.Array:
        return loss_fn(nnx.merge(graphdef, params), batch()).compute()

    value, grads = loss(params)
    stepped = jax.tree.map(lambda p, g: np.asarray(p) - np.asarray(g), params, grads)
    return float(value), parity.by_path(stepped)


def follows_one_device(sizes: dict[str, int], **policy: Any) -> None:
    """Asserts that a step on a mesh of these sizes is that of one device."""
    loss, params = reference()
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh: Any = jshard.make_mesh(**sizes, devices=devices)  # pyright: ignore
    fsdp = jshard.FSDP(
        mesh,
        jshard.Policy(min_shard_elements=0, **policy),
        sequences=("x", "y", "weights"),
    )
    state, step = fsdp.from_model(made(), TX), fsdp.train_step(loss_fn, TX)
    state, metrics = step(state, fsdp.shard_batch(batch()))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-9)
    assert parity.worst(parity.by_path(fsdp.fetch(state.params)), params) <= 1e-9
