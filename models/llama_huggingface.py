"""The decoder family in Hugging Face's folders: config.json and tensor names.

The keys and their defaults are those of transformers' configuration_*.py (4.57 and
5.23), which differ in how they spell rotary positions (models/rope_huggingface.py). The
names of tensors are the same in both.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jshard
from jshard.checkpoint.file_tensor import FileTensor
from models.huggingface_config import check_features, read_architecture
from models.llama_config import LlamaConfig
from models.rope import SCALINGS
from models.rope_huggingface import known, read_rope, write_rope

Json = Mapping[str, Any]

# What config.json does not decide.
_OF_TRAINING = (
    "loss_chunk",
    "attention",
    "dtype",
    "param_dtype",
    "balance_weight",
    "expert_capacity",
    "max_segments",
)


class Family(NamedTuple):
    """What distinguishes one architecture from the others.

    Attributes:
      model_type: transformers' name of its config class.
      model: our keys of what is true of every such model.
      defaults: config.json's keys that may be missing.
    """

    model_type: str
    model: Mapping[str, Any]
    defaults: Mapping[str, Any]


_GEMMA = {
    "activation": "gelu_tanh",
    "norm_offset": True,
    "post_norms": True,
    "scaled_embeddings": True,
}
_GEMMA_DEFAULTS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "num_key_value_heads": 4,
}
_FAMILIES = {
    "LlamaForCausalLM": Family("llama", {}, {}),
    "MistralForCausalLM": Family(
        "mistral", {}, {"num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": Family("qwen2", {"qkv_bias": True}, {}),
    "Phi3ForCausalLM": Family("phi3", {"fused": True}, {"rms_norm_eps": 1e-5}),
    "Qwen3ForCausalLM": Family("qwen3", {"qk_norm": True}, {"head_dim": 128}),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        _GEMMA,
        {
            **_GEMMA_DEFAULTS,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        {**_GEMMA, "qk_norm": True},
        {**_GEMMA_DEFAULTS, "rope_theta": 1e6},
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        {},
        {
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        {"qk_norm": True},
        {"num_key_value_heads": 4, "num_experts_per_tok": 8},
    ),
}
_WITH_LAYER_TYPES = ("qwen2", "qwen3", "gemma2", "gemma3_text")
_LETTERS = {"full_attention": "f", "sliding_attention": "s"}
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# What models/llama.py has not, where config.json says anything but these.
_MISSING = {
    "mlp_bias": (False,),
    "use_bidirectional_attention": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "partial_rotary_factor": (1, 1.0),
}


def read_config(json: Json) -> dict[str, Any]:
    """Returns the keys of ``LlamaConfig`` that a config.json decides.

    Args:
      json: its content.

    Raises:
      UserError: the architecture, or a feature of it, is not there; or a key is
        missing.
    """
    name, family = _family(json)
    check_features(json, name, _MISSING)

    def get(key: str, default: Any = None) -> Any:
        value = json.get(key)
        value = family.defaults.get(key) if value is None else value
        return default if value is None else value

    def need(key: str) -> Any:
        if (value := get(key)) is None:
            raise jshard.UserError(f"config.json: lacks {key!r}, which {name} needs")
        return value

    width, heads = need("hidden_size"), need("num_attention_heads")
    layers, context = need("num_hidden_layers"), get("max_position_embeddings", 4096)
    gemma = "post_norms" in family.model
    activation = json.get("hidden_activation" if gemma else "hidden_act")
    moe = family.model_type == "qwen3_moe"
    pattern = _read_pattern(json, family, layers)
    head_width = get("head_dim", 0)
    bias = bool(json.get("attention_bias")) and family.model_type != "qwen2"
    rope = read_rope(
        json,
        theta=get("rope_theta", 10000.0),
        context=context,
        local=family.model_type == "gemma3_text",
        # transformers takes any scaling of Phi-3 for longrope.
        scalings=() if "fused" in family.model else SCALINGS[1:],
    )
    model = {
        field.name: field.default
        for field in dataclasses.fields(LlamaConfig)
        if field.name not in _OF_TRAINING
    }
    model |= {
        "vocab_size": need("vocab_size"),
        "sequence_length": context,
        "context_length": context,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": get("num_key_value_heads", heads),
        "width": width,
        "hidden": need("moe_intermediate_size" if moe else "intermediate_size"),
        "head_width": 0 if head_width * heads == width else head_width,
        "norm_eps": get("rms_norm_eps", 1e-6),
        "tied": get("tie_word_embeddings", False),
        "qkv_bias": bias,
        "out_bias": bias,
        "pattern": pattern,
        "window": get("sliding_window") if "s" in pattern else 0,
        "activation": known("activation", activation or "silu", _ACTIVATIONS),
        **rope,
        **family.model,
    }
    if gemma:
        model["activation"] = known(
            "activation", activation or "gelu_pytorch_tanh", _ACTIVATIONS
        )
        model["attention_scale"] = float(get("query_pre_attn_scalar"))
        model["attention_soft_cap"] = float(get("attn_logit_softcapping", 0.0))
        model["logit_soft_cap"] = float(get("final_logit_softcapping", 0.0))
    if moe or family.model_type == "mixtral":
        experts = get("num_local_experts")  # in 5.x, Qwen's too
        model["num_experts"] = experts if experts else need("num_experts")
        model["experts_per_token"] = need("num_experts_per_tok")
        model["normalized_experts"] = not moe or bool(json.get("norm_topk_prob"))
    return model


def write_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a config.json for a model.

    Args:
      model: keys of ``LlamaConfig``.

    Raises:
      UserError: no architecture of transformers has this combination of features.
    """
    config = _config(model)
    name = _architecture(config)
    family = _FAMILIES[name]
    activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
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
        **write_rope(config, local=name == "Gemma3ForCausalLM"),
    }
    if family.model_type in _WITH_LAYER_TYPES:
        sliding = ("full_attention", "sliding_attention")
        json["layer_types"] = [sliding[s] for s in config.sliding_layers]
    if family.model_type.startswith("qwen"):
        json["use_sliding_window"] = config.window > 0
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
    """Returns where the files keep each array, by its name, one layer at a time.

    Args:
      model: keys of ``LlamaConfig``.
    """
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
    if config.post_norms:
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


