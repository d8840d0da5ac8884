"""A batch on the mesh: examples split over devices, and maybe their sequences.

Arrays, those of typed random keys too, are (examples, ...). A scalar, which may be a
key, is the same for every example: each device and micro-batch has it.
"""

import math
from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard.sharding.settings.callers_mesh import given_back, own_mesh
from jshard.sharding.settings.mesh import (
    batch_spec,
    devices_of_a_sequence,
    example_axes,
    examples_spec,
    groups_of_examples,
    mesh_axes,
    named_sizes,
    stages_of,
)
from jshard.system.errors import UserError, some_of


def split_batch(local_batch: Any, mesh: Mesh, *, whole: bool = False) -> Any:
    """Makes the global arrays of ``FSDP.shard_batch``; ``shard_examples`` if whole."""
    with own_mesh(mesh) as callers:
        return given_back(_split(local_batch, mesh, whole), callers)


def _split(local_batch: Any, mesh: Mesh, whole: bool) -> Any:
    _, parts = rows_of_process(mesh, whole=whole)
    check_fields(local_batch)
    check_batch(local_batch, mesh, parts=parts, whole=whole)

    def put(x: Any, spec: PartitionSpec) -> jax.Array:
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = put(jax.random.key_data(x), spec)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        x, sharding = np.asarray(x), NamedSharding(mesh, spec)
        shape = (len(x) * parts, *x.shape[1:]) if spec else x.shape
        if len(spec) > 1:  # only what this process has of the sequences
            places = sharding.devices_indices_map(shape)
            here = [places[device] for device in sharding.addressable_devices]
            ends = [place[1].indices(shape[1])[:2] for place in here]
            x = x[:, min(ends)[0] : max(ends)[1]]
        return jax.make_array_from_process_local_data(sharding, x, shape)

    return jax.tree.map(put, local_batch, batch_specs(local_batch, mesh, whole=whole))


def check_fields(batch: Any) -> None:
    """Raises UserError for what is no array of numbers, by the field's name."""
    plain = (Number, str, bytes)
    lists = lambda x: isinstance(x, list) and all(isinstance(y, plain) for y in x)
    for path, x in jax.tree_util.tree_leaves_with_path(batch, is_leaf=lists):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        field = f"batch field {name!r}" if name else "batch"
        if isinstance(x, list) and all(isinstance(y, Number) for y in x):
            raise UserError(
                f"{field} is a list of {len(x)} numbers, that many scalars; "
                "make it an array (np.asarray)"
            )
        dtype = x.dtype if isinstance(x, jax.Array) else np.asarray(x).dtype
        if isinstance(dtype, np.dtype) and (dtype.kind in "OSUmM" or dtype.fields):
            raise UserError(
                f"{field} has the dtype {dtype}, which devices do not compute with; "
                "leave it out of what shard_batch is given"
            )


def batch_specs(batch: Any, mesh: Any, *, whole: bool = False) -> Any:
    """Returns the spec of each array of a batch; sequences may be kept ``whole``."""

    def spec(x: Any) -> PartitionSpec:
        if not np.ndim(x):
            return PartitionSpec()
        return examples_spec(mesh) if whole else batch_spec(mesh, np.ndim(x))

    return jax.tree.map(spec, batch)


