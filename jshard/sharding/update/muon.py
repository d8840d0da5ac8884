"""Muon of optax, with the products of its matrices on whole layers.

The momentum is elementwise and stays on shards; what is orthogonalized, and the result,
are all that moves.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, MuonState

from jshard.sharding.update.whole_layers import whole_layers


def on_whole_layers(
    tx: optax.GradientTransformation, options: dict[str, Any]
) -> optax.GradientTransformation:
    """Returns a ``optax.contrib.scale_by_muon(**options)``, on whole layers."""
    beta, nesterov, dims_of = (
        options[k] for k in ("beta", "nesterov", "weight_dimension_numbers")
    )
    names = ("ns_steps", "eps", "adaptive", "preconditioning")
    numbers = {name: options[name] for name in names}

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

        def orthogonal(x: jax.Array, dims: Any) -> jax.Array:
            def of_one_layer(x: jax.Array, coefficients: jax.Array) -> jax.Array:
                # Without momentum optax's transformation is what it does to matrices.
                tx = optax.contrib.scale_by_muon(
                    beta=0.0,
                    nesterov=False,
                    weight_dimension_numbers=dims,
                    **numbers,
                )
                start = MuonState(jnp.int32(0), jnp.zeros_like(x), coefficients)
                return tx.update(x, start)[0]

            return whole_layers(of_one_layer)(x, state.ns_coeffs)

        is_leaf = lambda x: isinstance(x, MuonDimensionNumbers)
        dims = dims_of(updates) if callable(dims_of) else dims_of
        updates = jax.tree.map(orthogonal, momentum, dims, is_leaf=is_leaf)
        mu = optax.tree.cast(mu, options["mu_dtype"])
        return updates, MuonState(count, mu, state.ns_coeffs)

    return optax.GradientTransformation(tx.init, update)
