"""A mixture of experts without dropped tokens (MegaBlocks, arXiv:2211.15841).

The tokens are sorted by expert, and each projection is one grouped product
(``jax.lax.ragged_dot``), so that experts may have any number of tokens.

Shape suffixes: B batch, T time, N tokens, E experts, K experts of a token, M choices
(N times K), D model width, F hidden width of an expert.
"""

import dataclasses
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
    """How the router spreads this device's tokens.

    Attributes:
      tokens_E: how many tokens choose each expert; they sum to K times all tokens.
      probability_E: the router's mean probability of each expert; they sum to 1.
    """

    tokens_E: jax.Array
    probability_E: jax.Array


class Experts(nnx.Module):
    """The same projection in every expert: a kernel (E, in, out), a bias (E, out)."""

    def __init__(
        self,
        num_experts: int,
        size_in: int,
        size_out: int,
        *,
        std: float,
        bias: bool = False,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        shape = (num_experts, size_in, size_out)
        init = nnx.initializers.normal(std)
        self.kernel = nnx.Param(init(rngs.params(), shape, param_dtype))
        self.has_bias = bias
        if bias:
            self.bias = nnx.Param(jnp.zeros((num_experts, size_out), param_dtype))
        self.dtype = dtype
        self.param_dtype = param_dtype

    def __call__(self, x: jax.Array, tokens_E: jax.Array | None) -> jax.Array:
        """Returns ``product`` with the kernel, and adds the bias."""
        y = self.product(x, self.kernel.get_value(), tokens_E)
        if not self.has_bias:
            return y
        bias = self.bias.get_value().astype(y.dtype)
        if tokens_E is None:
            return y + bias[:, None]
        return y + jnp.repeat(bias, tokens_E, axis=0, total_repeat_length=len(x))

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


@dataclasses.dataclass(frozen=True)
class Routing:
    """How a token's experts are chosen and weighted.

    Attributes:
      experts: K, how many a token takes.
      normalized: whether a token's K weights are scaled to sum to 1, as in Mixtral.
      sigmoid: whether an expert's score is a sigmoid of its logit, not a softmax over
        all, and a correction is added to it for the choice alone, as in DeepSeek-V3
        (arXiv:2412.19437, section 2.1.2).
      groups: of neighbouring experts, ranked by the sum of their best two.
      chosen_groups: how many of the groups a token's experts are in.
      scale: what the weights are multiplied with.
      bias: whether logits have biases.
    """

    experts: int
    normalized: bool = True
    sigmoid: bool = False
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    bias: bool = False


class Router(nnx.Module):
    """Chooses each token's experts, in float32 or wider whatever the model's dtype.

    Rounded to bfloat16, the softmax makes training unstable: Fedus et al. 2021 (Switch
    Transformers, arXiv:2101.03961), section 2.4.
    """

    def __init__(
        self,
        width: int,
        num_experts: int,
        routing: Routing,
        *,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.normal(0.02)
        self.routing = routing
        self.kernel = nnx.Param(init(rngs.params(), (width, num_experts), param_dtype))
        if routing.bias:
            self.bias = nnx.Param(jnp.zeros(num_experts, param_dtype))
        if routing.sigmoid:  # a statistic of the load: it has no gradient
            self.correction = nnx.BatchStat(jnp.zeros(num_experts, jnp.float32))
            self.tokens = jshard.nn.StepSum(jnp.zeros(num_experts, jnp.int32))

    def __call__(self, x_ND: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns experts' weights and numbers, (N, K), and probabilities, (N, E)."""
        routing, wide = self.routing, jnp.promote_types(x_ND.dtype, jnp.float32)
        kernel = self.kernel.get_value().astype(wide)
        # GPUs would otherwise round the factors to TF32.
        logits_NE = jnp.dot(x_ND.astype(wide), kernel, precision=lax.Precision.HIGHEST)
        if routing.bias:
            logits_NE += self.bias.get_value().astype(wide)
        if routing.sigmoid:
            score_NE = jax.nn.sigmoid(logits_NE)
            ranked_NE = self._within_groups(score_NE + self.correction.get_value())
            expert_NK = lax.top_k(ranked_NE, routing.experts)[1]
            weight_NK = jnp.take_along_axis(score_NE, expert_NK, axis=1)
            probability_NE = score_NE / jnp.sum(score_NE, axis=1, keepdims=True)
        else:
            probability_NE = jax.nn.softmax(logits_NE)
            weight_NK, expert_NK = lax.top_k(probability_NE, routing.experts)
        if routing.normalized:
            weight_NK /= jnp.sum(weight_NK, axis=1, keepdims=True)
        return routing.scale * weight_NK, expert_NK, probability_NE

    def _within_groups(self, ranked_NE: jax.Array) -> jax.Array:
        """Returns what experts are ranked by, -inf outside of the chosen groups."""
        groups, chosen = self.routing.groups, self.routing.chosen_groups
        if chosen == groups:
            return ranked_NE
        ranked_NGE = ranked_NE.reshape(len(ranked_NE), groups, -1)
        best_NG = jnp.sum(lax.top_k(ranked_NGE, 2)[0], axis=-1)
        kept_NC = lax.top_k(best_NG, chosen)[1]
        kept_NG = jnp.any(kept_NC[..., None] == jnp.arange(groups), axis=1)
        masked_NGE = jnp.where(kept_NG[..., None], ranked_NGE, -jnp.inf)
        return masked_NGE.reshape(ranked_NE.shape)


class MixtureOfExperts(nnx.Module):
    """Gated MLPs, of which each token takes K of E (Mixtral, arXiv:2401.04088, 2.1).

    Args:
      width: D.
      hidden: F.
      num_experts: E.
      routing: how K of them are chosen and weighted.
      activation: of the gate.
      residual_std: standard deviation of the initial output projection.
      dtype: of the computation.
      param_dtype: of the parameters.
      rngs: random streams.
      capacity: of an exchange's first round (``jshard.parallel.experts.on_experts``).
      bias: whether the experts have biases, and the columns of gate and up alternate in
        one kernel, as in gpt-oss.
      limit: bound of the gate from above, and of up, to which 1 is added, on both
        sides, as in gpt-oss; 0 is none, and nothing is added.
    """

    @property
    def expert_split(self) -> tuple[str, ...]:
        """The experts; the bias of what they return is added to their weighted sum."""
        return ("gate_up", "down") if self.bias else ("gate", "up", "down")

    @property
    def tensor_split(self) -> jshard.nn.Split:
        """The experts' hidden features."""
        counts = {"hidden": self.hidden} if self.bias else {}  # their pairs of columns
        columns = self.expert_split[:-1]
        return jshard.nn.Split(columns=columns, rows=("down",), counts=counts)

    def __init__(
        self,
        width: int,
        hidden: int,
        num_experts: int,
        routing: Routing,
        *,
        activation: Callable[[jax.Array], jax.Array],
        residual_std: float,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
        capacity: float = 1.25,
        bias: bool = False,
        limit: float = 0.0,
    ):
        self.num_experts, self.routing = num_experts, routing
        self.activation, self.capacity = activation, capacity
        self.hidden, self.bias, self.limit = hidden, bias, limit
        dtypes: dict[str, Any] = {"param_dtype": param_dtype, "rngs": rngs}
        self.router = Router(width, num_experts, routing, **dtypes)

        def experts(
            size_in: int, size_out: int, std: float, bias: bool = False
        ) -> Experts:
            sizes = num_experts, size_in, size_out
            return Experts(*sizes, std=std, bias=bias, dtype=dtype, **dtypes)

        if bias:
            self.gate_up = experts(width, 2 * hidden, 0.02, bias=True)
            self.down_bias = nnx.Param(jnp.zeros((num_experts, width), param_dtype))
        else:
            self.gate = experts(width, hidden, 0.02)
            self.up = experts(width, hidden, 0.02)
        self.down = experts(hidden, width, residual_std)

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, Load]:
        """Returns the experts' weighted outputs, (B, T, D), and the router's load."""
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        N, K = len(x_ND), self.routing.experts
        weight_NK, expert_NK, probability_NE = self.router(x_ND)
        tokens_E = jnp.bincount(expert_NK.reshape(-1), length=probability_NE.shape[1])

        tokens = x_BTD.shape[:2]
        chosen_BTK = (x.reshape(*tokens, K) for x in (weight_NK, expert_NK))
        y_BTD = jshard.nn.tensor_parallel(self._weighted, x_BTD, *chosen_BTK)
        if self.bias:
            weight_NE = jnp.zeros_like(probability_NE)
            rows_N1 = jnp.arange(N)[:, None]
            weight_NE = weight_NE.at[rows_N1, expert_NK].set(
                weight_NK, unique_indices=True
            )
            bias_ED = self.down_bias.get_value().astype(y_BTD.dtype)
            bias_ND = weight_NE.astype(y_BTD.dtype) @ bias_ED
            y_BTD += bias_ND.reshape(y_BTD.shape)
        return y_BTD, Load(tokens_E, jnp.mean(probability_NE, axis=0))

    def _weighted(
        self, x_BTD: jax.Array, weight_BTK: jax.Array, expert_BTK: jax.Array
    ) -> jax.Array:
        """Returns the weighted sum of what each token's experts return, (B, T, D)."""
        K, D = self.routing.experts, x_BTD.shape[-1]
        x_ND, expert_NK = x_BTD.reshape(-1, D), expert_BTK.reshape(-1, K)
        modules = tuple(getattr(self, name) for name in self.expert_split)
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
        *inner, down = modules
        hidden = [checkpoint_name(layer(x, tokens_E), "hidden") for layer in inner]
        if self.bias:
            hidden = [hidden[0][..., ::2], hidden[0][..., 1::2]]
        gate, up = hidden
        if self.limit:
            gate = jnp.minimum(gate, self.limit)
            up = jnp.clip(up, -self.limit, self.limit) + 1
        hidden = self.activation(gate) * up
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
    E = load.tokens_E.shape[-1]
    chosen_LE = load.tokens_E.astype(load.probability_E.dtype) / tokens
    chosen_LE = lax.stop_gradient(jshard.pmean(chosen_LE))
    loss = E * jnp.mean(jnp.sum(chosen_LE * load.probability_E, axis=-1))
    return jshard.Mean(tokens * loss, jnp.asarray(tokens, loss.dtype))


def correct(router: Router, load: Load, rate: float) -> None:
    """Moves experts' corrections towards an even load, once a step.

    Algorithm 1 of Wang et al. 2024 (arXiv:2408.15664): those with fewer tokens than the
    mean gain ``rate``, those with more lose it. The tokens are those of the whole step,
    counted in integers, so that corrections are the same on every mesh and with any
    number of micro-batches.

    Args:
      router: of all layers: each array has a first axis of layers.
      load: of all layers.
      rate: the step of a correction; 0.001 in DeepSeek-V3.
    """
    tokens_LE, last = router.tokens.add(load.tokens_E)
    total_L1, E = jnp.sum(tokens_LE, axis=-1, keepdims=True), tokens_LE.shape[-1]
    fewer_LE = tokens_LE < -(-total_L1 // E)
    more_LE = tokens_LE > total_L1 // E
    correction_LE = router.correction.get_value()
    new_LE = correction_LE + rate * (fewer_LE.astype(jnp.float32) - more_LE)
    router.correction.set_value(jnp.where(last, new_LE, correction_LE))
