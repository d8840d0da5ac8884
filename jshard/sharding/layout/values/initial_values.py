"""Prepares a new model's variables and creates the arrays of a new state.

All arrays that stay in device memory are created by one program. Offloaded arrays are
created on the device and then moved to host memory. This is done in parts, because the
state may be larger than device memory.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from jshard.sharding.layout import layer_dims as layers
from jshard.sharding.layout.capacity import shard_bytes
from jshard.sharding.layout.memory_kinds import HOST
from jshard.sharding.layout.specs import LOOKED_UP, is_annotated, mark_table
from jshard.sharding.layout.variables import variables
from jshard.sharding.settings.mesh import shard_axes, shards_of
from jshard.sharding.settings.policy import Policy
from jshard.system.compat.coordination import compile_together, processes_of
from jshard.system.compat.jaxprs import without_unused
from jshard.system.errors import UserError


def prepare(
    model: nnx.Module,
    policy: Policy,
    mesh: Any,
    units: tuple[type, ...],
    is_parameter: Callable[[tuple, Any], bool],
) -> None:
    """Casts a new model's parameters to the policy's dtypes and marks its tables.

    The model, concrete or traced, is changed in place.
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
            # Made by rows, and then split by columns. XLA vectorizes a device's few
            # columns differently: the last bit could depend on their number.
            table = variable.get_value()
            if table.ndim == 2 and table.shape[0] % shards_of(mesh) == 0:
                rows = NamedSharding(mesh, PartitionSpec(shard_axes(mesh)))
                variable.set_value(jax.lax.with_sharding_constraint(table, rows))
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
    """Marks the layer dimensions of parameters that ``nnx.vmap`` stacked, in place.

    The marks are the same as those of a Stack's parameters. ``layer_dims`` holds, for
    each module type, the number of leading layer dimensions of its parameters,
    including those of its submodules.

    Raises:
      UserError: if parameters of a module lack these dimensions or differ in them.
    """
    # For each variable: its number of layer dimensions, and its path in a layer.
    stacked: dict[int, tuple[int, tuple]] = {}
    for path, module in nnx.iter_modules(model):
        number = max(
            (n for t, n in layer_dims.items() if isinstance(module, t)), default=0
        )
        counts = set()
        for inner, variable in variables(module):
            if not number or not is_parameter((*path, *inner), variable):
                continue
            shape = np.shape(variable.get_value())
            shape = shape[layers.layer_dims_of_stacks(variable) :]
            counts.add(shape[:number])
            if len(shape) < number or len(counts) > 1:
                name = ".".join(map(str, (*path, *inner)))
                raise UserError(
                    f"units: {name!r} of shape {shape} does not have the {number} "
                    f"leading layer dimensions of {type(module).__name__}; give the "
                    "number that nnx.vmap added"
                )
            found = (number, inner)
            stacked[id(variable)] = max(
                found,
                stacked.get(id(variable), found),
                # On a tie, keep the longest path, which is from the outermost module.
                key=lambda found: (found[0], len(found[1])),
            )
    for _, variable in variables(model):
        if id(variable) in stacked:
            number, path = stacked[id(variable)]
            layers.mark_stacked_by_flax(variable, number, path)


def fill(
    tree: Any,
    create: Callable[..., Any],
    inputs: tuple,
    in_order: Callable[[Callable], Callable],
) -> Any:
    """Returns an abstract tree with the arrays of ``create(*inputs)``, such a tree.

    Arrays that ``tree`` has already stay, and are not computed. ``in_order`` wraps
    what is compiled.
    """
    leaves, structure = jax.tree.flatten(tree)
    new = [not isinstance(x, jax.Array) for x in leaves]

    # Only the arrays: each call of make_model may make other functions
    # (initializers, lambdas), and with them another tree structure.
    def arrays(*inputs: Any) -> list[jax.Array]:
        made = itertools.compress(jax.tree.leaves(create(*inputs)), new)
        return list(map(_of_strong_type, made))

    made = _make(in_order(arrays), inputs, list(itertools.compress(leaves, new)))
    found = iter(made)
    leaves = [next(found) if x else old for x, old in zip(new, leaves, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def _of_strong_type(x: Any) -> Any:
    """Returns an array whose type is not weak, as after a step.

    Of ``jnp.full(size, 0.5)`` it is, and the second step would be compiled again.
    """
    return x.astype(x.dtype) if getattr(x, "weak_type", False) else x


def _make(
    create: Callable[..., list[Any]], inputs: tuple, abstract: Sequence[Any]
) -> list[jax.Array]:
    """Returns the arrays of ``create(*inputs)`` with the shardings of ``abstract``.

    Arrays that stay on the device are created in one part. Those in host memory are
    split into parts no larger, in bytes on a device, than the largest of them.
    """
    parts = list(_parts(abstract))
    if len(parts) == 1:
        places = [x.sharding for x in abstract]
        make = jax.jit(create, out_shardings=places)
        compile_together(make, _processes(places), *inputs)
        return make(*inputs)
    traced, values = jax.make_jaxpr(create)(*inputs), jax.tree.leaves(inputs)
    arrays: dict[int, jax.Array] = {}
    for part in parts:
        wanted = [i in part for i in range(len(abstract))]
        some = core.jaxpr_as_fun(without_unused(traced, wanted))
        places = [abstract[i].sharding for i in part]
        make = jax.jit(some, out_shardings=places)
        compile_together(make, _processes(places), *values)
        made = make(*values)
        # Wait, because the next part needs the device memory that this one uses.
        arrays |= zip(part, jax.block_until_ready(made), strict=True)
    return [arrays[i] for i in range(len(abstract))]


def _processes(places: Sequence[Any]) -> tuple[int, ...]:
    return processes_of({x for place in places for x in place.device_set})


def _parts(abstract: Sequence[Any]) -> Iterator[list[int]]:
    """Yields the indices of the arrays of each part."""
    hosted = [i for i, x in enumerate(abstract) if x.sharding.memory_kind == HOST]
    if rest := [i for i in range(len(abstract)) if i not in set(hosted)]:
        yield rest
    size = {i: shard_bytes(abstract[i]) for i in hosted}
    room = max(size.values(), default=0)
    part: list[int] = []
    for i in sorted(hosted, key=lambda i: -size[i]):
        if part and size[i] + sum(size[j] for j in part) > room:
            yield sorted(part)
            part = []
        part.append(i)
    if part:
        yield sorted(part)
