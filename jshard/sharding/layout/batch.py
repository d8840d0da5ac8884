"""A batch on the mesh: examples split over devices, and maybe their sequences.

Arrays, those of typed random keys too, are (examples, ...). A scalar, which may be a
key, is the same for every example: each device and micro-batch has it. Which arrays are
(examples, sequence, ...) is said: ``sequences`` are the names of those, as of ``FSDP``.
"""

import math
from collections.abc import Sequence
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


def split_batch(
    local_batch: Any,
    mesh: Mesh,
    sequences: Sequence[str] | None = None,
    *,
    whole: bool = False,
) -> Any:
    """Makes the global arrays of ``FSDP.shard_batch``; ``shard_examples`` if whole."""
    with own_mesh(mesh) as callers:
        return given_back(_split(local_batch, mesh, sequences, whole), callers)


def _split(
    local_batch: Any, mesh: Mesh, sequences: Sequence[str] | None, whole: bool
) -> Any:
    _, parts = rows_of_process(mesh, whole=whole)
    check_fields(local_batch)
    check_batch(local_batch, mesh, parts=parts, whole=whole)
    specs = batch_specs(local_batch, mesh, sequences, whole=whole)

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

    return jax.tree.map(put, local_batch, specs)


def check_fields(batch: Any) -> None:
    """Raises UserError for what is no array of numbers, by the field's name."""
    plain = (Number, str, bytes)
    lists = lambda x: isinstance(x, list) and all(isinstance(y, plain) for y in x)
    for path, x in jax.tree_util.tree_leaves_with_path(batch, is_leaf=lists):
        name = _name(path)
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


def check_sequences(sequences: Any) -> tuple[str, ...] | None:
    """Returns the names in ``sequences``; a UserError for anything else in it."""
    if sequences is None:
        return None
    names = () if isinstance(sequences, str) else tuple(sequences)
    if isinstance(sequences, str) or not all(isinstance(x, str) for x in names):
        raise UserError(
            f"sequences={sequences!r}: give names of a batch's arrays, such as "
            "('inputs', 'targets')"
        )
    return names


def batch_specs(
    batch: Any,
    mesh: Any,
    sequences: Sequence[str] | None = None,
    *,
    whole: bool = False,
) -> Any:
    """Returns the spec of each array of a batch; sequences may be kept ``whole``.

    Raises:
      UserError: as ``sequence_names``.
    """
    names = set() if whole else sequence_names(batch, mesh, sequences)

    def spec(path: tuple, x: Any) -> PartitionSpec:
        if not np.ndim(x):
            return PartitionSpec()
        if whole:
            return examples_spec(mesh)
        return batch_spec(mesh, sequence=_name(path) in names)

    return jax.tree_util.tree_map_with_path(spec, batch)


def sequence_names(batch: Any, mesh: Any, sequences: Sequence[str] | None) -> set[str]:
    """Returns the names of the arrays that the mesh splits along the second dimension.

    Features, classes or labels may have as many entries as a sequence has tokens, so
    that no shape tells. Only where a single array has two dimensions it need not be
    said.

    Raises:
      UserError: several arrays may be sequences and ``sequences`` is None; it names
        what is no field, or has no second dimension; or a sequence does not divide.
    """
    axes = devices_of_a_sequence(mesh)
    named, shared = named_sizes(axes), math.prod(axes.values())
    if not axes:
        return set()
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    shapes = {_name(path): list(np.shape(x)) for path, x in leaves}
    may_be = {name: shape for name, shape in shapes.items() if len(shape) > 1}
    listed = some_of([f"{name!r} {shape}" for name, shape in may_be.items()], limit=4)
    if sequences is None:
        if len(may_be) > 1:
            raise UserError(
                f"batch: the mesh's {named} splits sequences, and {listed} may be "
                f"some: name those that are, jshard.FSDP(sequences=("
                f"{next(iter(may_be))!r}, ...)), or in a recipe sequences(config)"
            )
        sequences = tuple(may_be)
    of_name = {
        name: {x for x in shapes if x == name or x.startswith(f"{name}.")}
        for name in sequences
    }
    found = set().union(*of_name.values())
    absent = [name for name in sequences if not of_name[name]]
    if absent and may_be.keys() - found:
        raise UserError(
            f"sequences={tuple(sequences)}: the batch has no {absent[0]!r}; it has "
            f"{listed}"
        )
    for name in sorted(found):
        if len(shapes[name]) < 2 or shapes[name][1] % shared:
            why = "no second dimension"
            if len(shapes[name]) > 1:
                why = f"a length that is not divisible by the mesh's {named}"
            raise UserError(f"batch: the sequence {name!r} {shapes[name]} has {why}")
    return found


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def abstract_batch(
    batch: Any, mesh: Any, sequences: Sequence[str] | None = None
) -> Any:
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

    return jax.tree.map(of, batch, batch_specs(batch, mesh, sequences))


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
    batch: Any,
    mesh: Mesh,
    *,
    accumulate: int = 1,
    parts: int = 1,
    whole: bool = False,
    counted: int | None = None,
) -> None:
    """Raises UserError unless the examples divide by devices and micro-batches.

    ``batch`` is the global batch, or one of its ``parts``. If sequences stay ``whole``,
    all devices have different examples. If only so many are ``counted``, each device
    has one.
    """
    axes = {} if whole else devices_of_a_sequence(mesh)
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
            by = f"{devices} groups of {named_sizes(axes)} devices"
        if accumulate > 1:
            by += f" x {accumulate} micro-batches (policy.accumulate)"
        raise UserError(
            f"batch of {examples} examples is not divisible by {by}; "
            f"use {nearest(examples, divisor)}"
        )
    if counted is not None and (examples != devices or not 0 < counted <= devices):
        raise UserError(
            f"eval_step: examples={counted} of a batch of {examples}: on this mesh it "
            f"must have {devices}, one for each device, of which 1 to {devices} count"
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
