"""The decoder family in Hugging Face's folders: config.json and tensor names.

The names of tensors are the same in transformers 4.57 and 5.23.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jshard
from jshard.hub.file_tensor import FileTensor
from jshard.models.llama_config import LlamaConfig
from jshard.models.llama_config_json import ACTIVATIONS, read_config
from jshard.models.llama_families import FAMILIES
from jshard.models.rope_huggingface import write_rope

__all__ = ["read_config", "tensors", "write_config"]


def write_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a config.json for a model."""
    config = _config(model)
    name = _architecture(config)
    family = FAMILIES[name]
    activations = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    context = config.context_length or config.sequence_length
    gemma = config.norm_offset
    json = {
        "architectures": [name],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": context,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.H,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "hidden_activation" if gemma else "hidden_act": activations[config.activation],
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.out_bias,
        "sliding_window": config.window or None,
        **write_rope(config, two=config.sliding_theta > 0),
    }
    if "layer_types" in family.reads:
        sliding = ("full_attention", "sliding_attention")
        json["layer_types"] = [sliding[s] for s in config.sliding_layers]
    if family.model_type.startswith("qwen"):
        json["use_sliding_window"] = config.window > 0
    if "rope_local_base_freq" in family.reads:
        json["rope_local_base_freq"] = config.sliding_theta or config.rope_theta
    if gemma:
        json["query_pre_attn_scalar"] = config.attention_scale or config.H
        json["attn_logit_softcapping"] = config.attention_soft_cap or None
        json["final_logit_softcapping"] = config.logit_soft_cap or None
        if config.attention_scale == int(config.attention_scale):
            json["query_pre_attn_scalar"] = int(json["query_pre_attn_scalar"])
    if config.num_experts:
        experts = "num_experts" if config.qk_norm else "num_local_experts"
        json |= {
            experts: config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "router_aux_loss_coef": config.balance_weight,
            "norm_topk_prob": config.normalized_experts,
        }
        if config.qk_norm:
            json |= {"moe_intermediate_size": config.hidden, "mlp_only_layers": []}
    _check_same(config, read_config(json), name)
    return json


def tensors(model: Mapping[str, Any]) -> dict[str, FileTensor]:
    """Returns where the files keep each array, by its name, one layer at a time."""
    config = _config(model)
    found = {
        "embed.embedding": FileTensor(("model.embed_tokens.weight",)),
        "norm.scale": FileTensor(("model.norm.weight",)),
    }
    if not config.tied:
        found["head.kernel"] = FileTensor(("lm_head.weight",), transposed=True)
    layer = _layer_tensors(config)
    for i in range(config.num_layers):
        for name, place in layer.items():
            names = tuple(f"model.layers.{i}.{x}.{_kind(name)}" for x in place.names)
            found[f"blocks.{i}.{name}"] = place._replace(names=names)
    return found


def _kind(name: str) -> str:
    return "bias" if name.endswith(".bias") else "weight"


def _layer_tensors(config: LlamaConfig) -> dict[str, FileTensor]:
    """Returns the names of modules in a layer, by the name of our array."""
    norms = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    if not config.pre_norms:
        norms = {
            "post_norm1": "post_attention_layernorm",
            "post_norm2": "post_feedforward_layernorm",
        }
    elif config.post_norms:
        norms |= {
            "post_norm1": "post_attention_layernorm",
            "norm2": "pre_feedforward_layernorm",
            "post_norm2": "post_feedforward_layernorm",
        }
    if config.qk_norm:
        norms |= {"attention.q_norm": "self_attn.q_norm"}
        norms |= {"attention.k_norm": "self_attn.k_norm"}
    found = {f"{ours}.scale": FileTensor((name,)) for ours, name in norms.items()}
    projections = {"qkv": "qkv"} if config.fused else {"q": "q", "k": "k", "v": "v"}
    for ours, name in {**projections, "out": "o"}.items():
        projection = (f"self_attn.{name}_proj",)
        found[f"attention.{ours}.kernel"] = FileTensor(projection, transposed=True)
        if config.out_bias if ours == "out" else config.qkv_bias:
            found[f"attention.{ours}.bias"] = FileTensor(projection)
    if not config.num_experts:
        for ours in ("gate_up", "down") if config.fused else ("gate", "up", "down"):
            found[f"{ours}.kernel"] = FileTensor((f"mlp.{ours}_proj",), transposed=True)
        return found
    mixtral = _architecture(config) == "MixtralForCausalLM"
    moe = "block_sparse_moe" if mixtral else "mlp"
    found["experts.router.kernel"] = FileTensor((f"{moe}.gate",), transposed=True)
    for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        projection = theirs if mixtral else f"{ours}_proj"
        names = (f"{moe}.experts.{e}.{projection}" for e in range(config.num_experts))
        found[f"experts.{ours}.kernel"] = FileTensor(tuple(names), transposed=True)
    return found


def _architecture(config: LlamaConfig) -> str:
    """Returns the architecture that may have a model's features."""
    if config.num_experts:
        return "Qwen3MoeForCausalLM" if config.qk_norm else "MixtralForCausalLM"
    if config.norm_offset:
        return "Gemma3ForCausalLM" if config.qk_norm else "Gemma2ForCausalLM"
    if config.fused:
        return "Phi3ForCausalLM"
    if config.joint_qk_norm:
        return "Olmo3ForCausalLM" if config.sliding_theta else "Olmo2ForCausalLM"
    if config.qk_norm:
        return "Qwen3ForCausalLM"
    if config.qkv_bias and not config.out_bias:
        return "Qwen2ForCausalLM"
    return "MistralForCausalLM" if config.window else "LlamaForCausalLM"


def _config(model: Mapping[str, Any]) -> LlamaConfig:
    names = {field.name for field in dataclasses.fields(LlamaConfig)}
    return LlamaConfig(**{key: model[key] for key in names & set(model)})


def _check_same(config: LlamaConfig, read: dict[str, Any], name: str) -> None:
    """Raises UserError unless what was written says all of what was to be written."""
    for key, value in read.items():
        own = getattr(config, key)
        if key in ("sequence_length", "context_length") or own == value:
            continue
        if key in ("head_width", "attention_scale") and config.H in (own or value,):
            continue  # 0 is H
        if key == "pattern" and LlamaConfig(**read).sliding_layers == (
            config.sliding_layers
        ):
            continue
        raise jshard.UserError(
            f"Hugging Face's {name} cannot have model.{key}={own!r}, so this model has "
            "no config.json"
        )
