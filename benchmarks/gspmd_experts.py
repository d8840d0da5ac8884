"""Experts as MaxText has them (``megablox=false``), for ``gspmd.py``.

Each sequence sends an expert as many tokens as an even choice would times the capacity;
what exceeds that is dropped. Products with one-hot masks bring tokens to experts and
back, and GSPMD exchanges them over the axis "expert".

Shape suffixes: B batch, T time, D width, E experts, K experts of a token, C tokens of a
sequence for one expert, F hidden width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard.sharding.settings.mesh import EXPERT, FSDP, REPLICA

_CAPACITY = 1


class Dropping(nnx.Module):
    """A mixture of experts that drops tokens, with the parameters of another one."""

    def __init__(self, experts: Any, mesh: Mesh):
        self.router, self.gate = experts.router, experts.gate
        self.up, self.down = experts.up, experts.down
        self.chosen, self.mesh = experts.config.experts_per_token, mesh

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, None]:
        """Returns the experts' weighted outputs, and no load."""
        combine_BTEC = _masks(self.router.kernel.get_value(), x_BTD, self.chosen)
        dispatch_BTEC = combine_BTEC.astype(bool).astype(x_BTD.dtype)
        x_EBCD = self._on_tokens(jnp.einsum("BTD,BTEC->EBCD", x_BTD, dispatch_BTEC))
        x_EBCD = self._on_experts(x_EBCD)
        gate_EBCF, up_EBCF = (
            checkpoint_name(self._product("EBCD,EDF->EBCF", x_EBCD, layer), "hidden")
            for layer in (self.gate, self.up)
        )
        y_EBCD = self._product(
            "EBCF,EFD->EBCD", nnx.silu(gate_EBCF) * up_EBCF, self.down
        )
        y_EBCD = self._on_tokens(checkpoint_name(y_EBCD, "down"))
        return jnp.einsum("EBCD,BTEC->BTD", y_EBCD, combine_BTEC), None

    def _product(self, equation: str, x: jax.Array, layer: Any) -> jax.Array:
        kernel = layer.kernel.get_value().astype(x.dtype)
        return self._on_experts(jnp.einsum(equation, x, kernel))

    def _on_tokens(self, x: jax.Array) -> jax.Array:
        """Between this and the next, GSPMD exchanges by an all-to-all."""
        spec = PartitionSpec(None, (REPLICA, FSDP, EXPERT))
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def _on_experts(self, x: jax.Array) -> jax.Array:
        spec = PartitionSpec(EXPERT, (REPLICA, FSDP))
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


def _masks(kernel_DE: jax.Array, x_BTD: jax.Array, chosen: int) -> jax.Array:
    """Returns what each token's result weighs at its place with an expert: BTEC."""
    (B, T, _), E = x_BTD.shape, kernel_DE.shape[1]
    capacity = T * chosen // E * _CAPACITY
    logits_BTE = x_BTD @ kernel_DE.astype(x_BTD.dtype)
    weight_BTK, expert_BTK = lax.top_k(logits_BTE, chosen)
    weight_BTK = jax.nn.softmax(weight_BTK.astype(jnp.float32)).astype(x_BTD.dtype)
    chosen_BTKE = jax.nn.one_hot(expert_BTK, E, dtype=jnp.int32)
    weight_BTE = jnp.sum(chosen_BTKE * weight_BTK[..., None], axis=2)
    flat_BME = chosen_BTKE.reshape(B, T * chosen, E)
    place_BTKE = (flat_BME * jnp.cumsum(flat_BME, axis=1)).reshape(chosen_BTKE.shape)
    kept_BTE = jnp.sum(chosen_BTKE * (place_BTKE <= capacity), axis=2)
    place_BTE = jnp.sum(place_BTKE, axis=2) * kept_BTE
    slot_BTEC = jax.nn.one_hot(place_BTE, capacity + 1, dtype=x_BTD.dtype)[..., 1:]
    return (weight_BTE * kept_BTE)[..., None].astype(x_BTD.dtype) * slot_BTEC


def use_dropping(blocks: Any, mesh: Mesh) -> None:
    """Gives a stack of blocks experts that drop tokens."""
    blocks.experts = Dropping(blocks.experts, mesh)


def expert_spec(path: list[str]) -> PartitionSpec:
    """Of a stacked kernel of experts: (layer, expert, in, out); MaxText's rule."""
    if "down" in path:
        return PartitionSpec(None, EXPERT, None, FSDP)
    return PartitionSpec(None, EXPERT, FSDP)
