"""Muon of optax, with the products of its matrices on whole layers.

The momentum is elementwise and stays on shards; what is orthogonalized, and the result,
are all that moves.
"""

import collections
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, MuonState

from jshard.sharding.update.per_layer import per_layer
from jshard.sharding.update.whole_layers import whole_layers


def muon(
    learning_rate: Any,
    ns_coeffs: Any = "standard",
    ns_steps: Any = 5,
    beta: Any = 0.95,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    weight_decay_mask: Any = None,
    *,
    mu_dtype: Any = None,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Literal["frobenius", "spectral", "aol", "schatten"] = "frobenius",
    adam_b1: Any = 0.9,
    adam_b2: Any = 0.999,
    adam_eps_root: Any = 0.0,
    adam_weight_decay: Any = 0.0,
    adam_learning_rate: Any = None,
    muon_weight_dimension_numbers: Any = None,
    consistent_rms: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns ``optax.contrib.muon`` in ``per_layer``, its products on whole layers.

    Of all matrices of one shape, in the layers of a Stack or outside Stacks, an
    all-to-all gives each device one of every n, and another returns the shards; XLA
    would gather all at once.
    Arguments, updates and state are those of ``per_layer(optax.contrib.muon(...))``;
    ``mu_dtype`` and what follows it are given by name.
    """
    theirs = optax.contrib.muon(
        learning_rate,
        ns_coeffs,
        ns_steps,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        mu_dtype=mu_dtype,
        adam_learning_rate=adam_learning_rate,
        muon_weight_dimension_numbers=muon_weight_dimension_numbers,
    )
    given = muon_weight_dimension_numbers
    dims_of = _matrices if given is None else lambda tree: _spread(given, tree)
    matrices = optax.chain(
        _scale_by_muon(
            dims_of,
            beta=beta,
            nesterov=nesterov,
            mu_dtype=mu_dtype,
            ns_steps=ns_steps,
            eps=eps,
            adaptive=adaptive,
            preconditioning=preconditioning,
        ),
        _scale_by_shape(dims_of, consistent_rms),
        optax.add_decayed_weights(weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    adam = optax.adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        b1=adam_b1,
        b2=adam_b2,
        eps=eps,
        eps_root=adam_eps_root,
        weight_decay=adam_weight_decay,
        mu_dtype=mu_dtype,
        nesterov=nesterov,
    )
    label = lambda dims: "adam" if dims is None else "muon"
    ours = optax.partition(
        {"muon": matrices, "adam": adam},
        lambda tree: jax.tree.map(label, dims_of(tree), is_leaf=_is_dims),
    )
    # The first state has the coefficients of ``ns_coeffs``.
    return per_layer(optax.GradientTransformationExtraArgs(theirs.init, ours.update))


def _is_dims(x: Any) -> bool:
    return x is None or isinstance(x, MuonDimensionNumbers)


def _matrices(tree: Any) -> Any:
    return jax.tree.map(lambda x: MuonDimensionNumbers() if x.ndim == 2 else None, tree)


def _spread(dims: Any, tree: Any) -> Any:
    """Returns dimension numbers, or None, for each array of ``tree``."""
    dims = dims(tree) if callable(dims) else dims
    of_each = lambda dims, below: jax.tree.map(lambda _: dims, below)
    return jax.tree.map(of_each, dims, tree, is_leaf=_is_dims)


def _scale_by_muon(
    dims_of: Any, *, beta: Any, nesterov: bool, mu_dtype: Any, **options: Any
) -> optax.GradientTransformation:
    """Returns ``optax.contrib.scale_by_muon``, on whole layers, with no first state."""

    def update(updates: Any, state: MuonState, params: Any = None) -> Any:
        del params
        debiased = optax.tree.bias_correction
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        count = optax.safe_increment(state.count)
        if nesterov:
            ahead = debiased(mu, beta, optax.safe_increment(count))
            now = debiased(updates, beta, count)
            momentum = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)
        else:
            momentum = debiased(mu, beta, count)

        def of_one_layer(
            x: jax.Array, coefficients: jax.Array, dims: MuonDimensionNumbers
        ) -> jax.Array:
            # Without momentum optax's transformation is what it does to matrices.
            tx = optax.contrib.scale_by_muon(
                beta=0.0, nesterov=False, weight_dimension_numbers=dims, **options
            )
            start = MuonState(jnp.int32(0), jnp.zeros_like(x), coefficients)
            return tx.update(x, start)[0]

        updates = _map_alike(of_one_layer, momentum, state.ns_coeffs, dims_of(updates))
        mu = optax.tree.cast(mu, mu_dtype)
        return updates, MuonState(count, mu, state.ns_coeffs)

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _map_alike(fn: Any, tree: Any, coefficients: jax.Array, dims: Any) -> Any:
    """Maps ``fn`` over whole matrices, those of one shape together.

    As many devices compute at a time as there are such matrices, of all layers.
    """
    leaves, structure = jax.tree.flatten(tree)
    dims_of_each = structure.flatten_up_to(dims)
    groups: dict[Any, list[int]] = collections.defaultdict(list)
    for i, (x, of_x) in enumerate(zip(leaves, dims_of_each, strict=True)):
        groups[x.shape, x.dtype, repr(of_x)].append(i)
    for group in groups.values():
        whole = whole_layers(functools.partial(fn, dims=dims_of_each[group[0]]))
        alike = jnp.stack([leaves[i] for i in group])
        results = jax.vmap(whole, in_axes=(0, None))(alike, coefficients)
        for i, result in zip(group, results, strict=True):
            leaves[i] = result
    return structure.unflatten(leaves)


def _scale_by_shape(dims_of: Any, rms: Any) -> optax.GradientTransformation:
    """Multiplies by sqrt(max(1, fan_out / fan_in)), or sqrt(max(both)) * ``rms``."""

    def scaled(x: jax.Array, dims: MuonDimensionNumbers) -> jax.Array:
        fan_in, fan_out = (
            math.prod(x.shape[axis] for axis in ((y,) if isinstance(y, int) else y))
            for y in dims
        )
        if rms is not None:
            return jnp.sqrt(jnp.maximum(fan_in, fan_out)) * rms * x
        return jnp.sqrt(jnp.maximum(1, fan_out / fan_in)) * x

    return optax.stateless(
        lambda updates, params: jax.tree.map(scaled, updates, dims_of(updates))
    )
