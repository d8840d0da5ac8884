"""What a config.json says of a decoder in models/llama.py, for all its families."""

import dataclasses
from typing import Any

from jshard.models.huggingface_config import (
    COUNT,
    FLAG,
    INTEGER,
    NUMBER,
    POSITIVE,
    ConfigJson,
    Json,
    Kind,
    one_of,
)
from jshard.models.llama_config import LlamaConfig
from jshard.models.llama_families import DEFAULTS, FAMILIES, Family
from jshard.models.rope import SCALINGS
from jshard.models.rope_huggingface import read_rope, read_two_ropes

# What config.json does not decide.
_OF_TRAINING = """
    loss_chunk attention dtype param_dtype balance_weight correction_rate
    expert_capacity max_segments label_smoothing z_loss neftune_alpha
    """.split()
_LETTERS = {"full_attention": "f", "sliding_attention": "s"}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# What changes nothing in transformers, of training or of generation: it reads none of
# the other families' keys, either.
_INERT = set(
    """
    attention_dropout attn_logit_softcapping aux_loss_alpha cache_implementation
    embd_pdrop ep_size experts_per_token hidden_act hidden_activation
    initial_context_length intermediate_size max_window_layers num_mtp_layers
    num_nextn_predict_layers output_router_logits pretraining_tp resid_pdrop
    router_aux_loss_coef router_jitter_noise seq_aux sliding_window_size
    _sliding_window_pattern
    """.split()
)
_INERT |= {key for family in FAMILIES.values() for key in family.reads}
_INERT -= {"original_max_position_embeddings"}
# Of the first releases of Llama; of folders without a class; and of models without a
# head, which is the embedding where the two are tied.
_ALSO = {"LLaMAForCausalLM": "LlamaForCausalLM"}
_ALSO |= {family.model_type: name for name, family in FAMILIES.items()}
_ALSO |= {name.replace("ForCausalLM", "Model"): name for name in FAMILIES}
_ALSO["Gemma3TextModel"] = "Gemma3ForCausalLM"


