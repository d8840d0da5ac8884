"""A mixture of experts without dropped tokens (MegaBlocks, arXiv:2211.15841).

The tokens are sorted by expert, and each projection is one grouped product
(``jax.lax.ragged_dot``), so that experts may have any number of tokens.

Shape suffixes: B batch, T time, N tokens, E experts, K experts of a token, M choices
(N times K), D model width, F hidden width of an expert.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jshard
from jshard.models.layers import residual_std
from jshard.models.llama_config import ACTIVATIONS, LlamaConfig
from jshard.nn import on_experts


class Load(NamedTuple):
    """How the router spreads this device's tokens, without padding.

    Attributes:
      tokens_E: how many tokens choose each expert; they sum to K times the tokens.
      probability_E: the sum of the router's probabilities of each expert.
    """

    tokens_E: jax.Array
    probability_E: jax.Array


class Experts(nnx.Module):
    """The same projection in every expert: a kernel (E, in, out), a bias (E, out)."""

    def __init__(
        self,
        config: LlamaConfig,
        size_in: int,
        size_out: int,
        rngs: nnx.Rngs,
        std: float = 0.02,
        *,
        bias: bool = False,
    ):
        self.dtype, self.param_dtype = config.dtype, config.param_dtype
        E, init = config.num_experts, nnx.initializers.normal(std)
        shape = (E, size_in, size_out)
        self.kernel = nnx.Param(init(rngs.params(), shape, self.param_dtype))
        self.has_bias = bias
        if bias:
            self.bias = nnx.Param(jnp.zeros((E, size_out), self.param_dtype))

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


class Router(nnx.Module):
    """Chooses each token's experts, in float32 or wider whatever the model's dtype.

    Rounded to bfloat16, the softmax makes training unstable: Fedus et al. 2021 (Switch
    Transformers, arXiv:2101.03961), section 2.4. With ``sigmoid_router`` an expert's
    score is a sigmoid of its logit, not a softmax over all, and a correction is added
    to it for the choice alone. Groups are ranked by the sum of their best two.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        E, dtype = config.num_experts, config.param_dtype
        init = nnx.initializers.normal(0.02)
        self.config = config
        self.kernel = nnx.Param(init(rngs.params(), (config.width, E), dtype))
        if config.expert_bias:
            self.bias = nnx.Param(jnp.zeros(E, dtype))
        if config.sigmoid_router:  # a statistic of the load: it has no gradient
            self.correction = nnx.BatchStat(jnp.zeros(E, jnp.float32))
            self.tokens = jshard.nn.StepSum(jnp.zeros(E, jnp.int32))

    def __call__(self, x_ND: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns experts' weights and numbers, (N, K), and probabilities, (N, E)."""
        config, wide = self.config, jnp.promote_types(x_ND.dtype, jnp.float32)
        K = config.experts_per_token
        kernel = self.kernel.get_value().astype(wide)
        # GPUs would otherwise round the factors to TF32.
        logits_NE = jnp.dot(x_ND.astype(wide), kernel, precision=lax.Precision.HIGHEST)
        if config.expert_bias:
            logits_NE += self.bias.get_value().astype(wide)
        if config.sigmoid_router:
            score_NE = jax.nn.sigmoid(logits_NE)
            ranked_NE = self._within_groups(score_NE + self.correction.get_value())
            expert_NK = lax.top_k(ranked_NE, K)[1]
            weight_NK = jnp.take_along_axis(score_NE, expert_NK, axis=1)
            probability_NE = score_NE / jnp.sum(score_NE, axis=1, keepdims=True)
        else:
            probability_NE = jax.nn.softmax(logits_NE)
            weight_NK, expert_NK = lax.top_k(probability_NE, K)
        if config.normalized_experts:
            weight_NK /= jnp.sum(weight_NK, axis=1, keepdims=True)
        return config.expert_scale * weight_NK, expert_NK, probability_NE

    def _within_groups(self, ranked_NE: jax.Array) -> jax.Array:
        """Returns what experts are ranked by, -inf outside of the chosen groups."""
        groups, chosen = self.config.expert_groups, self.config.chosen_groups
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

    With ``expert_bias`` the experts have biases, and the columns of gate and up
    alternate in one kernel. ``expert_limit`` bounds the gate from above, and up, to
    which 1 is added, on both sides.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        E, D, F = config.num_experts, config.width, config.hidden
        self.config, self.activation = config, ACTIVATIONS[config.activation]
        self.router = Router(config, rngs=rngs)
        if config.expert_bias:
            self.gate_up = Experts(config, D, 2 * F, rngs, bias=True)
            self.down_bias = nnx.Param(jnp.zeros((E, D), config.param_dtype))
        else:
            self.gate = Experts(config, D, F, rngs)
            self.up = Experts(config, D, F, rngs)
        self.down = Experts(config, F, D, rngs, residual_std(config))

    @property
    def expert_split(self) -> tuple[str, ...]:
        """The experts; the bias of what they return is added to their weighted sum."""
        if self.config.expert_bias:
            return ("gate_up", "down")
        return ("gate", "up", "down")

    @property
    def tensor_split(self) -> jshard.nn.Split:
        """The experts' hidden features."""
        config, columns = self.config, self.expert_split[:-1]
        # Their pairs of columns.
        counts = {"hidden": config.hidden} if config.expert_bias else {}
        return jshard.nn.Split(columns=columns, rows=("down",), counts=counts)

    def __call__(
        self, x_BTD: jax.Array, counted_BT: jax.Array | None = None
    ) -> tuple[jax.Array, Load]:
        """Returns the experts' weighted outputs, (B, T, D), and the router's load.

        Args:
          x_BTD: tokens.
          counted_BT: bool, which of them are in the load; None is all.
        """
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        N, K = len(x_ND), self.config.experts_per_token
        weight_NK, expert_NK, probability_NE = self.router(x_ND)
        load = _load(expert_NK, probability_NE, counted_BT)

        tokens = x_BTD.shape[:2]
        chosen_BTK = (x.reshape(*tokens, K) for x in (weight_NK, expert_NK))
        y_BTD = jshard.nn.tensor_parallel(
            self._weighted, x_BTD, *chosen_BTK, tokens=("weight_BTK", "expert_BTK")
        )
        if self.config.expert_bias:
            weight_NE = jnp.zeros_like(probability_NE)
            rows_N1 = jnp.arange(N)[:, None]
            weight_NE = weight_NE.at[rows_N1, expert_NK].set(
                weight_NK, unique_indices=True
            )
            bias_ED = self.down_bias.get_value().astype(y_BTD.dtype)
            bias_ND = weight_NE.astype(y_BTD.dtype) @ bias_ED
            y_BTD += bias_ND.reshape(y_BTD.shape)
        return y_BTD, load

    def _weighted(
        self, x_BTD: jax.Array, weight_BTK: jax.Array, expert_BTK: jax.Array
    ) -> jax.Array:
        """Returns the weighted sum of what each token's experts return, (B, T, D)."""
        K, D = self.config.experts_per_token, x_BTD.shape[-1]
        x_ND, expert_NK = x_BTD.reshape(-1, D), expert_BTK.reshape(-1, K)
        modules = tuple(getattr(self, name) for name in self.expert_split)
        y_ND = on_experts(
            self._mlp,
            modules,
            x_ND,
            expert_NK,
            weight_BTK.reshape(-1, K),
            self.config.num_experts,
            self.config.expert_capacity,
        )
        return y_ND.reshape(x_BTD.shape)

    def _mlp(
        self,
        modules: Any,
        x: jax.Array,
        tokens_E: jax.Array | None,
        weight: jax.Array | None,
    ) -> jax.Array:
        (*inner, down), limit = modules, self.config.expert_limit
        hidden = [checkpoint_name(layer(x, tokens_E), "hidden") for layer in inner]
        if self.config.expert_bias:
            hidden = [hidden[0][..., ::2], hidden[0][..., 1::2]]
        gate, up = hidden
        if limit:
            gate = jnp.minimum(gate, limit)
            up = jnp.clip(up, -limit, limit) + 1
        hidden = self.activation(gate) * up
        if weight is not None:
            hidden *= weight[..., None].astype(hidden.dtype)
        return down(hidden, tokens_E)


def _load(
    expert_NK: jax.Array, probability_NE: jax.Array, counted_BT: jax.Array | None
) -> Load:
    E = probability_NE.shape[1]
    if counted_BT is not None:
        counted_N1 = counted_BT.reshape(-1, 1)
        expert_NK = jnp.where(counted_N1, expert_NK, E)  # which bincount leaves out
        probability_NE = jnp.where(counted_N1, probability_NE, 0)
    tokens_E = jnp.bincount(expert_NK.reshape(-1), length=E)
    return Load(tokens_E, jnp.sum(probability_NE, axis=0))


def without_padding(
    weights_BT: jax.Array, segment_ids_BT: jax.Array | None = None
) -> jax.Array:
    """Returns which tokens a loss with these weights depends on, (B, T) bool.

    Those are the tokens whose target, or a later one of their document, has a weight: a
    prompt's as well as an answer's, but no padding.

    Args:
      weights_BT: the weights of this device's targets.
      segment_ids_BT: the documents of its tokens, runs of equal ids; None is one a row.
    """
    has_weight_BS = jshard.nn.whole_sequences(weights_BT != 0)
    S = has_weight_BS.shape[1]
    place_BS = jnp.where(has_weight_BS, jnp.arange(S), S)
    next_BS = lax.cummin(place_BS, axis=1, reverse=True)
    counted_BS = next_BS < S
    if segment_ids_BT is not None:
        document_BS = jshard.nn.documents(jshard.nn.whole_sequences(segment_ids_BT))
        of_next_BS = jnp.take_along_axis(document_BS, next_BS, axis=1, mode="clip")
        counted_BS &= of_next_BS == document_BS
    return counted_BS[:, jshard.nn.positions(weights_BT.shape[1])]


def load_balancing_loss(load: Load, tokens: jax.Array | int) -> jshard.Mean:
    """Returns E times the sum over experts of chosen times probable tokens.

    Equation 4 of Fedus et al. 2021 (arXiv:2101.03961), a mean over layers; with K
    experts a token it is K if all are used alike, as in Hugging Face's Mixtral. Its
    statistics are those of the global batch, or with accumulation of a micro-batch.

    Args:
      load: of all layers: each array has a first axis of layers.
      tokens: how many of this device's tokens are in it.
    """
    E, dtype = load.tokens_E.shape[-1], load.probability_E.dtype
    counts = load.tokens_E.astype(dtype), jnp.asarray(tokens, dtype)
    chosen_LE, of_all = lax.stop_gradient(jshard.pmean(counts))
    chosen_LE /= jnp.where(of_all > 0, of_all, 1)
    total = E * jnp.mean(jnp.sum(chosen_LE * load.probability_E, axis=-1))
    return jshard.Mean(total, tokens)


def correct(router: Router, load: Load, rate: float) -> None:
    """Moves experts' corrections towards an even load, once per step.

    Algorithm 1 of Wang et al. 2024 (arXiv:2408.15664): those with fewer tokens than the
    mean gain ``rate``, those with more lose it. The tokens are those of the whole step,
    without padding, counted in integers, so that corrections are the same on every mesh
    and with any number of micro-batches.

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
