"""The start-up note's lines on a state: what each device holds of it, and why."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jshard.sharding.layout.capacity import shard_bytes
from jshard.sharding.layout.four_bit.base import four_bit_of, values_in, values_in_shard
from jshard.sharding.layout.layer_dims import layer_dims
from jshard.sharding.layout.memory_kinds import HOST
from jshard.sharding.layout.padding import exact_types, padding_now
from jshard.sharding.layout.state_layout import Layout
from jshard.sharding.settings.mesh import shards_of
from jshard.sharding.settings.state import TrainState
from jshard.sharding.units.modules import own_paths
from jshard.sharding.update.per_layer import PerLayerState
from jshard.system.errors import some_of
from jshard.system.formatting import format_bytes


def parameters(state: TrainState) -> str:
    """Returns how many parameters there are, and what a device holds of the state."""
    params = [variable for _, variable in state.flat_params()]
    total, local = (sum(map(count, params)) for count in (values_in, values_in_shard))
    trained = _exact_size(state.params)
    in_bits = sum(values_in(x) for x in params if four_bit_of(x) is not None)
    held = {"host": 0, "device": 0}
    for x in jax.tree.leaves(state):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            where = "host" if x.sharding.memory_kind == HOST else "device"
            held[where] += shard_bytes(x)
    text = f"{total:,} ({local:,} per device); state {format_bytes(held['device'])}"
    text += " per device"
    if held["host"]:
        text += f", {format_bytes(held['host'])} per device in host memory"
    text += "" if trained == total else f"; {trained:,} are trained"
    return f"{text}; {in_bits:,} are in 4 bits" if in_bits else text


def _exact_size(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(exact_types(tree)))


def placed(
    model: nnx.Module, state: TrainState, layout: Layout
) -> list[tuple[str, str]]:
    """Returns the lines on what is padded, whole on each device, or in no unit."""
    found = _padded(state, layout) + _replicated(state, layout)
    return found + _root(model, state, layout) + _streamed(state, layout)


def _padded(state: TrainState, layout: Layout) -> list[tuple[str, str]]:
    """Says how much of the state is padding, and which parameters have most."""
    added = {}
    for path, variable in state.flat_params():
        if padding_now(variable):
            exact = _exact_size(variable)
            added[".".join(map(str, path))] = variable.get_value().size - exact
    if not added:
        return []
    leaves, exact = jax.tree.leaves(state), jax.tree.leaves(exact_types(state))
    zeros = sum(
        (x.size - y.size) * x.dtype.itemsize for x, y in zip(leaves, exact, strict=True)
    )
    names = some_of(sorted(added, key=lambda name: -added[name]), limit=4)
    text = f"{format_bytes(zeros)} of zeros in the state, over all devices, as "
    text += f"{shards_of(layout.mesh)} does not divide {names}"
    return [("padded", text)]


def _replicated(state: TrainState, layout: Layout) -> list[tuple[str, str]]:
    shards, fewest = shards_of(layout.mesh), layout.policy.min_shard_elements
    if shards == 1:
        return [("replicated", "everything: the fsdp axis has one device")]
    small: dict[str, int] = {}
    others: dict[str, int] = {}
    for path, variable in state.flat_params():
        if layout.places[path].sharding.dim is None:
            x = variable.get_value()
            few = np.prod(x.shape[layer_dims(variable) :]) < fewest
            nbytes = x.size * x.dtype.itemsize
            (small if few else others)[".".join(map(str, path))] = nbytes
    return [
        ("replicated", f"{reason}: {some_of(list(found), limit=4)}{_much(found)}")
        for reason, found in (
            (f"fewer than {fewest} elements per layer", small),
            ("other mesh axes split every dimension", others),
        )
        if found
    ]


def _much(found: Mapping[str, int]) -> str:
    """Says how many bytes they are, if that is worth a thought."""
    total = sum(found.values())
    return f" ({format_bytes(total)} per device)" if total >= 1 << 20 else ""


def _root(
    model: nnx.Module, state: TrainState, layout: Layout
) -> list[tuple[str, str]]:
    own = own_paths(model)
    root = [(path, v) for path, v in state.flat_params() if path in own]
    if not root or shards_of(layout.mesh) == 1:
        return []
    names = [".".join(map(str, path)) for path, _ in root]
    nbytes = sum(v.get_value().size * v.get_value().dtype.itemsize for _, v in root)
    once = "gathered once per step and kept"
    treated = "gathered as a unit" if layout.policy.reshard_root else once
    text = f"{format_bytes(nbytes)} in no Stack or Unit, {treated}"
    return [("root", f"{text}: {some_of(names, limit=4)}")]


def _streamed(state: TrainState, layout: Layout) -> list[tuple[str, str]]:
    """Says why layers in host memory may be updated one after another."""
    if layout.policy.offload is None:
        return []
    is_per_layer = lambda x: isinstance(x, PerLayerState)
    said = map(is_per_layer, jax.tree.leaves(state.opt_state, is_leaf=is_per_layer))
    asked = "the optimizer updates each layer independently of the others"
    reason = "the optimizer is in per_layer" if any(said) else asked
    return [("update", f"one layer of a Stack at a time: {reason}")]