def _family(json: Json) -> tuple[str, Family]:
    name = read_architecture(json, _FAMILIES)
    return name, _FAMILIES[name]


def _architecture(config: LlamaConfig) -> str:
    """Returns the architecture that may have a model's features."""
    if config.num_experts:
        return "Qwen3MoeForCausalLM" if config.qk_norm else "MixtralForCausalLM"
    if config.norm_offset:
        return "Gemma3ForCausalLM" if config.qk_norm else "Gemma2ForCausalLM"
    if config.fused:
        return "Phi3ForCausalLM"
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


def _read_pattern(json: Json, family: Family, layers: int) -> str:
    """Returns the shortest pattern of the layers' kinds of attention."""
    window = json.get("sliding_window", family.defaults.get("sliding_window"))
    qwen = family.model_type.startswith("qwen")
    if qwen:
        window = (
            json.get("sliding_window", 4096) if json.get("use_sliding_window") else None
        )
    if not window or family.model_type == "llama":
        return "f"
    if family.model_type not in _WITH_LAYER_TYPES:
        return "s"
    if json.get("layer_types"):
        kinds = "".join(
            known("layer type", kind, _LETTERS) for kind in json["layer_types"]
        )
    elif qwen:
        full = min(json.get("max_window_layers", 28), layers)
        kinds = "f" * full + "s" * (layers - full)
    else:
        every = (
            2
            if family.model_type == "gemma2"
            else json.get("sliding_window_pattern", 6)
        )
        kinds = "".join("s" if (i + 1) % every else "f" for i in range(layers))
    for period in range(1, len(kinds)):
        if all(kind == kinds[i % period] for i, kind in enumerate(kinds)):
            return kinds[:period]
    return kinds
