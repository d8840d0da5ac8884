"""A mixture of experts without dropped tokens (MegaBlocks, arXiv:2211.15841).

The tokens are sorted by expert, and each projection is one grouped product
(``jax.lax.ragged_dot``), so that experts may have any number of tokens.

Shape suffixes: B batch, T time, N tokens, E experts, K experts of a token, M choices
(N times K), D model width, F hidden width of an expert.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jshard
from jshard.parallel.experts import on_experts


class Load(NamedTuple):
    """How the router spreads this device's tokens, for the load-balancing loss.

    Attributes:
      chosen_E: the fraction of tokens that choose each expert; they sum to K.
      probability_E: the router's mean probability of each expert; they sum to 1.
    """

    chosen_E: jax.Array
    probability_E: jax.Array


class Experts(nnx.Module):
    """The same projection in every expert; its kernel is (E, in, out)."""

    def __init__(
        self,
        num_experts: int,
        size_in: int,
        size_out: int,
        *,
        std: float,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        shape = (num_experts, size_in, size_out)
        init = nnx.initializers.normal(std)
        self.kernel = nnx.Param(init(rngs.params(), shape, param_dtype))
        self.dtype = dtype
        self.param_dtype = param_dtype

    def __call__(self, x: jax.Array, tokens_E: jax.Array | None) -> jax.Array:
        """Returns ``product`` with the kernel."""
        return self.product(x, self.kernel.get_value(), tokens_E)

    def product(
        self, x: jax.Array, kernel: jax.Array, tokens_E: jax.Array | None
    ) -> jax.Array:
        """Multiplies each expert's rows with its matrix.

        Args:
          x: (M, in) rows in the order of their experts, or as many rows of each expert,
            (E, M, in).
          kernel: the matrices, (E, in, out).
          tokens_E: how many rows each expert has; None if all have as many.

        Returns:
          The products, (M, out) or (E, M, out).
        """
        dtype = self.dtype or jnp.result_type(x, kernel)
        x, kernel = x.astype(dtype), kernel.astype(dtype)
        if tokens_E is None:
            return jnp.matmul(x, kernel)
        return lax.ragged_dot(x, kernel, tokens_E)


class Router(nnx.Module):
    """Chooses each token's experts, in float32 or wider whatever the model's dtype.

    Rounded to bfloat16, the softmax makes training unstable: Fedus et al. 2021 (Switch
    Transformers, arXiv:2101.03961), section 2.4.
    """

    def __init__(
        self, width: int, num_experts: int, *, param_dtype: Any, rngs: nnx.Rngs
    ):
        init = nnx.initializers.normal(0.02)
        self.kernel = nnx.Param(init(rngs.params(), (width, num_experts), param_dtype))

    def __call__(self, x_ND: jax.Array) -> jax.Array:
        """Returns the probability of each expert, (N, E)."""
        wide = jnp.promote_types(x_ND.dtype, jnp.float32)
        kernel = self.kernel.get_value().astype(wide)
        # GPUs would otherwise round the factors to TF32.
        logits_NE = jnp.dot(x_ND.astype(wide), kernel, precision=lax.Precision.HIGHEST)
        return jax.nn.softmax(logits_NE)


class MixtureOfExperts(nnx.Module):
    """Gated MLPs, of which each token takes K of E (Mixtral, arXiv:2401.04088, 2.1).

    Args:
      width: D.
      hidden: F.
      num_experts: E.
      experts_per_token: K.
      normalized: whether a token's K weights are scaled to sum to 1, as in Mixtral.
      activation: of the gate.
      residual_std: standard deviation of the initial output projection.
      dtype: of the computation.
      param_dtype: of the parameters.
      rngs: random streams.
      capacity: of an exchange's first round (``jshard.parallel.experts.on_experts``).
    """

    expert_split = ("gate", "up", "down")
    tensor_split = jshard.nn.Split(columns=("gate", "up"), rows=("down",))

    def __init__(
        self,
        width: int,
        hidden: int,
        num_experts: int,
        experts_per_token: int,
        *,
        normalized: bool,
        activation: Callable[[jax.Array], jax.Array],
        residual_std: float,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
        capacity: float = 1.25,
    ):
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.normalized = normalized
        self.activation, self.capacity = activation, capacity
        self.router = Router(width, num_experts, param_dtype=param_dtype, rngs=rngs)

        def experts(size_in: int, size_out: int, std: float) -> Experts:
            dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
            return Experts(num_experts, size_in, size_out, std=std, **dtypes, rngs=rngs)

        self.gate = experts(width, hidden, 0.02)
        self.up = experts(width, hidden, 0.02)
        self.down = experts(hidden, width, residual_std)

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, Load]:
        """Returns the experts' weighted outputs, (B, T, D), and the router's load."""
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        N, K = len(x_ND), self.experts_per_token
        probability_NE = self.router(x_ND)
        weight_NK, expert_NK = lax.top_k(probability_NE, K)
        if self.normalized:
            weight_NK /= jnp.sum(weight_NK, axis=1, keepdims=True)
        tokens_E = jnp.bincount(expert_NK.reshape(-1), length=probability_NE.shape[1])

        tokens = x_BTD.shape[:2]
        chosen_BTK = (x.reshape(*tokens, K) for x in (weight_NK, expert_NK))
        y_BTD = jshard.nn.tensor_parallel(self._weighted, x_BTD, *chosen_BTK)
        chosen_E = tokens_E.astype(probability_NE.dtype) / N
        return y_BTD, Load(chosen_E, jnp.mean(probability_NE, axis=0))

    def _weighted(
        self, x_BTD: jax.Array, weight_BTK: jax.Array, expert_BTK: jax.Array
    ) -> jax.Array:
        """Returns the weighted sum of what each token's experts return, (B, T, D)."""
        K, D = self.experts_per_token, x_BTD.shape[-1]
        x_ND, expert_NK = x_BTD.reshape(-1, D), expert_BTK.reshape(-1, K)
        modules = self.gate, self.up, self.down
        y_ND = on_experts(
            self._mlp,
            modules,
            x_ND,
            expert_NK,
            weight_BTK.reshape(-1, K),
            self.num_experts,
            self.capacity,
        )
        return y_ND.reshape(x_BTD.shape)

    def _mlp(
        self,
        modules: Any,
        x: jax.Array,
        tokens_E: jax.Array | None,
        weight: jax.Array | None,
    ) -> jax.Array:
        gate, up, down = modules
        hidden = checkpoint_name(gate(x, tokens_E), "hidden")
        up_hidden = checkpoint_name(up(x, tokens_E), "hidden")
        hidden = self.activation(hidden) * up_hidden
        if weight is not None:
            hidden *= weight[..., None].astype(hidden.dtype)
        return down(hidden, tokens_E)


def load_balancing_loss(load: Load, tokens: int) -> jshard.Mean:
    """Returns E times the sum over experts of chosen times probable tokens.

    Equation 4 of Fedus et al. 2021 (arXiv:2101.03961), a mean over layers; with K
    experts a token it is K if all are used alike, as in Hugging Face's Mixtral. Its
    statistics are those of the global batch, or with accumulation of a micro-batch.

    Args:
      load: of all layers: each array has a first axis of layers.
      tokens: this device's tokens.
    """
    E = load.chosen_E.shape[-1]
    chosen_LE = lax.stop_gradient(jshard.pmean(load.chosen_E))
    loss = E * jnp.mean(jnp.sum(chosen_LE * load.probability_E, axis=-1))
    return jshard.Mean(tokens * loss, jnp.asarray(tokens, loss.dtype))
