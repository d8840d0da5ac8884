"""The decoder family in Hugging Face's folders: config.json and tensor names.

The names of tensors are the same in transformers 4.57 and 5.23.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jshard
from jshard.models.llama_config import LlamaConfig
from jshard.models.llama_config_json import ACTIVATIONS, read_config
from jshard.models.llama_families import FAMILIES
from jshard.models.rope_huggingface import write_rope
from jshard.models.tensor_places import linear
from jshard.storage.hub.file_tensor import FileTensor

__all__ = ["UNTIED", "read_config", "tensors", "write_config"]

UNTIED = {"tied": False}

# The table of a tied head, and what the files call a head of its own.
TIED_HEAD = ("embed.embedding", "lm_head.weight")

_PREFIX = "model."  # files of models without a head lack it


def write_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a config.json for a model."""
    config = _config(model)
    name = _architecture(config)
    family = FAMILIES[name]
    activations = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    context = config.context_length or config.sequence_length
    gemma, local = config.norm_offset, "rope_local_base_freq" in family.reads
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
        "hidden_activation" if gemma else "hidden_act": activations.get(
            config.activation, "silu"
        ),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.out_bias,
        "sliding_window": config.window or None,
        **write_rope(config, two=local or config.sliding_theta > 0),
    }
    if "layer_types" in family.reads:
        sliding = ("full_attention", "sliding_attention")
        json["layer_types"] = [sliding[s] for s in config.sliding_layers]
    if family.model_type.startswith("qwen"):
        json["use_sliding_window"] = config.window > 0
    if local:
        json["rope_local_base_freq"] = config.sliding_theta or config.rope_theta
    if gemma:
        json["query_pre_attn_scalar"] = config.attention_scale or config.H
        json["attn_logit_softcapping"] = config.attention_soft_cap or None
        json["final_logit_softcapping"] = config.logit_soft_cap or None
        if config.attention_scale == int(config.attention_scale):
            json["query_pre_attn_scalar"] = int(json["query_pre_attn_scalar"])
    if config.num_experts:
        json |= _experts_json(config, name)
    _check_same(config, read_config(json), name)
    return json


def _experts_json(config: LlamaConfig, name: str) -> dict[str, Any]:
    """Returns the keys of experts."""
    json: dict[str, Any] = {
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.balance_weight,
        "norm_topk_prob": config.normalized_experts,
    }
    if "n_group" in FAMILIES[name].reads:
        attention = {
            "use_qk_norm": config.qk_norm,
            "attention_bias": config.qkv_bias,
            "partial_rotary_factor": config.R / config.H,
        }
        return json | {
            **(_latents_json(config) if config.kv_rank else attention),
            "intermediate_size": config.dense_hidden,
            "moe_intermediate_size": config.hidden,
            "n_routed_experts": config.num_experts,
            "n_shared_experts": config.shared_hidden // config.hidden,
            "routed_scaling_factor": config.expert_scale,
            "n_group": config.expert_groups,
            "topk_group": config.chosen_groups,
            "first_k_dense_replace": config.dense_layers,
        }
    if name == "Qwen3MoeForCausalLM":
        json |= {"moe_intermediate_size": config.hidden, "mlp_only_layers": []}
        return json | {"num_experts": config.num_experts}
    return json | {"num_local_experts": config.num_experts}


def _latents_json(config: LlamaConfig) -> dict[str, Any]:
    """Returns the keys of DeepSeek's attention."""
    return {
        "head_dim": config.R,  # as transformers has it
        "kv_lora_rank": config.kv_rank,
        "q_lora_rank": config.q_rank or None,
        "qk_nope_head_dim": config.H - config.R,
        "qk_rope_head_dim": config.R,
        "v_head_dim": config.value_width,
    }


