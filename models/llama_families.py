"""The decoder families of transformers, and what distinguishes them.

The keys of config.json and their defaults are those of transformers' configuration_*.py
(4.57 and 5.24), which differ in how they spell rotary positions
(models/rope_huggingface.py). models/llama_config_json.py reads them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Family(NamedTuple):
    """What distinguishes one architecture from the others.

    Attributes:
      model_type: transformers' name of its config class.
      model: our keys of what is true of every such model.
      defaults: config.json's keys that may be missing, where not as in Llama's.
      reads: keys that transformers reads of it, and not of all.
      not_null: keys that may be null in others, and not here.
    """

    model_type: str
    model: Mapping[str, Any]
    defaults: Mapping[str, Any]
    reads: tuple[str, ...] = ()
    not_null: tuple[str, ...] = ()


DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_key_value_heads": None,  # as many as heads
    "head_dim": None,  # the heads' part of the width
    "rope_theta": 10000.0,
    "sliding_window": None,
}
_GEMMA = {
    "norm_offset": True,
    "post_norms": True,
    "scaled_embeddings": True,
}
_GEMMA_DEFAULTS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "sliding_window": 4096,
    "num_key_value_heads": 4,
}
_GEMMA_READS = (
    "attention_bias",
    "layer_types",
    "query_pre_attn_scalar",
    "final_logit_softcapping",
    "use_bidirectional_attention",
)
_QWEN_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
}
_QWEN_WINDOWS = ("use_sliding_window", "max_window_layers", "layer_types")
_GROUPED_EXPERTS = """
    moe_intermediate_size n_routed_experts num_experts_per_tok n_shared_experts
    routed_scaling_factor n_group topk_group first_k_dense_replace norm_topk_prob
    """.split()
_LATENTS = (
    "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim".split()
)
_OLMO = {
    "qk_norm": True,
    "joint_qk_norm": True,
    "pre_norms": False,
    "post_norms": True,
}
_OLMO_DEFAULTS = {"rms_norm_eps": 1e-5}
FAMILIES = {
    "LlamaForCausalLM": Family("llama", {}, {}, ("attention_bias", "mlp_bias")),
    "MistralForCausalLM": Family(
        "mistral",
        {},
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        not_null=("num_key_value_heads",),
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2", {"qkv_bias": True}, _QWEN_DEFAULTS, _QWEN_WINDOWS, ("head_dim",)
    ),
    "Olmo2ForCausalLM": Family("olmo2", _OLMO, _OLMO_DEFAULTS, ("attention_bias",)),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        _OLMO,
        {**_OLMO_DEFAULTS, "rope_theta": 5e5, "sliding_window": 4096},
        ("attention_bias", "layer_types"),
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        {"fused": True},
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        ("original_max_position_embeddings",),
        ("head_dim",),
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        {"qk_norm": True},
        {**_QWEN_DEFAULTS, "head_dim": 128},
        ("attention_bias", *_QWEN_WINDOWS),
        ("head_dim",),
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        _GEMMA,
        {**_GEMMA_DEFAULTS, "max_position_embeddings": 8192},
        (*_GEMMA_READS, "attn_logit_softcapping"),
        ("head_dim", "num_key_value_heads"),
    ),
    # transformers keeps its attn_logit_softcapping and does not use it.
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        {**_GEMMA, "qk_norm": True},
        {**_GEMMA_DEFAULTS, "max_position_embeddings": 131072, "rope_theta": 1e6},
        (*_GEMMA_READS, "sliding_window_pattern", "rope_local_base_freq"),
        ("head_dim", "num_key_value_heads"),
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        {"sigmoid_router": True},
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
        },
        ("attention_bias", "use_qk_norm", *_GROUPED_EXPERTS),
        ("head_dim", "num_key_value_heads"),
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3",
        {"sigmoid_router": True},
        {"max_position_embeddings": 4096},
        (*_GROUPED_EXPERTS, *_LATENTS),
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        {
            "sinks": True,
            "expert_bias": True,
            "expert_limit": 7.0,
            "activation": "quick_gelu",
        },
        {
            "attention_bias": True,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
        },
        ("attention_bias", "layer_types", "num_local_experts", "num_experts_per_tok"),
        ("head_dim", "num_key_value_heads"),
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        {},
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        ("num_local_experts", "num_experts_per_tok"),
        ("num_key_value_heads",),
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        {"qk_norm": True},
        {**_QWEN_DEFAULTS, "num_key_value_heads": 4},
        (
            "attention_bias",
            "use_sliding_window",
            "moe_intermediate_size",
            "num_local_experts",
            "num_experts_per_tok",
            "norm_topk_prob",
        ),
        ("head_dim", "num_key_value_heads"),
    ),
}
