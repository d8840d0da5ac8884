"""Plans of steps in the forms that other libraries give them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jshard.plan import plan as plan_function
from jshard.plan.planning import Plan
from jshard.system.compat import absent_gpus


def parts(plan: Plan) -> dict[str, int]:
    return {part.name: part.bytes for part in plan.memory.parts}


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@nnx.jit
def nnx_step(model: Model, optimizer: nnx.Optimizer, batch: jax.Array) -> None:
    grads = nnx.grad(lambda model: model(batch).var())(model)
    optimizer.update(model, grads)


def test_a_trainers_partial_of_nnx_jit_is_planned_by_the_names_of_variables():
    def make():
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    step = functools.partial(nnx_step, *nnx.eval_shape(make))
    found = parts(plan_function(step, jax.ShapeDtypeStruct((16, 8), jnp.float32)))
    layers, head = 4 * 2 * (8 * 8 + 8), 4 * (8 * 4 + 4)
    assert found["model.layers"] == layers
    assert found["model.head"] == head
    assert found["optimizer.opt_state"] == 2 * (layers + head) + 4


def test_a_jitted_method_is_planned_with_its_object():
    class Trainer:
        rate = 0.1

        @functools.partial(jax.jit, static_argnums=0, static_argnames="sign")
        def step(self, weights: jax.Array, sign: int = 1) -> jax.Array:
            return weights * (1 - sign * self.rate)

    trainer = Trainer()
    assert parts(plan_function(trainer.step, jnp.ones(8)))["weights"] == 32
    step = functools.partial(trainer.step, sign=-1)
    assert parts(plan_function(step, jnp.ones(8)))["weights"] == 32


def test_leaves_that_are_no_arrays_are_constants_as_in_filter_jit():
    Layer = jax.tree_util.register_dataclass(
        dataclasses.make_dataclass("Layer", ["kernel", "activation"]),
        data_fields=["kernel", "activation"],
        meta_fields=[],
    )

    def step(layer: Any, x: jax.Array) -> Any:
        y = layer.activation(x @ layer.kernel)
        return dataclasses.replace(layer, kernel=layer.kernel + y.sum())

    layer = Layer(jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.nn.gelu)
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    found = parts(plan_function(step, layer, x))
    assert (found["layer"], found["x"], found["results"]) == (256, 128, 256)
    vars(step)["donate_first"] = True  # as Equinox's wrapper says it
    assert parts(plan_function(step, layer, x))["results"] == 0


def test_programs_that_ask_for_devices_find_the_absent_ones():
    cpus = jax.devices()
    there = cpus[:2]
    with absent_gpus.asked_for(there):
        assert jax.default_backend() == "gpu"
        assert (jax.devices(), jax.devices("gpu")) == (there, there)
        assert jax.device_count() == 2
        assert len(jax.devices("cpu")) == len(cpus)
        assert float(jnp.ones(8).sum()) == 8  # JAX itself has its own
    assert jax.default_backend() == "cpu"
    assert jax.devices() == cpus
