"""26 optimizers of optax follow one device, with and without Stacks, on 2 to 8 devices.

    export JAX_PLATFORMS=cpu PYTHONPATH=.:tests/helpers
    python tests/sharding/update/test_every_optimizer.py

prints the table of errors. The reference is a plain Flax model with a list of layers
and plain optax, in float64; no width is a multiple of the devices.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from jshard.system.errors import UserError
from parity import error, make_update

EXAMPLES, WIDTH, LAYERS, STEPS, BOUND = 24, 7, 2, 4, 1e-9
DEVICES = (2, 3, 8)
KINDS = ("list", "stack")

# What looks at whole tensors, which per_layer gives of a Stack.
OF_TENSORS = "adafactor fromage lamb lars muon novograd sm3".split()
OF_NUMBERS = (
    "adabelief adadelta adagrad adam adamax adamw adan amsgrad lion nadam "
    "optimistic_gradient_descent polyak_sgd radam rmsprop rprop sam sgd sign_sgd yogi"
).split()
OPTIMIZERS = sorted(OF_TENSORS + OF_NUMBERS)
OPTIONS: dict[str, dict[str, Any]] = {
    "adafactor": {"min_dim_size_to_factor": 4, "weight_decay_rate": 0.1},
    "adamw": {"weight_decay": 0.1},
    "lamb": {"weight_decay": 0.1},
    "lars": {"weight_decay": 0.1, "momentum": 0.9},
    "rmsprop": {"momentum": 0.9, "centered": True},
    "sgd": {"momentum": 0.9, "nesterov": True},
}


def make(name: str) -> Any:
    if name == "sam":
        return optax.contrib.sam(optax.adam(1e-2), optax.sgd(0.05), sync_period=2)
    module = optax if hasattr(optax, name) else optax.contrib
    rate = {"polyak_sgd": 0.1, "adadelta": 1.0}.get(name, 1e-2)
    return getattr(module, name)(rate, **OPTIONS.get(name, {}))


def linear(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(WIDTH, WIDTH, param_dtype=jnp.float64, rngs=rngs)


class Layered(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([linear(rngs) for _ in range(LAYERS)])
        self.head = linear(rngs)

    def run(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jnp.tanh(self.run(x)))


class Stacked(Layered):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = jshard.Stack(linear, LAYERS, rngs=rngs)
        self.head = linear(rngs)

    def run(self, x: jax.Array) -> jax.Array:
        return self.layers(x)


X, Y = np.random.default_rng(1).normal(size=(2, EXAMPLES, WIDTH))


def squares(model: Any, batch: Any) -> jax.Array:
    return jnp.sum((model(batch["x"]) - batch["y"]) ** 2)


def loss_fn(model: Any, batch: Any) -> jshard.Mean:
    return jshard.Mean(squares(model, batch), len(batch["x"]))


@functools.cache
def start() -> tuple[Any, Any]:
    """The plain model, and the same with a Stack."""
    plain, stack = (
        filled(lambda cls=cls: cls(nnx.Rngs(0))) for cls in (Layered, Stacked)
    )
    nnx.update(stack, {"head": nnx.state(plain.head)})
    values = dict(nnx.to_flat_state(nnx.state(stack)))
    for name in ("kernel", "bias"):
        rows = [np.asarray(getattr(layer, name).get_value()) for layer in plain.layers]
        values["layers", name].set_value(jax.device_put(np.stack(rows)))
    nnx.update(stack, nnx.from_flat_state(values))
    return plain, stack


@functools.cache
def gradients() -> Any:
    graphdef, _ = nnx.split(start()[0])
    loss = lambda params: squares(nnx.merge(graphdef, params), {"x": X, "y": Y})
    return jax.jit(jax.value_and_grad(lambda params: loss(params) / EXAMPLES))


def tensors(params: Any) -> dict[tuple, np.ndarray]:
    """Each tensor by its path in the plain model."""
    found = {}
    for path, variable in nnx.to_flat_state(params):
        value = np.asarray(variable.get_value())
        if path[0] == "layers" and len(path) == 2:
            found |= {("layers", i, path[1]): row for i, row in enumerate(value)}
        else:
            found[path] = value
    return found


@functools.cache
def reference(name: str) -> dict[tuple, np.ndarray]:
    """Tensors after plain Flax and optax on one device."""
    params, tx = nnx.state(start()[0]), make(name)
    opt_state, update = jax.jit(tx.init)(params), make_update(tx)
    for _ in range(STEPS):
        loss, grads = gradients()(params)
        extra = {"value": loss} if name == "polyak_sgd" else {}
        params, opt_state = update(grads, opt_state, params, **extra)
    return tensors(params)


def worst_error(name: str, kind: str, devices: int) -> float:
    """The largest error of a tensor after some steps, beside its largest change."""
    mesh = jshard.make_mesh(devices=jax.devices()[:devices])
    policy = jshard.Policy(min_shard_elements=1)
    fsdp = jshard.FSDP(mesh, policy, units=(nnx.Linear,))
    tx = make(name)
    if kind == "stack" and name == "muon":
        tx = jshard.optim.muon(1e-2)
    elif kind == "stack" and name in OF_TENSORS:
        tx = jshard.optim.per_layer(tx)
    state = fsdp.from_model(start()[KINDS.index(kind)], tx)
    step, batch = fsdp.train_step(loss_fn, tx), fsdp.shard_batch({"x": X, "y": Y})
    for _ in range(STEPS):
        state, _ = step(state, batch)
    got, want = tensors(fsdp.fetch(state.params)), reference(name)
    first = tensors(nnx.state(start()[0]))
    assert got.keys() == want.keys()
    assert all(np.any(want[path] != first[path]) for path in want), "it does not train"
    return max(error(got[path] - first[path], want[path] - first[path]) for path in got)


@pytest.mark.quick("polyak_sgd-list-8", "sign_sgd-stack-2")
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_optax_follows_one_device(x64, name, kind, devices):
    assert worst_error(name, kind, devices) <= BOUND


@pytest.mark.slow  # by default test_stacks_as_tensors.py has some
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_of_a_stack_an_optimizer_of_tensors_is_refused_and_no_other(x64, name):
    fsdp = jshard.FSDP(jshard.make_mesh(), units=(nnx.Linear,))
    if name not in OF_TENSORS:
        fsdp.abstract_state(Stacked, make(name))
    else:
        with pytest.raises(UserError, match="per_layer"):
            fsdp.abstract_state(Stacked, make(name))


def table() -> None:
    """Prints the errors as Markdown."""
    columns = [(kind, devices) for kind in KINDS for devices in DEVICES]
    print("| optimizer |", " | ".join(f"{kind}, {n}" for kind, n in columns), "|")
    print("|---|" + "---:|" * len(columns))
    for name in OPTIMIZERS:
        errors = (f"{worst_error(name, *column):.1e}" for column in columns)
        wrapped = " (`per_layer` in a Stack)" if name in OF_TENSORS else ""
        print(f"| {name}{wrapped} |", " | ".join(errors), "|", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    table()
