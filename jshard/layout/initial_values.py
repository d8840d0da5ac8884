"""Arrays of a new state: what each is, and how they are made.

What is born on the device may be made by one program. What goes to host memory is made
on the device first, so that a state that is larger than the device is made in parts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core

from jshard.compat.jaxprs import without_dead_code
from jshard.errors import UserError
from jshard.layout import layers
from jshard.layout.memory_kinds import HOST
from jshard.layout.specs import LOOKED_UP, is_annotated
from jshard.layout.tables import make_by_rows, mark_table
from jshard.layout.variables import variables
from jshard.policy import Policy


def prepare(
    model: nnx.Module,
    policy: Policy,
    mesh: Any,
    units: tuple[type, ...],
    is_parameter: Callable[[tuple, Any], bool],
) -> None:
    """Gives a new model's parameters the policy's dtypes, and marks its tables.

    Args:
      model: changed in place, traced or not.
      policy: with dtypes of parameters.
      mesh: that they will be sharded on.
      units: module types that become Units.
      is_parameter: an NNX filter.
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, units):
            mark_table(module)
    for path, variable in nnx.iter_graph(model):
        if not isinstance(variable, nnx.Variable):
            continue
        if not is_annotated(variable):
            variable.set_metadata("eager_sharding", nnx.using_eager_sharding())
        if variable.get_metadata(LOOKED_UP, False):
            make_by_rows(variable, mesh)
        dtype = policy.precision_at(path).param
        if dtype is not None and is_parameter(path, variable):
            value = variable.get_value()
            if jnp.issubdtype(value.dtype, jnp.floating):
                variable.set_value(value.astype(dtype))


def mark_stacked(
    model: nnx.Module,
    layer_dims: Mapping[type, int],
    is_parameter: Callable[[tuple, Any], bool],
) -> None:
    """Marks the layer dimensions of what ``nnx.vmap`` stacked, as a Stack's are.

    Args:
      model: changed in place, traced or not.
      layer_dims: of the parameters of each module type, those of its submodules too.
      is_parameter: an NNX filter.

    Raises:
      UserError: parameters of a module have no such dimensions, or differ in them.
    """
    stacked: dict[int, tuple[int, tuple]] = {}  # dimensions, and the path in a layer
    for path, module in nnx.iter_modules(model):
        number = max(
            (n for t, n in layer_dims.items() if isinstance(module, t)), default=0
        )
        counts = set()
        for inner, variable in variables(module):
            if not number or not is_parameter((*path, *inner), variable):
                continue
            shape = np.shape(variable.get_value())[layers.layer_dims(variable) :]
            counts.add(shape[:number])
            if len(shape) < number or len(counts) > 1:
                name = ".".join(map(str, (*path, *inner)))
                raise UserError(
                    f"units: {name!r} of shape {shape} does not have the {number} "
                    f"leading layer dimensions of {type(module).__name__}; give the "
                    "number that nnx.vmap added"
                )
            found = (number, tuple(map(str, inner)))
            stacked[id(variable)] = max(
                found,
                stacked.get(id(variable), found),
                key=lambda found: (found[0], len(found[1])),  # of the outermost module
            )
    for _, variable in variables(model):
        if id(variable) in stacked:
            layers.mark_stacked(variable, *stacked[id(variable)])


def make(
    create: Callable[..., list[Any]], inputs: tuple, abstract: Sequence[Any]
) -> list[jax.Array]:
    """The arrays that ``create(*inputs)`` returns, with the shardings of ``abstract``.

    A part is as large as the largest array in host memory; what stays on the device is
    one part.
    """
    parts = list(_parts(abstract))
    if len(parts) == 1:
        return jax.jit(create, out_shardings=[x.sharding for x in abstract])(*inputs)
    traced, values = jax.make_jaxpr(create)(*inputs), jax.tree.leaves(inputs)
    arrays: dict[int, jax.Array] = {}
    for part in parts:

        def some(*values: jax.Array, part: list[int] = part) -> list[Any]:
            closed = core.ClosedJaxpr(traced.jaxpr, traced.consts)
            outputs = core.jaxpr_as_fun(closed)(*values)
            return [outputs[i] for i in part]

        places = [abstract[i].sharding for i in part]
        made = jax.jit(without_dead_code(some), out_shardings=places)(*values)
        # The next part needs the room.
        arrays |= zip(part, jax.block_until_ready(made), strict=True)
    return [arrays[i] for i in range(len(abstract))]


def _parts(abstract: Sequence[Any]) -> Iterator[list[int]]:
    """Indices of arrays that are made together."""

    def size(x: Any) -> int:
        return int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize

    hosted = [i for i, x in enumerate(abstract) if x.sharding.memory_kind == HOST]
    if rest := [i for i in range(len(abstract)) if i not in set(hosted)]:
        yield rest
    room = max((size(abstract[i]) for i in hosted), default=0)
    part: list[int] = []
    for i in sorted(hosted, key=lambda i: -size(abstract[i])):
        if part and size(abstract[i]) + sum(size(abstract[j]) for j in part) > room:
            yield part
            part = []
        part.append(i)
    if part:
        yield part