def abstract_batch(batch: Any, mesh: Any) -> Any:
    """Returns the abstract global batch of which ``batch`` is one process's part.

    ``batch`` holds host arrays, (examples, ...) each, or global ones, abstract or not.
    """
    parts = rows_of_process(mesh)[1] if jax.process_count() > 1 else 1

    def of(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        shape = (np.shape(x)[0] * parts, *np.shape(x)[1:]) if spec else ()
        return jax.ShapeDtypeStruct(shape, np.asarray(x).dtype, sharding=sharding)

    return jax.tree.map(of, batch, batch_specs(batch, mesh))


def nearest(examples: int, multiple: int) -> str:
    """Says which numbers of examples near ``examples`` are multiples of a number."""
    below = examples // multiple * multiple
    above = below + multiple
    return f"{below} or {above}" if below else f"{above}"


def divisor_of_examples(mesh: Mesh, accumulate: int) -> int:
    """Returns the number that divides the examples of a batch.

    Devices have different examples, and so have a step's micro-batches; all stages of a
    pipeline have the same ones.
    """
    devices = groups_of_examples(mesh)
    return math.lcm(devices, devices // stages_of(mesh) * accumulate)


def check_batch(
    batch: Any, mesh: Mesh, *, accumulate: int = 1, parts: int = 1, whole: bool = False
) -> None:
    """Raises UserError unless the examples divide by devices and micro-batches.

    ``batch`` is the global batch, or one of its ``parts``. If the mesh has axes that
    split sequences, these must divide by them, unless they stay ``whole``.
    """
    axes = {} if whole else devices_of_a_sequence(mesh)
    named, shared = named_sizes(axes), math.prod(axes.values())
    devices = mesh.size if whole else groups_of_examples(mesh)
    sizes = {np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x)}
    if len(sizes) != 1:
        raise UserError(
            "batch: every array but scalars needs the same leading dimension, the "
            f"examples; got {some_of(sorted(map(str, sizes)), limit=4) or 'no arrays'}"
        )
    examples = sizes.pop() * parts
    divisor = devices if whole else divisor_of_examples(mesh, accumulate)
    if examples % divisor or not examples:
        by = f"{devices} devices"
        if axes:
            by = f"{devices} groups of {named} devices"
        if accumulate > 1:
            by += f" x {accumulate} micro-batches (policy.accumulate)"
        raise UserError(
            f"batch of {examples} examples is not divisible by {by}; "
            f"use {nearest(examples, divisor)}"
        )
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        if np.ndim(x) > 1 and np.shape(x)[1] % shared:
            raise UserError(
                f"batch{jax.tree_util.keystr(path)} of shape {list(np.shape(x))}: its "
                f"sequence length is not divisible by the mesh's {named}"
            )
    if axes:
        _check_lengths(batch, named)


def _check_lengths(batch: Any, named: str) -> None:
    """Raises UserError unless all second dimensions can be the sequence, which is cut.

    Features or one-hot classes may have a length that divides, too.
    """
    fields = {
        np.shape(x)[1]: f"batch{jax.tree_util.keystr(path)} of {list(np.shape(x))}"
        for path, x in jax.tree_util.tree_leaves_with_path(batch)
        if np.ndim(x) > 1
    }
    if len(fields) > 1:
        raise UserError(
            f"{some_of([*fields.values()], limit=4)}: the mesh's {named} splits the "
            "second dimension of every array, its sequence, and these have other "
            "lengths; give what has no sequence in one dimension (classes, not one-hot "
            "vectors; a field for each feature)"
        )


def rows_of_process(mesh: Mesh, *, whole: bool = False) -> tuple[int, int]:
    """Returns which part of a batch's examples this process has: (index, of how many).

    Processes that share sequences have the same examples. With ``whole`` ones, examples
    are split over all devices (``examples_spec``).

    Raises:
      UserError: this process has some of the examples of another, but not all.
    """
    names = mesh_axes(mesh) if whole else example_axes(mesh)
    dims = [mesh.axis_names.index(name) for name in names]
    rows: dict[int, set] = {}
    for index, device in np.ndenumerate(mesh.devices):
        here = tuple(index[dim] for dim in dims)
        rows.setdefault(device.process_index, set()).add(here)
    parts = list(dict.fromkeys(frozenset(x) for x in rows.values()))
    own = frozenset(rows[jax.process_index()])
    if sum(map(len, parts)) != len(frozenset().union(*parts)):
        raise UserError(
            f"mesh: {named_sizes(devices_of_a_sequence(mesh))} neither divides the "
            f"{len(mesh.local_devices)} devices of a process nor is a multiple of them"
        )
    return parts.index(own), len(parts)
