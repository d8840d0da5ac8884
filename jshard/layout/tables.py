"""Embedding tables that are Units, whose rows are looked up without a gather."""

from typing import Any

from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jshard.fsdp.mesh import shard_axes, shards_of
from jshard.layout.specs import LOOKED_UP


def is_table(module: Any) -> bool:
    """Returns whether ``module`` is exactly an ``nnx.Embed`` or a Unit of one."""
    return getattr(module, "plain_class", type(module)) is nnx.Embed


def mark_table(module: Any) -> None:
    """Marks the table of an embedding module, so that its columns are sharded.

    Other modules are left unchanged.
    """
    if is_table(module):
        module.embedding.set_metadata(LOOKED_UP, True)


def make_by_rows(variable: nnx.Variable, mesh: Any) -> None:
    """Constrains a new table to be computed by rows before it is split by columns.

    XLA vectorizes a device's few columns differently, so the last bit of a value could
    depend on the number of columns per device.
    """
    table = variable.get_value()
    if table.ndim == 2 and table.shape[0] % shards_of(mesh) == 0:
        rows = NamedSharding(mesh, PartitionSpec(shard_axes(mesh)))
        variable.set_value(lax.with_sharding_constraint(table, rows))