def tensors(model: Mapping[str, Any]) -> dict[str, FileTensor]:
    """Returns where the files keep each array, by its name, one layer at a time."""
    config = _config(model)
    found = {
        "embed.embedding": _tensor("embed_tokens.weight"),
        "norm.scale": _tensor("norm.weight"),
    }
    if not config.tied:
        found |= linear("head", "lm_head", bias=False)
    first, last = config.dense_layers, config.num_layers
    stacks = {"dense_blocks": (config.dense, 0, first), "blocks": (config, first, last)}
    for stack, (own, start, stop) in stacks.items():
        layer = _layer_tensors(own)
        for i in range(start, stop):
            for name, place in layer.items():
                names = tuple(f"layers.{i}.{x}" for x in place.names)
                whole = tuple(f"{_PREFIX}{x}" for x in names)
                found[f"{stack}.{i - start}.{name}"] = place._replace(
                    names=whole, older=(names,)
                )
    return found


def _tensor(name: str) -> FileTensor:
    return FileTensor((_PREFIX + name,), older=((name,),))


def _layer_tensors(config: LlamaConfig) -> dict[str, FileTensor]:
    """Returns the names within a layer, by the name of our array."""
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
    found = {
        f"{ours}.scale": FileTensor((f"{name}.weight",)) for ours, name in norms.items()
    }
    if config.kv_rank:
        found |= _latent_tensors(config)
    else:
        for ours in ("qkv",) if config.fused else ("q", "k", "v"):
            theirs = f"self_attn.{ours}_proj"
            found |= linear(f"attention.{ours}", theirs, config.qkv_bias)
    found |= linear("attention.out", "self_attn.o_proj", config.out_bias)
    if config.sinks:
        found["attention.sinks"] = FileTensor(("self_attn.sinks",))
    mlp = "mlp"
    if config.num_experts:
        found |= _expert_tensors(config)
        mlp = "mlp.shared_experts"
    if not config.num_experts or config.shared_hidden:
        for ours in ("gate_up", "down") if config.fused else ("gate", "up", "down"):
            found |= linear(ours, f"{mlp}.{ours}_proj", bias=False)
    return found


def _latent_tensors(config: LlamaConfig) -> dict[str, FileTensor]:
    """Returns the names of the projections to and from latents."""
    names = {"kv_down": "kv_a_proj_with_mqa", "kv": "kv_b_proj", "q": "q_proj"}
    norms = {"kv_norm": "kv_a_layernorm"}
    if config.q_rank:
        names |= {"q_down": "q_a_proj", "q": "q_b_proj"}
        norms["q_norm"] = "q_a_layernorm"
    found = {
        f"attention.{ours}.scale": FileTensor((f"self_attn.{name}.weight",))
        for ours, name in norms.items()
    }
    for ours, name in names.items():
        found |= linear(f"attention.{ours}", f"self_attn.{name}", bias=False)
    return found


def _expert_tensors(config: LlamaConfig) -> dict[str, FileTensor]:
    """Returns the names of a layer's router and experts."""
    if config.expert_bias:
        return {
            **linear("experts.router", "mlp.router"),
            "experts.gate_up.kernel": FileTensor(("mlp.experts.gate_up_proj",)),
            "experts.gate_up.bias": FileTensor(("mlp.experts.gate_up_proj_bias",)),
            "experts.down.kernel": FileTensor(("mlp.experts.down_proj",)),
            "experts.down_bias": FileTensor(("mlp.experts.down_proj_bias",)),
        }
    mixtral = _architecture(config) == "MixtralForCausalLM"
    moe = "block_sparse_moe" if mixtral else "mlp"
    found = linear("experts.router", f"{moe}.gate", bias=False)
    if config.sigmoid_router:
        correction = FileTensor((f"{moe}.gate.e_score_correction_bias",))
        found["experts.router.correction"] = correction
    for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        projection = theirs if mixtral else f"{ours}_proj"
        names = tuple(
            f"{moe}.experts.{e}.{projection}.weight" for e in range(config.num_experts)
        )
        found[f"experts.{ours}.kernel"] = FileTensor(names, transposed=True)
    return found


def _architecture(config: LlamaConfig) -> str:
    """Returns the architecture that may have a model's features."""
    if config.sinks:
        return "GptOssForCausalLM"
    if config.sigmoid_router:
        return "DeepseekV3ForCausalLM" if config.kv_rank else "Glm4MoeForCausalLM"
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
