"""Settings of config.json to draw."""

from typing import Any, NamedTuple

from jshard.models import (
    bert_huggingface,
    gpt_huggingface,
    llama_huggingface,
    regnet_huggingface,
    resnet_huggingface,
    t5_huggingface,
    vit_huggingface,
)
from jshard.models.bert import Bert, BertConfig
from jshard.models.gpt import GPT, GPTConfig
from jshard.models.llama import Llama, LlamaConfig
from jshard.models.regnet import RegNet, RegNetConfig
from jshard.models.resnet import ResNet, ResNetConfig
from jshard.models.t5 import T5, T5Config
from jshard.models.vit import ViT, ViTConfig

B, T, V, SIZE = 2, 12, 40, 32


class Drawn(NamedTuple):
    """A family, what its config.json must say, and what it may say.

    Attributes:
      architecture: transformers' class.
      model_type: of its config class.
      map: ours.
      model: the class of our model.
      config: the class of its config.
      base: keys that every config.json has.
      values: keys, and values to draw; null is drawn of every key.
    """

    architecture: str
    model_type: str
    map: Any
    model: Any
    config: Any
    base: dict[str, Any]
    values: dict[str, list[Any]]


LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SCALINGS = [
    {},
    {"rope_type": "default"},
    {"type": "linear", "factor": 2.0},
    LINEAR,
    LINEAR | {"factor": None},
    LINEAR | {"rope_theta": 70.0},
    LLAMA3,
    LLAMA3 | {"original_max_position_embeddings": None},
    {k: v for k, v in LLAMA3.items() if not k.startswith("original")},
    YARN,
    YARN | {"beta_fast": 4, "beta_slow": 2.0},
    YARN | {"beta_fast": 2, "beta_slow": 8},
    YARN | {"beta_fast": 0.5, "beta_slow": 0.25, "factor": 3.0},
    YARN | {"factor": None},
    YARN | {"original_max_position_embeddings": 8, "beta_slow": None},
    YARN | {"attention_factor": 0.5},
    YARN | {"mscale": 0.7, "mscale_all_dim": 0.4},
    YARN | {"truncate": False},
    YARN | {"truncate": None},
    {"type": "yarn", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": None},
    {"rope_type": "default", "rope_theta": None},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
]
TWO = [
    {"full_attention": LINEAR, "sliding_attention": None},
    {
        "full_attention": {"rope_type": "default", "rope_theta": 300.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
    },
    {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
]
OF_DECODERS: dict[str, list[Any]] = {
    "attention_bias": [False, True],
    "mlp_bias": [False, True],
    "tie_word_embeddings": [False, True],
    "num_key_value_heads": [1, 2, 4],
    "head_dim": [8, 12],
    "rms_norm_eps": [1e-2, 1e-6],
    "max_position_embeddings": [16, 64],
    "original_max_position_embeddings": [8],
    "partial_rotary_factor": [1.0, 0.5],
    "rope_theta": [50.0, 700],
    "rope_scaling": SCALINGS,
    "rope_parameters": [*SCALINGS, *TWO],
    "rope_local_base_freq": [20.0],
    "sliding_window": [3, 5],
    "use_sliding_window": [False, True],
    "max_window_layers": [0, 1, 9],
    "sliding_window_pattern": [2, 3],
    "layer_types": [
        ["full_attention", "sliding_attention", "sliding_attention"],
        ["full_attention"] * 3,
        ["full_attention"] * 2,
        ["chunked_attention"] * 3,
    ],
    "hidden_act": ["silu", "gelu_pytorch_tanh", "relu"],
    "hidden_activation": ["silu", "gelu_pytorch_tanh"],
    "query_pre_attn_scalar": [8, 24],
    "attn_logit_softcapping": [0.7, 50.0],
    "final_logit_softcapping": [1.5, 30.0],
    "use_bidirectional_attention": [False, True],
    "num_local_experts": [3, 4],
    "num_experts": [3, 4],
    "num_experts_per_tok": [1, 2],
    "moe_intermediate_size": [20],
    "norm_topk_prob": [False, True],
    "n_routed_experts": [8],
    "n_group": [1, 2],
    "topk_group": [1, 2],
    "n_shared_experts": [1, 2],
    "routed_scaling_factor": [1.5],
    "first_k_dense_replace": [0, 2, 3],
    "use_qk_norm": [False, True],
    "q_lora_rank": [8],
    "rope_interleave": [True, False],
    "num_nextn_predict_layers": [0],
    "swiglu_limit": [7.0, 2.0],
    "mlp_only_layers": [[], [1]],
    "decoder_sparse_step": [1, 2],
    "pretraining_tp": [2],
    "attention_dropout": [0.5],
    "router_jitter_noise": [0.5],
    "pad_token_id": [0, 3],
    "initializer_range": [0.5],
    "use_cache": [False],
}
# Of any value: some versions of transformers refuse null.
INERT = {
    "attention_dropout",
    "chunk_size_feed_forward",
    "dropout_rate",
    "encoder_stride",
    "hidden_dropout_prob",
    "initializer_factor",
    "initializer_range",
    "original_max_position_embeddings",  # Phi-3's, without a scaling
    "pooler_act",
    "reorder_and_upcast_attn",
    "attn_pdrop",
    "summary_type",
    "use_cache",
    "output_router_logits",
    "router_jitter_noise",
}
DECODER = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "pad_token_id": 0,  # some classes have one outside of this vocabulary
}
GEMMA = {**DECODER, "head_dim": 8, "sliding_window": 4}
OURS = (llama_huggingface, Llama, LlamaConfig)
EXPERTS = {"num_experts_per_tok": 2, "num_key_value_heads": 2}
# All scalings are drawn of Llama and of Gemma 3, which reads them in its own way.
SOME = {"rope_scaling": SCALINGS[2:13:5], "rope_parameters": [SCALINGS[6], TWO[0]]}
FAMILIES = {
    name: Drawn(
        f"{name}ForCausalLM",
        model_type,
        *OURS,
        base,
        OF_DECODERS | ({} if name in ("Llama", "Gemma3", "Olmo3") else SOME),
    )
    for name, model_type, base in (
        ("Llama", "llama", DECODER),
        ("Mistral", "mistral", {**DECODER, "num_key_value_heads": 2}),
        ("Qwen2", "qwen2", {**DECODER, "num_key_value_heads": 2}),
        ("Qwen3", "qwen3", {**DECODER, "num_key_value_heads": 2}),
        ("Gemma2", "gemma2", GEMMA),
        ("Gemma3", "gemma3_text", {**GEMMA, "sliding_window_pattern": 2}),
        ("Phi3", "phi3", DECODER),
        (
            "GptOss",
            "gpt_oss",
            {**DECODER, **EXPERTS, "num_local_experts": 4, "head_dim": 8}
            | {"rope_scaling": YARN, "sliding_window": 4},
        ),
        (
            "Glm4Moe",
            "glm4_moe",
            {**DECODER, **EXPERTS, "head_dim": 8, "moe_intermediate_size": 20}
            | {"n_routed_experts": 4},
        ),
        (
            "DeepseekV3",
            "deepseek_v3",
            {**DECODER, "n_routed_experts": 8, "moe_intermediate_size": 20}
            | {"num_experts_per_tok": 2, "num_key_value_heads": 4, "n_group": 4}
            | {"topk_group": 2, "first_k_dense_replace": 1, "kv_lora_rank": 12}
            | {"q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6}
            | {"v_head_dim": 14},
        ),
        ("Olmo2", "olmo2", DECODER),
        ("Olmo3", "olmo3", {**DECODER, "sliding_window": 4}),
        (
            "Mixtral",
            "mixtral",
            {**DECODER, **EXPERTS, "num_local_experts": 4, "head_dim": 8},
        ),
        (
            "Qwen3Moe",
            "qwen3_moe",
            {**DECODER, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 20},
        ),
    )
}
# Not keys of these: but transformers' cache has a window for any config that names one,
# and its rotations a width of heads.
del FAMILIES["Glm4Moe"].values["sliding_window"]
del FAMILIES["DeepseekV3"].values["sliding_window"]
del FAMILIES["DeepseekV3"].values["head_dim"]
FAMILIES["GPT2"] = Drawn(
    "GPT2LMHeadModel",
    "gpt2",
    gpt_huggingface,
    GPT,
    GPTConfig,
    {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16,
     "bos_token_id": 1, "eos_token_id": 2},
    {
        "n_inner": [128, 64],
        "activation_function": ["gelu_new", "gelu_pytorch_tanh", "gelu"],
        "layer_norm_epsilon": [1e-5, 1e-3],
        "scale_attn_weights": [True, False],
        "scale_attn_by_inverse_layer_idx": [False, True],
        "reorder_and_upcast_attn": [False, True],
        "add_cross_attention": [False, True],
        "tie_word_embeddings": [False, True],
        "hidden_size": [64],
        "n_ctx": [8],
        "attn_pdrop": [0.5],
        "summary_type": ["mean"],
    },
)  # fmt: skip
FAMILIES["Bert"] = Drawn(
    "BertForMaskedLM",
    "bert",
    bert_huggingface,
    Bert,
    BertConfig,
    {"vocab_size": V, "hidden_size": 32, "intermediate_size": 24,
     "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 16},
    {
        "hidden_act": ["gelu", "gelu_new", "relu", "silu"],
        "type_vocab_size": [1, 3],
        "layer_norm_eps": [1e-2],
        "position_embedding_type": ["absolute"],
        "is_decoder": [False, True],
        "add_cross_attention": [False],
        "tie_word_embeddings": [True, False],
        "chunk_size_feed_forward": [4],
        "hidden_dropout_prob": [0.5],
        "pooler_type": ["first_token_transform"],
        "pad_token_id": [3],
    },
)  # fmt: skip
FAMILIES["T5"] = Drawn(
    "T5ForConditionalGeneration",
    "t5",
    t5_huggingface,
    T5,
    T5Config,
    {"vocab_size": V, "d_model": 32, "d_kv": 16, "d_ff": 24, "num_layers": 2,
     "num_heads": 4, "relative_attention_num_buckets": 8, "decoder_start_token_id": 0,
     "relative_attention_max_distance": 20, "pad_token_id": 0},
    {
        "num_decoder_layers": [1, 3],
        "feed_forward_proj": ["relu", "gated-gelu", "gated-silu"],
        "dense_act_fn": ["relu", "gelu_new"],
        "is_gated_act": [False, True],
        "tie_word_embeddings": [True, False],
        "scale_decoder_outputs": [True, False],
        "layer_norm_epsilon": [1e-2],
        "relative_attention_max_distance": [12],
        "dropout_rate": [0.5],
        "initializer_factor": [0.5],
        "hidden_size": [64],
        "n_positions": [8],
    },
)  # fmt: skip
OF_IMAGES: dict[str, list[Any]] = {
    "num_channels": [1, 3],
    "num_labels": [3],
    "id2label": [{"0": "a", "1": "b", "2": "c"}],
    "hidden_act": ["relu", "gelu"],
}
STAGES = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 2]}
FAMILIES["ViT"] = Drawn(
    "ViTForImageClassification",
    "vit",
    vit_huggingface,
    ViT,
    ViTConfig,
    {"image_size": SIZE, "patch_size": 16, "hidden_size": 24, "num_hidden_layers": 2,
     "num_attention_heads": 3, "intermediate_size": 40},
    {
        **OF_IMAGES,
        "qkv_bias": [True, False],
        "layer_norm_eps": [1e-2],
        "encoder_stride": [8],
        "pooler_act": ["relu"],
        "pooler_output_size": [7],
        "image_size": [[SIZE, SIZE]],
    },
)  # fmt: skip
FAMILIES["RegNet"] = Drawn(
    "RegNetForImageClassification",
    "regnet",
    regnet_huggingface,
    RegNet,
    RegNetConfig,
    {**STAGES, "groups_width": 8},
    {
        **OF_IMAGES,
        "layer_type": ["x", "y", "z"],
        "groups_width": [4, 16],
        "downsample_in_first_stage": [True, False],
    },
)
FAMILIES["ResNet"] = Drawn(
    "ResNetForImageClassification",
    "resnet",
    resnet_huggingface,
    ResNet,
    ResNetConfig,
    STAGES,
    {
        **OF_IMAGES,
        "layer_type": ["basic", "bottleneck"],
        "downsample_in_first_stage": [True, False],
        "downsample_in_bottleneck": [False, True],
        "out_features": [["stage2"]],
        "out_indices": [[2]],
    },
)


def config_json(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    drawn = FAMILIES[family]
    names = {"architectures": [drawn.architecture], "model_type": drawn.model_type}
    return {**names, **drawn.base, **changes}