def read_config(json: Json) -> dict[str, Any]:
    """Returns the keys of ``LlamaConfig`` that a config.json decides.

    Raises:
      UserError: the architecture, or a feature of it, is not there; or a key is
        missing, unknown or of a wrong type.
    """
    config = ConfigJson.of(json, FAMILIES, also=_ALSO)
    family = FAMILIES[config.name]
    defaults = {**DEFAULTS, **family.defaults}

    def get(key: str, kind: Kind) -> Any:
        nullable = defaults[key] is None or key in _NULLABLE
        nullable = nullable and key not in family.not_null
        return config.get(key, defaults[key], kind.or_null if nullable else kind)

    def flag(key: str) -> bool:
        return key in family.reads and config.get(key, defaults.get(key, False), FLAG)

    _refuse_missing(config, family)
    width, heads = (
        config.need(key, COUNT) for key in ("hidden_size", "num_attention_heads")
    )
    gemma, moe = "norm_offset" in family.model, "num_experts_per_tok" in family.reads
    context = get("max_position_embeddings", COUNT)
    layers = config.need("num_hidden_layers", COUNT)
    window = get("sliding_window", COUNT)
    pattern = _read_pattern(config, family, layers, window)
    head_width = get("head_dim", COUNT) or 0
    latents = "kv_lora_rank" in family.reads
    key, activation = "hidden_act", "silu"
    if gemma:
        key, activation = "hidden_activation", "gelu_pytorch_tanh"
    activation = config.get(key, activation, one_of(ACTIVATIONS))
    # transformers takes any scaling of Phi-3 for longrope.
    scalings = () if "fused" in family.model else SCALINGS[1:]
    two_ropes = family.model_type in ("gemma3_text", "olmo3")
    rope = read_two_ropes if two_ropes else read_rope
    of_experts = "moe_intermediate_size" in family.reads
    hidden = "moe_intermediate_size" if of_experts else "intermediate_size"
    hidden = config.need(hidden, COUNT)
    bias = flag("attention_bias")
    model = {
        field.name: field.default
        for field in dataclasses.fields(LlamaConfig)
        if field.name not in _OF_TRAINING
    }
    model |= {
        "vocab_size": config.need("vocab_size", COUNT),
        "sequence_length": context,
        "context_length": context,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": get("num_key_value_heads", COUNT) or heads,
        "width": width,
        "hidden": hidden,
        "head_width": 0 if head_width * heads == width else head_width,
        "norm_eps": float(get("rms_norm_eps", NUMBER)),
        "tied": get("tie_word_embeddings", FLAG),
        "qkv_bias": bias,
        "qk_norm": flag("use_qk_norm"),
        "out_bias": bias and family.model_type != "glm4_moe",
        "pattern": pattern,
        "window": window if "s" in pattern else 0,
        **rope(
            config,
            theta=get("rope_theta", POSITIVE),
            context=context,
            scalings=scalings,
        ),
        "activation": ACTIVATIONS[activation],
        **family.model,
    }
    if latents:
        model |= _read_latents(config, width, heads)
    if (part := model.pop("rotary_part", 1.0)) != 1:
        model["rotary_width"] = int(part * (head_width or width // heads))
    if gemma:
        model |= _read_gemma(config, family)
    if "n_group" in family.reads:
        missing = _GROUPED_EXPERTS[family.model_type]
        model |= _read_grouped_experts(config, hidden, layers, missing)
    elif moe:
        model |= _read_experts(config, family)
    # Phi-3's is of longrope. That of others is above their rope_parameters' in 5.23.
    longrope = {"original_max_position_embeddings"} & set(family.reads)
    config.finish(_INERT | longrope)
    return model


# Where they have a default, null means none: no window, all heads.
_NULLABLE = ("num_key_value_heads", "sliding_window")


def _refuse_missing(config: ConfigJson, family: Family) -> None:
    """Raises a UserError for what models/llama.py has not."""
    if "mlp_bias" in family.reads:
        config.fix("mlp_bias", [False])
    if "use_bidirectional_attention" in family.reads:
        config.fix("use_bidirectional_attention", [False, None])
    if family.model_type == "phi3":
        config.fix("partial_rotary_factor", [1, 1.0])
    if family.model_type == "qwen3_moe":
        config.fix("decoder_sparse_step", [1])
        config.fix("mlp_only_layers", [[], None])
    if family.model_type == "gpt_oss":
        config.fix("swiglu_alpha", [1.702])
        config.fix("swiglu_limit", [7, 7.0])


def _read_gemma(config: ConfigJson, family: Family) -> dict[str, float]:
    """Returns the scale and the soft caps; null is no cap."""
    caps = {"attention_soft_cap": 0.0}
    if "attn_logit_softcapping" in family.reads:
        cap = config.get("attn_logit_softcapping", 50.0, POSITIVE.or_null)
        caps["attention_soft_cap"] = float(cap or 0)
    cap = 30.0 if family.model_type == "gemma2" else None
    cap = config.get("final_logit_softcapping", cap, POSITIVE.or_null)
    scale = config.get("query_pre_attn_scalar", 256, POSITIVE)
    return {
        **caps, "logit_soft_cap": float(cap or 0), "attention_scale": float(scale)
    }  # fmt: skip


# How many there are, and how many a token takes.
_EXPERTS = {"mixtral": (8, 2), "qwen3_moe": (128, 8), "gpt_oss": (128, 4)}


# n_routed_experts, n_group, topk_group, routed_scaling_factor, first_k_dense_replace
_GROUPED_EXPERTS = {
    "glm4_moe": (128, 1, 1, 1.0, 1),
    "deepseek_v3": (256, 8, 4, 2.5, 3),
}


def _read_latents(config: ConfigJson, width: int, heads: int) -> dict[str, Any]:
    """Returns the sizes of DeepSeek's attention."""
    if heads != 128:  # transformers' number of a missing one
        config.need("num_key_value_heads", one_of([None, heads]))
    config.fix("attention_bias", [False])
    config.fix("rope_interleave", [True])
    # Of DeepSeek's own code; transformers does it so whatever they are.
    config.fix("moe_layer_freq", [1])
    config.fix("scoring_func", ["sigmoid"])
    config.fix("topk_method", ["noaux_tc"])
    rotated = config.get("qk_rope_head_dim", 64, COUNT)
    head_width = config.get("qk_nope_head_dim", 128, COUNT) + rotated
    config.fix("qk_head_dim", [None, head_width])
    return {
        "kv_rank": config.get("kv_lora_rank", 512, COUNT),
        "q_rank": config.get("q_lora_rank", 1536, COUNT.or_null) or 0,
        "value_width": config.get("v_head_dim", 128, COUNT),
        "rotary_width": rotated,
        "head_width": 0 if head_width * heads == width else head_width,
        "num_kv_heads": heads,
    }


def _read_grouped_experts(
    config: ConfigJson, hidden: int, layers: int, missing: tuple
) -> dict[str, Any]:
    """Returns the same of groups of experts beside a shared one, after dense layers."""
    experts, groups, chosen, scale, dense = missing
    experts = config.get("n_routed_experts", experts, COUNT)
    config.fix("num_local_experts", [experts])
    dense = config.get("first_k_dense_replace", dense, INTEGER)
    if dense >= layers:
        raise config.error("first_k_dense_replace", "no layer has experts")
    return {
        "num_experts": experts,
        "experts_per_token": config.get("num_experts_per_tok", 8, COUNT),
        "normalized_experts": config.get("norm_topk_prob", True, FLAG),
        "expert_groups": config.get("n_group", groups, COUNT),
        "chosen_groups": config.get("topk_group", chosen, COUNT),
        "expert_scale": float(config.get("routed_scaling_factor", scale, POSITIVE)),
        "shared_hidden": hidden * config.get("n_shared_experts", 1, COUNT),
        "dense_layers": dense,
        "dense_hidden": config.need("intermediate_size", COUNT),
    }


def _read_experts(config: ConfigJson, family: Family) -> dict[str, Any]:
    """Returns how many experts there are, and how they are chosen and weighted."""
    qwen = family.model_type == "qwen3_moe"
    if qwen:  # of layers without experts, which there are not
        config.get("intermediate_size", None, COUNT)
    number = config.get("num_experts", None, COUNT)
    default, taken = _EXPERTS[family.model_type]
    experts = config.get("num_local_experts", number or default, COUNT)
    if number not in (None, experts):  # one is another name of the other
        raise config.error("num_experts", f"num_local_experts is {experts}")
    normalized = config.get("norm_topk_prob", False, FLAG) if qwen else True
    return {
        "num_experts": experts,
        "experts_per_token": config.get("num_experts_per_tok", taken, COUNT),
        "normalized_experts": normalized,
    }


def _read_pattern(
    config: ConfigJson, family: Family, layers: int, window: int | None
) -> str:
    """Returns the shortest pattern of the layers' kinds of attention."""
    if family.model_type in ("llama", "olmo2"):  # transformers' have no windows
        window = None
    if "use_sliding_window" in family.reads:
        window = window if config.get("use_sliding_window", False, FLAG) else None
    if "layer_types" not in family.reads:  # transformers may write them
        kind = "sliding_attention" if window else "full_attention"
        config.fix("layer_types", [None, [kind] * layers])
        return _LETTERS[kind]
    kinds = config.get("layer_types", None, _layer_types(layers).or_null)
    if "max_window_layers" in family.reads:
        full = min(config.get("max_window_layers", 28, INTEGER), layers)
        full = full if window else layers
        letters = "f" * full + "s" * (layers - full)
    else:
        every = 2
        if family.model_type == "olmo3":
            every = 4
        elif "sliding_window_pattern" in family.reads:
            every = config.get("sliding_window_pattern", 6, COUNT)
        letters = "".join("s" if (i + 1) % every else "f" for i in range(layers))
    if kinds is not None:
        letters = "".join(_LETTERS[kind] for kind in kinds)
    if "s" in letters and not window:
        raise config.error("sliding_window", "layers with a window need it")
    for period in range(1, layers):
        if all(letter == letters[i % period] for i, letter in enumerate(letters)):
            return letters[:period]
    return letters


def _layer_types(layers: int) -> Kind:
    def fits(x: Any) -> bool:
        known = isinstance(x, list) and all(type(kind) is str for kind in x)
        return known and len(x) == layers and set(x) <= set(_LETTERS)

    return Kind(f"a list of {layers} of {', '.join(_LETTERS)}", fits)
