"""A batch on the mesh: examples split over devices, and maybe their sequences."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jshard.errors import UserError
from jshard.fsdp.mesh import (
    batch_spec,
    devices_of_a_sequence,
    examples_spec,
    groups_of_examples,
    named_sizes,
    rows_of_process,
)


def split_batch(local_batch: Any, mesh: Mesh) -> Any:
    """Makes the global arrays of ``FSDP.shard_batch``."""
    _, parts = rows_of_process(mesh)
    check_batch(local_batch, mesh, parts=parts)

    def put(x: Any) -> jax.Array:
        x = np.asarray(x)
        shape = (len(x) * parts, *x.shape[1:])
        sharding = NamedSharding(mesh, batch_spec(mesh, x.ndim))
        if len(sharding.spec) > 1:  # only what this process has of the sequences
            places = sharding.devices_indices_map(shape)
            here = [places[device] for device in sharding.addressable_devices]
            ends = [place[1].indices(shape[1])[:2] for place in here]
            x = x[:, min(ends)[0] : max(ends)[1]]
        return jax.make_array_from_process_local_data(sharding, x, shape)

    return jax.tree.map(put, local_batch)


def place_examples(local_batch: Any, mesh: Mesh) -> Any:
    """Makes the global arrays of ``FSDP.shard_examples``."""
    _, parts = rows_of_process(mesh, whole=True)
    check_batch(local_batch, mesh, parts=parts, whole=True)
    sharding = NamedSharding(mesh, examples_spec(mesh))
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)),
        local_batch,
    )


def batch_specs(batch: Any, mesh: Any) -> Any:
    """Returns the spec of each array of a batch whose sequences may be split."""
    return jax.tree.map(lambda x: batch_spec(mesh, np.ndim(x)), batch)


def abstract_batch(batch: Any, mesh: Any) -> Any:
    """Returns the abstract global batch of which ``batch`` is one process's part.

    ``batch`` holds host arrays, (examples, ...) each, or global ones, abstract or not.
    """
    parts = rows_of_process(mesh)[1] if jax.process_count() > 1 else 1

    def of(x: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, batch_spec(mesh, np.ndim(x)))
        if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        shape = (np.shape(x)[0] * parts, *np.shape(x)[1:])
        return jax.ShapeDtypeStruct(shape, np.asarray(x).dtype, sharding=sharding)

    return jax.tree.map(of, batch)


def check_batch(
    batch: Any,
    mesh: Mesh,
    *,
    accumulate: int = 1,
    parts: int = 1,
    whole: bool = False,
) -> None:
    """Raises UserError unless the examples divide by devices and micro-batches.

    ``batch`` is the global batch, or one of its ``parts``. If the mesh has axes that
    split sequences, these must divide by them, unless they stay ``whole``.
    """
    axes = {} if whole else devices_of_a_sequence(mesh)
    named, shared = named_sizes(axes), math.prod(axes.values())
    devices = mesh.size if whole else groups_of_examples(mesh)
    sizes = {np.shape(x)[:1] for x in jax.tree.leaves(batch)}
    if len(sizes) != 1 or () in sizes:
        raise UserError(
            "batch: every array needs the same leading dimension, the examples; "
            f"got leading dimensions {sorted(sizes)}"
        )
    examples = sizes.pop()[0] * parts
    if examples % (devices * accumulate) or not examples:
        by = f"{devices} devices"
        if axes:
            by = f"{devices} groups of {named} devices"
        if accumulate > 1:
            by += f" x {accumulate} micro-batches (policy.accumulate)"
        raise UserError(
            f"batch of {examples} examples does not divide by {by}; "
            f"use a multiple of {devices * accumulate}"
        )
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        if np.ndim(x) > 1 and np.shape(x)[1] % shared:
            raise UserError(
                f"batch{jax.tree_util.keystr(path)} of shape {list(np.shape(x))}: its "
                f"sequences do not divide by the mesh's {named}"
            )
