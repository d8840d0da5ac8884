"""A model of each kind of product with weights, and its step by hand."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jshard
from filled import filled
from jshard.sharding.layout.batch import abstract_batch

LAYERS, EXAMPLES, TIME, WIDTH, HIDDEN = 2, 24, 32, 128, 160
NARROW = WIDTH + 16
TX = optax.sgd(1.0)

# Numbers of devices, replicas among them, and settings of the policy.
MESHES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one": (1, 1, {"remat": "dots"}),
    "two": (2, 1, {"remat": "full", "reshard_after_forward": 2}),
    "three": (3, 1, {"remat": "none"}),
    "six": (6, 1, {"remat": "attention"}),
    "eight": (8, 1, {"remat": "dots", "prefetch": True}),
    "hybrid": (8, 2, {"remat": "none"}),
    "deferred": (8, 1, {"accumulate": 3, "defer_scatter": True}),
    "replicated": (8, 1, {"min_shard_elements": 1 << 30}),
}


class Layer(nnx.Module):
    """Each kind of product, on weights that 8 devices divide within blocks."""

    def __init__(self, rngs: nnx.Rngs):
        self.general = nnx.LinearGeneral(WIDTH, (4, 32), use_bias=False, rngs=rngs)
        self.mixed = nnx.Einsum("btnh,nhd->tbd", (4, 32, WIDTH), rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        normal = nnx.initializers.normal(0.05)
        self.down = nnx.Param(normal(rngs.params(), (HIDDEN, WIDTH)), matmul=True)
        self.narrow = nnx.Linear(WIDTH, NARROW, use_bias=False, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        y = self.mixed(jnp.tanh(self.general(x_BTD))).swapaxes(0, 1)
        h = jax.nn.gelu(self.up(x_BTD + y))
        y = x_BTD + jshard.nn.matmul(h, self.down)
        return y + self.narrow(y)[..., :WIDTH]


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = jshard.Stack(Layer, LAYERS, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers(x)


def loss_fn(model: Any, x: jax.Array) -> jshard.Mean:
    return jshard.Mean(jnp.sum(model(x) ** 2), x.size)


def inputs(examples: int = EXAMPLES) -> np.ndarray:
    shape = (examples, TIME, WIDTH)
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def on_mesh(precision: jshard.Precision, case: str) -> jshard.FSDP:
    """One of MESHES."""
    devices, replicas, knobs = MESHES[case]
    settings: dict[str, Any] = {"min_shard_elements": 0} | knobs
    policy = jshard.Policy(precision=precision, **settings)
    mesh = jshard.make_mesh(replica=replicas, devices=jax.devices()[:devices])
    return jshard.FSDP(mesh, policy)


def gradients(fsdp: jshard.FSDP) -> tuple[dict, dict, jax.Array]:
    """(parameters, gradients, loss) of a step, by name."""
    return stepped(fsdp, fsdp.train_step(loss_fn, TX))


def stepped(fsdp: jshard.FSDP, step: Any) -> tuple[dict, dict, jax.Array]:
    """The same of this step."""
    state = fsdp.from_model(filled(lambda: Model(nnx.Rngs(0)), 0.05), TX)
    before = nnx.to_pure_dict(fsdp.fetch(state.params))
    state, metrics = step(state, fsdp.shard_batch(inputs()))
    after = nnx.to_pure_dict(fsdp.fetch(state.params))
    return before, jax.tree.map(np.subtract, before, after), metrics["loss"]


def traced(fsdp: jshard.FSDP) -> tuple[Any, jshard.TrainState, Any]:
    state, step = fsdp.abstract_state(Model, TX), fsdp.train_step(loss_fn, TX)
    x = jax.ShapeDtypeStruct((EXAMPLES, TIME, WIDTH), jnp.float32)
    # As the start-up note traces it, which so need not do that again.
    return step.trace(state, abstract_batch(x, fsdp.mesh)), state, step


def reference(
    params: Any, x_BTD: np.ndarray, multiply: Callable, narrow: Callable
) -> tuple[Any, Any]:
    """Examples' part of the loss of all, and its gradients, without jshard.

    ``multiply`` is the product with every weight but the narrow one's.
    """

    def layer(p: Any, x: jax.Array) -> jax.Array:
        h = jnp.tanh(multiply(x, p["general"]["kernel"].reshape(WIDTH, WIDTH)))
        y = multiply(h, p["mixed"]["kernel"].reshape(WIDTH, WIDTH))
        h = jax.nn.gelu(multiply(x + y, p["up"]["kernel"]))
        y = x + multiply(h, p["down"])
        return y + narrow(y, p["narrow"]["kernel"])[..., :WIDTH]

    def loss(params: Any) -> jax.Array:
        x = jnp.asarray(x_BTD.reshape(-1, WIDTH))
        for i in range(LAYERS):
            x = layer(jax.tree.map(lambda p, i=i: p[i], params["layers"]), x)
        return jnp.sum(x**2) / (EXAMPLES * TIME * WIDTH)

    return jax.value_and_grad(loss)(params)


def rounding_product(
    of_x: Callable, of_w: Callable, of_dy: Callable, of_tokens: Callable
) -> Callable:
    """Returns ``x @ w`` whose operands NumPy functions round, in each direction.

    ``of_tokens(x, dy)`` rounds both operands of the weight's gradient.
    """

    def called(fn: Callable, *xs: jax.Array) -> Any:
        like = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in xs]
        shapes = like if len(xs) > 1 else like[0]
        host = lambda *xs: fn(*map(np.asarray, xs))
        return jax.pure_callback(host, shapes, *xs)

    @jax.custom_vjp
    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return called(of_x, x) @ called(of_w, w)

    def backward(saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, w = saved
        turned_x, turned_dy = called(of_tokens, x, dy)
        return called(of_dy, dy) @ called(of_w, w).T, turned_x.T @ turned_dy

    multiply.defvjp(lambda x, w: (multiply(x, w), (x, w)), backward)
    return multiply


relative = functools.partial(
    jax.tree.map,
    lambda got, want: np.linalg.norm(got - want) / np.linalg.norm(want),
)
