"""Embedding tables, which a Unit of their own looks up where they are."""

from typing import Any

from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jshard.layout.specs import LOOKED_UP
from jshard.mesh import FSDP


def is_table(module: Any) -> bool:
    """Whether ``module`` is an ``nnx.Embed`` and nothing more, or a Unit of one."""
    return getattr(module, "plain_class", type(module)) is nnx.Embed


def mark_table(module: Any) -> None:
    """Marks the table of a Unit, if that is one: its columns are what is sharded."""
    if is_table(module):
        module.embedding.set_metadata(LOOKED_UP, True)


def make_by_rows(variable: nnx.Variable, mesh: Any) -> None:
    """Has a table computed by rows, and split by columns after.

    A device's few columns are not what XLA's vectors are made for, and the last bit of
    a value could depend on how many there are.
    """
    table = variable.get_value()
    if table.ndim == 2 and table.shape[0] % mesh.shape[FSDP] == 0:
        rows = NamedSharding(mesh, PartitionSpec(FSDP))
        variable.set_value(lax.with_sharding_constraint(table, rows))
