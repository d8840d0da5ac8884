"""A model in which a bit flips on one device, as if that computed wrong.

Which bit, where, is in the batch, so that nothing is compiled again. ``Flipping`` is a
replay of a step that flips it in some computations alone, on a device of its own, not
in a place of the mesh.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import jshard
from jshard.sharding.settings.mesh import manual_axes
from jshard.sharding.step.replay.replayed import Replay

WIDTH = 8
FIELDS = 5  # place + 1, site, layer, element, bit


class Number(nnx.Variable):
    """The number of a layer, which is no parameter."""


@jax.custom_vjp
def flips(x: jax.Array, fault: jax.Array, site: jax.Array) -> jax.Array:
    """Returns ``x``, whose gradient has a flipped bit if the fault is of this site."""
    return x


def _forward(x, fault, site):
    return x, (fault, site)


def _backward(saved, grad):
    fault, site = saved
    axes = manual_axes()
    here = lax.axis_index(axes) if axes else 0
    yes = (fault[0] == here + 1) & (fault[1:3] == site).all()
    bits = lax.bitcast_convert_type(grad, jnp.uint32)
    at = jnp.arange(grad.size).reshape(grad.shape) == fault[3] % grad.size
    mask = jnp.uint32(1) << fault[4].astype(jnp.uint32)
    flipped = jnp.where(yes & at, bits ^ mask, bits)
    return lax.bitcast_convert_type(flipped, grad.dtype), None, None


flips.defvjp(_forward, _backward)


class Block(nnx.Module):
    """Two sites: 0 is ``up``, 1 is ``down``."""

    tensor_split = jshard.nn.Split(columns=("up",), rows=("down",))

    def __init__(self, rngs: nnx.Rngs):
        draw = nnx.initializers.normal(0.3)
        self.up = nnx.Linear(
            WIDTH, 2 * WIDTH, use_bias=False, kernel_init=draw, rngs=rngs
        )
        self.down = nnx.Linear(
            2 * WIDTH, WIDTH, use_bias=False, kernel_init=draw, rngs=rngs
        )
        self.number = Number(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array, fault: jax.Array) -> jax.Array:
        number = self.number[...]
        site = lambda kind: jnp.stack([jnp.int32(kind), number])
        up = flips(self.up.kernel[...], fault, site(0))
        down = flips(self.down.kernel[...], fault, site(1))
        return x + jnp.tanh(x @ up) @ down


class Model(nnx.Module):
    """Layers in a Stack or in a list, between a root parameter and a Unit."""

    def __init__(self, rngs: nnx.Rngs, layers: int, *, stacked: bool):
        self.scale = nnx.Param(jnp.ones(WIDTH))
        make = lambda rngs: Block(rngs)
        if stacked:
            self.blocks = jshard.Stack(make, layers, rngs=rngs)
            for _, variable in nnx.to_flat_state(nnx.state(self.blocks, Number)):
                variable.set_value(jnp.arange(layers))
        else:
            self.blocks = nnx.List([jshard.Unit(make(rngs)) for _ in range(layers)])
            for i, block in enumerate(self.blocks):
                block.number.set_value(jnp.int32(i))
        self.head = jshard.Unit(nnx.Linear(WIDTH, 1, rngs=rngs))

    def __call__(self, x: jax.Array, fault: jax.Array) -> jax.Array:
        x = x * self.scale[...]
        if isinstance(self.blocks, nnx.List):
            for block in self.blocks:
                x = block(x, fault)
        else:
            x = self.blocks(x, fault)
        return self.head(x)


def loss_fn(model: Model, batch: Any) -> jshard.Mean:
    """The squared error of a sum."""
    error = model(batch["x"], batch["fault"][0])[:, 0] - batch["x"].sum(1)
    return jshard.Mean(jnp.sum(error**2), error.size)


def rows(examples: int = 32) -> dict[str, np.ndarray]:
    """A batch in which nothing flips."""
    x = np.random.default_rng(0).normal(size=(examples, WIDTH)).astype(np.float32)
    return {"x": x, "fault": np.zeros((examples, FIELDS), np.int32)}


@dataclasses.dataclass(frozen=True)
class Flip:
    """A bit that flips in a weight's gradient, in some computations of a step."""

    device: int
    site: int
    layer: int
    element: int
    bit: int
    computations: tuple[int, ...]  # in the order that they run


class Flipping(Replay):
    """A replay of a step on devices of which one computes wrong."""

    fault: Flip | None = None
    made = 0  # computations of the step so far

    def program(self, distance: int) -> Any:
        """Returns the program, given a batch of this device's fault."""
        run = super().program(distance)

        def with_fault(state, batch):
            fault, now = self.fault, self.made
            self.made += 1
            if fault is not None and now in fault.computations:
                place = (fault.device - distance) % self.mesh.size
                values = place + 1, fault.site, fault.layer, fault.element, fault.bit
                like = batch["fault"]
                field = np.broadcast_to(np.array(values, np.int32), like.shape)
                made = jax.make_array_from_callback(
                    like.shape, like.sharding, lambda index: field[index]
                )
                batch = batch | {"fault": made}
            return run(state, batch)

        return with_fault
