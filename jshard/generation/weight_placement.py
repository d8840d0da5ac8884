"""Where a model's weights are while it generates: on every device, or sharded.

Rows of text are split over the devices. A program is a function ``fn(model, rows)`` of
one device's part; the first dimension of every array, the cache's too, is that of rows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard.fsdp.fsdp import FSDP
from jshard.fsdp.mesh import examples_spec
from jshard.fsdp.state import TrainState
from jshard.generation.unstacked import without_stacks

_DATA = PartitionSpec("data")


class Placement(NamedTuple):
    """A model on devices.

    Attributes:
      model: for what does not depend on weights.
      devices: their number.
      sharding: of the arrays of rows.
      compile: turns ``fn(model, rows)`` into a jitted function of rows, which are
        donated.
    """

    model: Any
    devices: int
    sharding: NamedSharding
    compile: Callable[[Callable[[Any, Any], Any]], Callable[[Any], Any]]


def replicated(model: nnx.Module, devices: Sequence[Any]) -> Placement:
    """Puts all weights on each device."""
    mesh = Mesh(np.asarray(devices), "data")
    graphdef, state = nnx.split(without_stacks(model))
    leaves, structure = jax.tree.flatten(state)
    weights = jax.device_put(leaves, NamedSharding(mesh, PartitionSpec()))

    def compile(fn: Callable) -> Callable:
        def local(weights: list[jax.Array], rows: Any) -> Any:
            model = nnx.merge(graphdef, jax.tree.unflatten(structure, weights))
            model.eval()
            return fn(model, rows)

        # Nothing here is differentiated, so values need no types.
        run = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(PartitionSpec(), _DATA),
            out_specs=_DATA,
            check_vma=False,
        )
        return partial(jax.jit(run, donate_argnums=1), weights)

    return Placement(model, len(devices), NamedSharding(mesh, _DATA), compile)


def without_values(fsdp: FSDP, state: TrainState) -> nnx.Module:
    """Returns the abstract model of a state, whose weights are not decoded."""
    abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return fsdp.model(jax.tree.map(abstract, state))


def sharded(fsdp: FSDP, state: TrainState) -> Placement:
    """Leaves the weights as shards, which are gathered a layer at a time."""

    def compile(fn: Callable) -> Callable:
        step = fsdp.predict_step(fn, donate_batch=True)
        return partial(step, state)

    sharding = NamedSharding(fsdp.mesh, examples_spec(fsdp.mesh))
    return Placement(without_values(fsdp, state), fsdp.mesh.size, sharding, compile)
