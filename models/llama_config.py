"""Sizes and details of the decoders in models/llama.py."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jshard.models.layers import check, check_known
from jshard.models.rope import SCALINGS, Rope

ACTIVATIONS = {
    "silu": jax.nn.silu,  # SwiGLU (Shazeer 2020, arXiv:2002.05202, section 2)
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),  # GEGLU, likewise
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}

# What is for experts alone, and for ordinary attention alone.
_OF_EXPERTS = (
    *("expert_bias", "expert_limit", "sigmoid_router", "correction_rate"),
    *("expert_groups", "chosen_groups", "shared_hidden", "dense_layers"),
)
_NOT_OF_LATENTS = ("sinks", "qk_norm", "qkv_bias", "out_bias", "fused")


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes and details of a decoder; the defaults are those of Llama 2 7B.

    A number that may be absent is 0 then.

    Attributes:
      vocab_size: V, number of tokens.
      sequence_length: T in training; the model itself takes any.
      num_layers: L, number of blocks.
      num_heads: N, heads of the queries.
      num_kv_heads: K, heads of keys and values; each serves N / K query heads.
      width: D.
      hidden: F, width of the gated MLP, or of each expert's.
      rope_theta: base of the rotary wavelengths.
      norm_eps: added to the mean square in RMSNorm.
      tied: whether the head is the transposed embedding.
      loss_chunk: tokens per device whose logits exist at a time in the loss.
      label_smoothing: of the targets of the loss, as in ``jshard.nn.cross_entropy``.
      z_loss: likewise.
      neftune_alpha: of the noise on embeddings in training (``nn/dropout.py``); 0 is
        none.
      mlp_tile: tokens per device whose hidden activations exist at a time; 0 is all.
      attention: "auto", "cudnn", "blockwise" or "xla" of
        ``jshard.nn.dot_product_attention``.
      dtype: of the computation; None is that of the parameters, or what a policy says.
      param_dtype: of the parameters.
      head_width: H; 0 is D / N.
      context_length: the longest text that the model is meant for; 0 is
        ``sequence_length``.
      rope_scaling: "none", "linear", "llama3" or "yarn"; with ``rope_factor``,
        ``rope_low``, ``rope_high``, ``rope_length``, ``rope_attention_factor``,
        ``rope_truncate`` and ``rope_mscale`` (models/rope.py).
      rotary_width: the first dimensions of a head, which alone are rotated (GLM 4.5);
        0 is H.
      kv_rank: width of the latents that keys and values are projections of, as in
        DeepSeek-V3 (models/latent_attention.py); the last ``rotary_width`` dimensions
        of a head are rotated then. 0 is ordinary attention.
      q_rank: the same of queries; 0 is none.
      value_width: width of a head's values with ``kv_rank``, at most H.
      qkv_bias: whether queries, keys and values have biases, as in Qwen 2.5
        (arXiv:2412.15115, section 2).
      out_bias: whether the attention's output projection has one.
      fused: whether queries, keys and values are one projection, and the MLP's gate and
        up another, as in Phi-3 (arXiv:2404.14219).
      qk_norm: whether each head's queries and keys are normalised before rotation, as
        in Qwen 3 (arXiv:2505.09388, section 2) and Gemma 3 (arXiv:2503.19786, 2).
      joint_qk_norm: whether ``qk_norm`` is over all heads together, as in OLMo 2
        (arXiv:2501.00656, section 2).
      pattern: repeated over the layers, "f" for full attention and "s" for a sliding
        window: "s" is Mistral, "sf" Gemma 2, "sssf" OLMo 3, "sssssf" Gemma 3.
      window: positions that a layer "s" attends to, its own included (Mistral,
        arXiv:2310.06825, section 2).
      sliding_theta: ``rope_theta`` of layers "s", which have no scaling then; 0 is that
        of the others (Gemma 3, OLMo 3).
      sinks: whether each head has a score for attending to nothing (gpt-oss,
        arXiv:2508.10925, section 2.1).
      attention_scale: scores are divided by its root, Gemma's query_pre_attn_scalar;
        0 is H.
      attention_soft_cap: c in ``c tanh(score / c)``, 0 for none (Gemma 2,
        arXiv:2408.00118, section 2).
      logit_soft_cap: the same for logits.
      activation: "silu", "gelu_tanh" or "quick_gelu".
      norm_offset: whether norms multiply with 1 + their scale, which starts at 0
        (Gemma's reference code).
      pre_norms: whether a branch's input is normalised; not in OLMo 2.
      post_norms: whether a branch's output is normalised (Gemma 2, section 2).
      scaled_embeddings: whether embeddings are multiplied by the root of D (Gemma).
      num_experts: experts of the MLP; 0 is an ordinary MLP (models/moe.py).
      experts_per_token: how many of them each token takes.
      normalized_experts: whether the weights of a token's experts sum to 1.
      expert_bias: whether router and experts have biases, and the columns of gate and
        up alternate in one kernel, as in gpt-oss.
      expert_limit: bound of an expert's gate and up, and 1 is added to up, as in
        gpt-oss; 0 for neither.
      sigmoid_router: whether an expert's score is a sigmoid, with a correction for the
        choice (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
      correction_rate: step of that correction in training, towards an even load of the
        experts (Wang et al. 2024, arXiv:2408.15664); 0 leaves it as it is.
      expert_groups: of neighbouring experts; a token's are in the best
        ``chosen_groups`` of them.
      chosen_groups: see ``expert_groups``.
      expert_scale: what the weights of a token's experts are multiplied with.
      shared_hidden: width of an MLP of all tokens beside the experts; 0 is none.
      dense_layers: layers before those with experts, a Stack of their own.
      dense_hidden: width of their MLP.
      balance_weight: weight of the load-balancing loss in ``loss``; 0 leaves it out.
      expert_capacity: where experts are split over devices, the rows that the first
        round of an exchange carries, as a multiple of an even share. Further rounds
        carry what exceeds it; results do not depend on it.
      max_segments: the most documents that a packed row holds, for cuDNN's attention.
    """

    vocab_size: int = 32000
    sequence_length: int = 4096
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 32
    width: int = 4096
    hidden: int = 11008
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = False
    loss_chunk: int = 1024
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    neftune_alpha: float = 0.0
    mlp_tile: int = 0
    attention: str = "auto"
    dtype: Any = None
    param_dtype: Any = jnp.float32
    head_width: int = 0
    context_length: int = 0
    rope_scaling: str = "none"
    rope_factor: float = 1.0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_length: int = 8192
    rope_attention_factor: float = 0.0
    rope_truncate: bool = True
    rope_mscale: float = 0.0
    rotary_width: int = 0
    kv_rank: int = 0
    q_rank: int = 0
    value_width: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    fused: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    pattern: str = "f"
    window: int = 0
    sliding_theta: float = 0.0
    sinks: bool = False
    attention_scale: float = 0.0
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    activation: str = "silu"
    norm_offset: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    scaled_embeddings: bool = False
    num_experts: int = 0
    experts_per_token: int = 2
    normalized_experts: bool = True
    expert_bias: bool = False
    expert_limit: float = 0.0
    sigmoid_router: bool = False
    correction_rate: float = 0.0
    expert_groups: int = 1
    chosen_groups: int = 1
    expert_scale: float = 1.0
    shared_hidden: int = 0
    dense_layers: int = 0
    dense_hidden: int = 0
    balance_weight: float = 0.0
    expert_capacity: float = 1.25
    max_segments: int = 0

    def __post_init__(self):
        check(
            bool(self.head_width) or self.width % (2 * self.num_heads) == 0,
            f"width={self.width} divided by num_heads={self.num_heads} must be an even "
            "integer",
        )
        check(self.H % 2 == 0, f"head_width={self.head_width} must be even")
        check(
            self.R % 2 == 0 and self.R <= self.H,
            f"rotary_width={self.rotary_width} must be even, and at most the width of "
            f"a head, {self.H}",
        )
        check(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads={self.num_heads} is not divisible by num_kv_heads="
            f"{self.num_kv_heads}",
        )
        check(
            bool(self.pattern) and set(self.pattern) <= set("fs"),
            f"pattern={self.pattern!r} must consist of 'f' (full attention) and 's' "
            "(sliding window)",
        )
        check(
            "s" not in self.pattern or self.window > 0,
            f"pattern={self.pattern!r} needs a window of at least 1",
        )
        check_known("rope_scaling", self.rope_scaling, SCALINGS)
        check_known("activation", self.activation, ACTIVATIONS)
        check(
            not self.joint_qk_norm or (self.qk_norm and not self.fused),
            "joint_qk_norm=True needs qk_norm=True and fused=False",
        )
        check(
            self.pre_norms or self.post_norms, "pre_norms=False needs post_norms=True"
        )
        if self.kv_rank:
            given = self._given(_NOT_OF_LATENTS)
            check(not given, f"kv_rank={self.kv_rank} is without {given}")
            check(
                0 < self.value_width <= self.H
                and 0 < self.rotary_width < self.H
                and self.num_kv_heads == self.num_heads
                and set(self.pattern) == {"f"},
                f"kv_rank={self.kv_rank} needs rotary_width and value_width up to the "
                f"width of a head, {self.H}, num_kv_heads=num_heads, pattern=f",
            )
        else:
            given = self._given(("q_rank", "value_width"))
            check(not given, f"{given} needs kv_rank")
        check(
            self.expert_capacity > 0,
            f"expert_capacity={self.expert_capacity} must be above 0",
        )
        if self.num_experts:
            self._check_experts()
        else:
            given = self._given(_OF_EXPERTS)
            check(not given, f"{given} needs num_experts")

    def _check_experts(self) -> None:
        check(not self.fused, "fused=True is for an ordinary MLP: set num_experts=0")
        check(
            0 < self.experts_per_token <= self.num_experts,
            f"experts_per_token={self.experts_per_token} must be between 1 and "
            f"num_experts={self.num_experts}",
        )
        groups, chosen = self.expert_groups, self.chosen_groups
        per_group, rest = divmod(self.num_experts, groups)
        check(
            0 < chosen <= groups and (groups == 1 or (per_group >= 2 and not rest)),
            f"expert_groups={groups} must divide num_experts={self.num_experts} into "
            f"groups of two or more, of which chosen_groups={chosen} are taken",
        )
        check(
            groups == 1 or chosen * per_group >= self.experts_per_token,
            f"chosen_groups={chosen} have {chosen * per_group} experts, fewer than "
            f"experts_per_token={self.experts_per_token}",
        )
        if not self.sigmoid_router:
            check(groups == 1, "expert_groups needs sigmoid_router=True")
            check(not self.correction_rate, "correction_rate needs sigmoid_router=True")
        check(
            not self.dense_layers
            or (self.dense_hidden > 0 and self.dense_layers < self.num_layers),
            f"dense_layers={self.dense_layers} needs dense_hidden and more layers than "
            "these",
        )

    def _given(self, names: tuple[str, ...]) -> str:
        """Returns the first of some fields that is not as by default; "" if none."""
        given = (
            f"{x.name}={value!r}"
            for x in dataclasses.fields(self)
            if x.name in names and (value := getattr(self, x.name)) != x.default
        )
        return next(given, "")

    @property
    def H(self) -> int:
        """The width of a head."""
        return self.head_width or self.width // self.num_heads

    @property
    def R(self) -> int:
        """The dimensions of a head that are rotated."""
        return self.rotary_width or self.H

    @property
    def dense(self) -> "LlamaConfig":
        """The same without experts, of the first layers."""
        none = {
            x.name: x.default for x in dataclasses.fields(self) if x.name in _OF_EXPERTS
        }
        return dataclasses.replace(
            self, num_experts=0, hidden=self.dense_hidden, **none
        )

    @property
    def sliding_layers(self) -> tuple[bool, ...]:
        """Whether each layer has a sliding window."""
        return tuple(
            self.pattern[i % len(self.pattern)] == "s" for i in range(self.num_layers)
        )

    @property
    def rope(self) -> Rope:
        """The rotation of layers with full attention."""
        return Rope(*(getattr(self, f"rope_{name}") for name in Rope._fields))
