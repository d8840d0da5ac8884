"""Optimizers on stacked layers: one layer's tensors at a time.

The optimizer runs on global arrays, so optax transformations are exact as they are.
But a Stack's leaf holds L tensors, and an optimizer that looks at whole tensors (their
norms, their rank, their factors) must see each of them: ``per_layer``.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from jshard.mesh import AXES, FSDP
from jshard.partition import (
    LAYER_DIMS,
    layer_dims,
    manual_specs,
    optimizer_specs,
    param_specs,
)
from jshard.policy import Policy

# Updates with these look at a matrix as a whole.
_WHOLE_MATRIX = {"dot_general", "svd", "qr", "eigh", "cholesky", "householder_product"}

_sharding = contextvars.ContextVar[tuple[Mesh, Policy] | None]("sharding", default=None)


@contextlib.contextmanager
def sharded_update(mesh: Mesh | None, policy: Policy) -> Iterator[None]:
    """Tells per_layer, while an update is traced, how parameters are sharded."""
    token = _sharding.set(mesh and (mesh, policy))
    try:
        yield
    finally:
        _sharding.reset(token)


class PerLayerState(NamedTuple):
    """State of ``per_layer``.

    Attributes:
      rest: the inner optimizer's state for parameters outside Stacks.
      stacked: for each number of layers L, the inner state of one layer with a
        leading (L,) on every leaf.
    """

    rest: Any
    stacked: dict[str, Any]


def per_layer(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Applies ``tx`` to every layer of a Stack separately, and to the rest as it is.

    For optimizers that treat a leaf as one tensor (LAMB, LARS, Adafactor, adaptive
    clipping) or look at its rank (Muon, ``ndim >= 2`` masks). What spans the whole
    model stays outside: ``optax.chain(optax.clip_by_global_norm(1.0),
    jshard.per_layer(muon(1e-3)))``.

    Layers are mapped at once where the update is elementwise but for reductions.
    Where it multiplies whole matrices, each device is handed whole layers by an
    all-to-all, updates them, and hands the shards back: no matrix is gathered, no
    work is done twice, and one full layer is in memory.

    Args:
      tx: any optax transformation, for parameters from ``nnx`` Stacks.
    """
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> PerLayerState:
        groups = {
            key: jax.vmap(inner.init)(_lower(tree))
            for key, tree, inner in _groups(params, tx)
        }
        return PerLayerState(tx.init(_select(params, lambda v: not _depth(v))), groups)

    def update(updates: Any, state: PerLayerState, params: Any = None, **extra: Any):
        rest, rest_state = tx.update(
            _select(updates, lambda v: not _depth(v)),
            state.rest,
            None if params is None else _select(params, lambda v: not _depth(v)),
            **extra,
        )
        merged, stacked = rest, {}
        for key, tree, inner in _groups(updates, tx):
            layers = None
            if params is not None:
                layers = _lower(_select(params, lambda v, key=key: _depth(v) == key))
            inner_update = _with_extra(inner, extra)
            new, stacked[key] = _update_layers(
                inner_update, _lower(tree), state.stacked[key], layers
            )
            merged = _merge(merged, new, key, updates)
        return merged, PerLayerState(rest_state, stacked)

    return optax.GradientTransformationExtraArgs(init, update)


def _with_extra(tx: optax.GradientTransformationExtraArgs, extra: dict) -> Callable:
    return lambda updates, state, params: tx.update(updates, state, params, **extra)


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _depth(variable: Any) -> str:
    """The number of layers of a Stack's variable as a key, "" outside Stacks."""
    if not _is_variable(variable) or not layer_dims(variable):
        return ""
    leaves = jax.tree.leaves(variable)
    return str(leaves[0].shape[0]) if leaves else ""


def _select(tree: Any, wanted: Callable[[Any], bool]) -> Any:
    """``tree`` with MaskedNodes in place of what is not wanted, as optax masks."""

    def pick(variable: Any) -> Any:
        if not _is_variable(variable) or wanted(variable):
            return variable
        return variable.copy(optax.MaskedNode())

    return jax.tree.map(pick, tree, is_leaf=_is_variable)


def _groups(tree: Any, tx: optax.GradientTransformationExtraArgs) -> Iterator[tuple]:
    """(L, the variables of Stacks of L layers, the transformation of one layer)."""
    variables = [
        v for v in jax.tree.leaves(tree, is_leaf=_is_variable) if _is_variable(v)
    ]
    for key in sorted({_depth(v) for v in variables} - {""}):
        members = [v for v in variables if _depth(v) == key]
        nested = any(layer_dims(v) > 1 for v in members)
        chosen = _select(tree, lambda v, key=key: _depth(v) == key)
        yield key, chosen, per_layer(tx) if nested else tx


