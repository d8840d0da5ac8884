"""Where a model's weights are while it generates: on every device, or sharded.

Rows of text are split over the devices. A program is a function ``fn(model, rows)`` of
one device's part; the first dimension of every array, the cache's too, is that of rows.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard.inference.generation.unstacked import without_stacks
from jshard.inference.generation.weights_first import keep_outputs_first
from jshard.sharding.settings.mesh import examples_spec
from jshard.sharding.settings.state import TrainState
from jshard.sharding.step.fsdp import FSDP

_DATA = PartitionSpec("data")


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """A model on devices.

    Attributes:
      model: for what does not depend on weights.
      devices: their number.
      sharding: of the arrays of rows.
      weights: the first argument of what `compile` returns.
      compile: turns ``fn(model, rows)`` into a jitted function of weights and rows; if
        the second argument says so, the rows are donated.
      programs: what has been compiled, by a key of the caller's.
    """

    model: Any
    devices: int
    sharding: NamedSharding
    weights: Any
    compile: Callable[[Callable[[Any, Any], Any], bool], Callable[[Any, Any], Any]]
    programs: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def program(
        self, key: Any, fn: Callable[[Any, Any], Any], *, donates: bool = True
    ) -> Callable[[Any], Any]:
        """Returns ``fn`` as a function of rows, compiled once for all equal keys."""
        if key not in self.programs:
            self.programs[key] = self.compile(fn, donates)
        return partial(self.programs[key], self.weights)

    def with_weights(self, weights: Any) -> "Placement":
        """Returns a placement of other weights, such as a later state of a run.

        Both share what they compile.
        """
        return dataclasses.replace(self, weights=weights)

    def put(self, rows: np.ndarray) -> jax.Array:
        """Splits rows, which every process has, over the devices."""
        return jax.make_array_from_callback(
            rows.shape, self.sharding, lambda index: rows[index]
        )


def replicated(model: nnx.Module, devices: Sequence[Any]) -> Placement:
    """Puts all weights on each device."""
    mesh = Mesh(np.asarray(devices), "data")
    local_model = without_stacks(model)
    if mesh.devices.flat[0].platform == "cpu":
        keep_outputs_first(local_model)
    graphdef, state = nnx.split(local_model)
    leaves, structure = jax.tree.flatten(state)
    weights = jax.device_put(leaves, NamedSharding(mesh, PartitionSpec()))

    def compile(fn: Callable, donates: bool) -> Callable:
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
        return jax.jit(run, donate_argnums=1 if donates else ())

    return Placement(model, len(devices), NamedSharding(mesh, _DATA), weights, compile)


def without_values(fsdp: FSDP, state: TrainState) -> nnx.Module:
    """Returns the abstract model of a state, whose weights are not decoded."""
    abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return fsdp.model(jax.tree.map(abstract, state))


def sharded(fsdp: FSDP, state: TrainState) -> Placement:
    """Leaves the weights as shards, which are gathered a layer at a time."""

    def compile(fn: Callable, donates: bool) -> Callable:
        return fsdp.predict_step(fn, donate_batch=donates)

    model = without_values(fsdp, state)
    sharding = NamedSharding(fsdp.mesh, examples_spec(fsdp.mesh))
    return Placement(model, fsdp.mesh.size, sharding, state, compile)