def _lower(tree: Any) -> Any:
    """Marks variables as having one layer dimension less, for use under a map."""

    def lower(variable: Any) -> Any:
        if not _is_variable(variable) or not layer_dims(variable):
            return variable
        return variable.copy(**{LAYER_DIMS: layer_dims(variable) - 1})

    return jax.tree.map(lower, tree, is_leaf=_is_variable)


def _merge(into: Any, new: Any, key: str, like: Any) -> Any:
    """Puts the variables of group ``key`` from ``new`` into ``into``."""

    def pick(variable: Any, old: Any, fresh: Any) -> Any:
        if not _is_variable(variable):
            return old
        if _depth(variable) != key:
            return old
        return variable.copy(fresh.get_value())

    return jax.tree.map(pick, like, into, new, is_leaf=_is_variable)


def _update_layers(update: Callable, updates: Any, state: Any, params: Any) -> Any:
    """``update`` for every layer: (new updates, new state), (L, ...) leaves."""
    sharding = _sharding.get()
    whole = _multiplies_matrices(update, updates, state, params)
    if sharding is None or sharding[0].shape[FSDP] == 1 or not whole:
        return jax.vmap(update)(updates, state, params)
    return _update_whole_layers(update, updates, state, params, *sharding)


def _multiplies_matrices(update: Callable, *stacked: Any) -> bool:
    layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)
    jaxpr = jax.make_jaxpr(update)(*layer).jaxpr

    def search(jaxpr: core.Jaxpr) -> bool:
        return any(
            eqn.primitive.name in _WHOLE_MATRIX
            or any(map(search, core.jaxprs_in_params(eqn.params)))
            for eqn in jaxpr.eqns
        )

    return search(jaxpr)


def _update_whole_layers(
    update: Callable, updates: Any, state: Any, params: Any, mesh: Mesh, policy: Policy
) -> Any:
    """Each device updates every n-th layer, whole; all-to-alls move shards to it."""
    shards = mesh.shape[FSDP]
    specs = _stacked_specs(updates, policy, mesh)
    state_specs = optimizer_specs(state, updates, specs)
    length = jax.tree.leaves(updates)[0].shape[0]
    rounds = -(-length // shards)

    def local(updates: Any, state: Any, params: Any) -> Any:
        def to_rounds(x: jax.Array) -> jax.Array:
            padding = [(0, rounds * shards - length), *[(0, 0)] * (x.ndim - 1)]
            x = jnp.pad(x, padding) if rounds * shards > length else x
            return x.reshape(rounds, shards, *x.shape[1:])

        def from_rounds(x: jax.Array) -> jax.Array:
            return x.reshape(rounds * shards, *x.shape[2:])[:length]

        def one_round(layers: Any) -> Any:
            inputs, dims = layers, (specs, state_specs, specs)
            updates, state, params = (
                jax.tree.map(_to_owner, tree, spec) if tree is not None else None
                for tree, spec in zip(inputs, dims, strict=True)
            )
            with sharded_update(None, policy):  # a Stack inside is whole here, too
                updates, state = update(updates, state, params)
            return (
                jax.tree.map(_from_owner, updates, specs),
                jax.tree.map(_from_owner, state, state_specs),
            )

        layers = jax.tree.map(to_rounds, (updates, state, params))
        return jax.tree.map(from_rounds, lax.map(one_round, layers))

    # Varying types are not tracked here: replicated leaves come back by all-gather.
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, state_specs, None if params is None else specs),
        out_specs=(specs, state_specs),
        axis_names=set(AXES),
        check_vma=False,
    )(updates, state, params)


def _stacked_specs(updates: Any, policy: Policy, mesh: Mesh) -> Any:
    """Specs of (L, ...) leaves whose variables are marked as one layer."""

    def raise_(variable: Any) -> Any:
        return variable.copy(**{LAYER_DIMS: layer_dims(variable) + 1})

    raised = jax.tree.map(raise_, updates, is_leaf=_is_variable)
    specs = manual_specs(param_specs(raised, policy, mesh))
    leaves = jax.tree.leaves(specs)
    return jax.tree.unflatten(jax.tree.structure(updates), leaves)


def _dim(spec: PartitionSpec) -> int | None:
    """The sharded dimension of one layer, its layer dimension removed."""
    return spec.index(FSDP) - 1 if FSDP in spec else None


def _to_owner(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """(n, ...) shards of n layers to the one whole layer this device owns."""
    dim = _dim(spec)
    if dim is None:
        return x[lax.axis_index(FSDP)]
    return lax.all_to_all(x, FSDP, 0, dim + 1, tiled=True)[0]


def _from_owner(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """The inverse of ``_to_owner``."""
    dim = _dim(spec)
    if dim is None:
        return lax.all_gather(x, FSDP)
    return lax.all_to_all(x[None], FSDP, dim + 1, 0, tiled=True)
