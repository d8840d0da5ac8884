"""Settings of published models, rebuilt tiny.

Keys and values are those of each model's config.json and tokenizer_config.json, but for
sizes; nothing else of theirs is kept.
"""

from typing import Any

SAVED = {
    "_name_or_path": "x",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
    "use_cache": True,
}
TINY = {
    **SAVED,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 96,
}
LLAMA_1 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
LLAMA_2 = {
    **LLAMA_1,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
}
LLAMA_3 = {
    **LLAMA_2,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_key_value_heads": 2,
    "rope_theta": 500000.0,
}
SCALED = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
YARN = {
    "factor": 16.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "max_position_embeddings": 32768,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
}
QWEN_2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
QWEN_3 = {
    **QWEN_2,
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 16,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "rope_scaling": None,
    "sliding_window": None,
}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
GEMMA_2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
}
GEMMA_3 = {
    **{key: GEMMA_2[key] for key in GEMMA_2 if key not in ("hidden_act",)},
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "model_type": "gemma3_text",
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
PHI_3 = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "embd_pdrop": 0.0,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_key_value_heads": 4,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 9,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
}
OLMO_2 = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_key_value_heads": 4,
    "pad_token_id": 9,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
}
GPT_2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 95,
    "embd_pdrop": 0.1,
    "eos_token_id": 95,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 64,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True}},
    "vocab_size": 96,
}
BERT = {
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 64,
    "model_type": "bert",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 96,
}
T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 64,
    "d_kv": 8,
    "d_model": 32,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_heads": 4,
    "num_layers": 2,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "task_specific_params": {"summarization": {"early_stopping": True}},
    "vocab_size": 96,
}
T5_1 = {
    **T5,
    "feed_forward_proj": "gated-gelu",
    "num_decoder_layers": 2,
    "tie_word_embeddings": False,
}

# Of each model: its settings, and what they say, or why they are refused.
Said = dict[str, Any]
CENSUS: dict[str, tuple[Said, Said | str]] = {
    "gpt2-medium": (
        {**GPT_2, "n_special": 0, "predict_special_tokens": True},
        {"num_heads": 4},
    ),
    "DialoGPT-small": ({**GPT_2, "task_specific_params": {"conversational": {}}}, {}),
    "rugpt3small": ({**GPT_2, "n_inner": None, "output_past": True}, {}),
    "open_llama_3b": ({**LLAMA_1, "max_position_embeddings": 2048}, {}),
    "AmberChat": (
        {**LLAMA_1, "max_sequence_length": 2048, "pad_token_id": 0},
        {"qkv_bias": False},
    ),
    "Yarn-Llama-2-7b-64k": (
        {**LLAMA_2, "rope_scaling": YARN | {"finetuned": True}},
        {"rope_scaling": "yarn", "rope_factor": 16.0},
    ),
    "Llama-3.3-70B": ({**LLAMA_3, "mlp_bias": False, "rope_scaling": SCALED}, {}),
    "Hermes-3-Llama-3.1-8B": (
        {**LLAMA_3, "pretraining_tp": 1, "rope_scaling": SCALED},
        {"rope_factor": 8.0},
    ),
    "DeepSeek-R1-Distill-Qwen-1.5B": (
        {**QWEN_2, "use_mrope": False, "rope_theta": 10000}
        | {"tie_word_embeddings": False},
        {"tied": False},
    ),
    "Qwen2.5-7B-1M": (
        {**QWEN_2, "dual_chunk_attention_config": {"chunk_size": 262144}},
        "dual_chunk_attention_config=.*jshard does not know this key",
    ),
    "Qwen3-8B, long": ({**QWEN_3, "rope_scaling": YARN}, {"rope_scaling": "yarn"}),
    "zephyr-7b-beta": ({**MISTRAL, "pad_token_id": 2}, {"pattern": "s"}),
    "Ministral-8B": (
        {**MISTRAL, "head_dim": 16, "sliding_window": 32768},
        {"window": 32768},
    ),
    "gemma-2-27b": (
        {**GEMMA_2, "query_pre_attn_scalar": 24},
        {"attention_scale": 24.0},
    ),
    "phi-4-reasoning": (
        {**PHI_3, "attention_dropout": 0.0, "partial_rotary_factor": 1.0}
        | {"sliding_window": None},
        {"window": 0},
    ),
    "Olmo-3-7B": (
        {
            **OLMO_2,
            "architectures": ["Olmo3ForCausalLM"],
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "model_type": "olmo3",
            "sliding_window": 4096,
        },
        {"pattern": "sssf", "window": 4096},
    ),
    "gpt-oss-20b": (
        {
            "architectures": ["GptOssForCausalLM"],
            "attention_bias": True,
            "attention_dropout": 0.0,
            "experts_per_token": 2,
            "head_dim": 16,
            "initial_context_length": 4096,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "max_position_embeddings": 131072,
            "model_type": "gpt_oss",
            "num_experts_per_tok": 2,
            "num_key_value_heads": 2,
            "num_local_experts": 8,
            "output_router_logits": False,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {**YARN, "rope_type": "yarn", "truncate": False},
            "rope_theta": 150000,
            "router_aux_loss_coef": 0.9,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
        },
        {"sinks": True, "num_experts": 8},
    ),
    "GLM-4.5-Air": (
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "attention_bias": True,
            "attention_dropout": 0.0,
            "first_k_dense_replace": 1,
            "head_dim": 16,
            "max_position_embeddings": 131072,
            "model_type": "glm4_moe",
            "moe_intermediate_size": 16,
            "n_group": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 2,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "routed_scaling_factor": 1.0,
            "tie_word_embeddings": False,
            "topk_group": 1,
            "use_qk_norm": False,
        },
        {"rotary_width": 8, "dense_layers": 1},
    ),
    "DeepSeek-V3": (
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
            "ep_size": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 8,
            "max_position_embeddings": 163840,
            "model_type": "deepseek_v3",
            "moe_intermediate_size": 16,
            "moe_layer_freq": 1,
            "n_group": 2,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 4,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            "rope_theta": 10000,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "tie_word_embeddings": False,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "v_head_dim": 8,
        },
        {"kv_rank": 8, "sigmoid_router": True},
    ),
    "bert-base-cased": (BERT, {"norm_eps": 1e-12}),
    "bert_uncased_L-2_H-128_A-2": (
        {key: BERT[key] for key in BERT if key != "architectures"},
        {"num_layers": 2},
    ),
    "flan-t5-small": (
        {**T5_1, "relative_attention_max_distance": 128, "classifier_dropout": 0.0},
        {"max_distance": 128, "gated": True},
    ),
    "codet5-small": ({**T5, "feed_forward_proj": "relu", "id2label": {"0": "L"}}, {}),
    "gpt2": (GPT_2, {"tied": True, "sequence_length": 64}),
    "distilgpt2": ({**GPT_2, "_num_labels": 1, "id2label": {"0": "L"}}, {}),
    "gpt2, 2019": (
        {
            **{k: v for k, v in GPT_2.items() if k != "architectures"},
            "finetuning_task": None,
            "n_special": 0,
            "num_labels": 1,
            "output_attentions": False,
            "predict_special_tokens": True,
            "pruned_heads": {},
            "torchscript": False,
            "use_bfloat16": False,
        },
        {"width": 32},
    ),
    "alias-gpt2-small": (
        {**GPT_2, "reorder_and_upcast_attn": True}
        | {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx=true of GPT2LMHeadModel is not supported",
    ),
    "Cerebras-GPT-111M": (
        {**GPT_2, "activation_function": "gelu", "n_inner": 128},
        "activation_function='gelu' of GPT2LMHeadModel is not supported",
    ),
    "decapoda llama-7b-hf": (
        {**LLAMA_1, "architectures": ["LLaMAForCausalLM"], "max_sequence_length": 2048}
        | {"pad_token_id": -1},
        {"norm_eps": 1e-6, "sequence_length": 2048},
    ),
    "huggyllama": ({**LLAMA_1, "max_sequence_length": 2048}, {"num_kv_heads": 4}),
    "Llama-2-7b": (LLAMA_2, {"norm_eps": 1e-5, "rope_theta": 1e4}),
    "vicuna-7b-16k": (
        {**LLAMA_2, "rope_scaling": {"factor": 4.0, "type": "linear"}},
        {"rope_scaling": "linear", "rope_factor": 4.0},
    ),
    "CodeLlama": ({**LLAMA_2, "rope_theta": 1000000}, {"rope_theta": 1e6}),
    "TinyLlama": ({**LLAMA_2, "num_key_value_heads": 2}, {"num_kv_heads": 2}),
    "Yi-6B": (
        {**LLAMA_2, "pad_token_id": 0, "rope_theta": 5000000.0},
        {"rope_theta": 5e6},
    ),
    "deepseek-coder": (
        {**LLAMA_2, "rope_scaling": {"factor": 4.0, "type": "linear"}}
        | {"max_position_embeddings": 16384},
        {"context_length": 16384},
    ),
    "Llama-3-8B": (LLAMA_3, {"rope_theta": 5e5, "tied": False}),
    "Llama-3.1-8B": (
        {**LLAMA_3, "eos_token_id": [2, 3], "mlp_bias": False, "rope_scaling": SCALED},
        {"rope_scaling": "llama3", "rope_length": 8192},
    ),
    "Llama-3.2-1B": (
        {**LLAMA_3, "head_dim": 8, "mlp_bias": False, "rope_scaling": SCALED}
        | {"tie_word_embeddings": True},
        {"tied": True, "head_width": 0},
    ),
    "SmolLM2-135M": (
        {**LLAMA_3, "is_llama_config": True, "rope_interleaved": False}
        | {"rope_theta": 100000, "tie_word_embeddings": True},
        {"rope_theta": 1e5},
    ),
    "SmolLM2-1.7B-Instruct": (
        {**LLAMA_3, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
        {},
    ),
    "an unsloth copy": ({**LLAMA_3, "unsloth_fixed": True, "pad_token_id": 4}, {}),
    "Mistral-7B-v0.1": (MISTRAL, {"pattern": "s", "window": 4096}),
    "Mistral-7B-v0.3": (
        {**MISTRAL, "rope_theta": 1000000.0, "sliding_window": None},
        {"pattern": "f", "window": 0},
    ),
    "Mistral-Nemo": (
        {**MISTRAL, "head_dim": 16, "sliding_window": None},
        {"head_width": 16},
    ),
    "e5-mistral-7b": ({**MISTRAL, "architectures": ["MistralModel"]}, {}),
    "Mixtral-8x7B": (
        {
            **MISTRAL,
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
        },
        {"num_experts": 8, "experts_per_token": 2},
    ),
    "Qwen1.5-0.5B": ({**QWEN_2, "max_window_layers": 21}, {"qkv_bias": True}),
    "Qwen2.5-0.5B": ({**QWEN_2, "use_mrope": False}, {"tied": True, "window": 0}),
    "Qwen3-0.6B": (QWEN_3, {"qk_norm": True, "head_width": 16}),
    "Qwen3-Embedding-0.6B": ({**QWEN_3, "architectures": ["Qwen3Model"]}, {}),
    "Qwen3-30B-A3B": ({**QWEN_3, **EXPERTS}, {"num_experts": 8, "hidden": 16}),
    "gemma-2b": (
        {**GEMMA_2, "architectures": ["GemmaForCausalLM"], "model_type": "gemma"},
        "architecture GemmaForCausalLM is not supported",
    ),
    "gemma-2-2b": (GEMMA_2, {"logit_soft_cap": 30.0, "pattern": "sf"}),
    "gemma-3-1b": (
        {**GEMMA_3, "num_hidden_layers": 7},
        {"pattern": "sssssf", "sliding_theta": 1e4},
    ),
    "gemma-3-270m": (
        {key: GEMMA_3[key] for key in GEMMA_3 if key != "sliding_window_pattern"}
        | {
            "_sliding_window_pattern": 6,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "use_bidirectional_attention": False,
        },
        {"pattern": "sssf"},
    ),
    "gemma-3-4b": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
        "architecture Gemma3ForConditionalGeneration is not supported",
    ),
    "Phi-3-mini-4k": (PHI_3, {"fused": True, "window": 2047}),
    "Phi-3-mini-128k": (
        {**PHI_3, "rope_scaling": {"type": "longrope", "long_factor": [1.0]}},
        "rope_scaling",
    ),
    "phi-4": (
        {**PHI_3, "rope_theta": 250000, "sliding_window": None},
        {"rope_theta": 2.5e5},
    ),
    "Phi-4-mini": ({**PHI_3, "partial_rotary_factor": 0.75}, "partial_rotary_factor="),
    "OLMo-2-1B": (OLMO_2, {"joint_qk_norm": True, "pre_norms": False}),
    "OLMo-1B": (
        {**OLMO_2, "architectures": ["OlmoForCausalLM"], "clip_qkv": None},
        "architecture OlmoForCausalLM is not supported",
    ),
    "falcon-7b": (
        {"alibi": False, "architectures": ["FalconForCausalLM"]},
        "architecture FalconForCausalLM is not supported",
    ),
    "bert-base-uncased": (BERT, {"activation": "gelu", "token_types": 2}),
    "bert-base-multilingual": (
        {**BERT, "directionality": "bidi", "pooler_fc_size": 768}
        | {"pooler_num_attention_heads": 12, "pooler_type": "first_token_transform"},
        {},
    ),
    "bert, relative": (
        {**BERT, "position_embedding_type": "relative_key"},
        "position_embedding_type='relative_key' of BertForMaskedLM is not supported",
    ),
    "t5-small": (T5, {"gated": False, "tied": True}),
    "t5-3b": ({**T5, "architectures": ["T5WithLMHeadModel"]}, {"tied": True}),
    "t5-v1_1-small": (T5_1, {"gated": True, "tied": False}),
    "mt5-small": (
        {**T5_1, "architectures": ["MT5ForConditionalGeneration"]},
        "architecture MT5ForConditionalGeneration is not supported",
    ),
}


def added(*texts, special=True):
    flags = {"lstrip": False, "rstrip": False, "normalized": False}
    return [{"content": text, "special": special, **flags} for text in texts]


def numbered(first, *texts):
    return {str(first + i): token for i, token in enumerate(added(*texts))}


WORDS = ("a", "b", "c")
OBJECT = {"__type": "AddedToken", "lstrip": False, "normalized": True}
# The special tokens in each tokenizer.json, which follow WORDS; the files beside it;
# the ids of the beginning and of the end; and how many tokens there are.
TOKENIZERS: dict[str, tuple[tuple[str, ...], Said, Said, list[int | None], int]] = {
    "gpt2": (
        ("<|endoftext|>",),
        {"model_max_length": 1024},
        {"config": {"model_type": "gpt2", "eos_token_id": 3}},
        [3, 3],
        4,
    ),
    "Llama-2": (
        ("<unk>", "<s>", "</s>"),
        {
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": {**OBJECT, "content": "<s>"},
            "eos_token": {**OBJECT, "content": "</s>"},
            "unk_token": {**OBJECT, "content": "<unk>"},
            "pad_token": None,
            "legacy": False,
        },
        {"special_tokens_map": {"bos_token": {"content": "<s>"}}},
        [4, 5],
        6,
    ),
    "Llama-3": (
        ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": numbered(
                3, "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
            ),
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
        },
        {"special_tokens_map": {"eos_token": "<|end_of_text|>"}},
        [3, 5],
        6,
    ),
    "Llama-2 with a pad": (
        ("<unk>", "<s>", "</s>"),
        {"tokenizer_class": "LlamaTokenizer"},
        {"added_tokens": {"[PAD]": 6}, "special_tokens_map": {"pad_token": "[PAD]"}},
        [4, 5],
        7,
    ),
    "Qwen2.5": (
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "add_bos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": numbered(
                3, "<|endoftext|>", "<|im_start|>", "<|im_end|>"
            ),
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "split_special_tokens": False,
        },
        {},
        [None, 5],
        6,
    ),
    "Mistral-7B": (
        ("<unk>", "<s>", "</s>"),
        {
            "tokenizer_class": "LlamaTokenizer",
            "additional_special_tokens": [],
            "bos_token": "<s>",
            "eos_token": "</s>",
            "spaces_between_special_tokens": False,
        },
        {},
        [4, 5],
        6,
    ),
    "gemma-3": (
        ("<pad>", "<eos>", "<bos>", "<unk>", "<image_soft_token>"),
        {
            "tokenizer_class": "GemmaTokenizer",
            "bos_token": "<bos>",
            "boi_token": "<image_soft_token>",
            "eos_token": "<eos>",
            "extra_special_tokens": {"image_token": "<image_soft_token>"},
            "image_token": "<image_soft_token>",
        },
        {"special_tokens_map": {"eos_token": {"content": "<eos>"}}},
        [5, 4],
        8,
    ),
    "SmolLM2-Instruct": (
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        {
            "tokenizer_class": "GPT2Tokenizer",
            "add_prefix_space": False,
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
        },
        {},
        [4, 5],
        6,
    ),
    "OLMo-2": (
        ("<|endoftext|>", "<|pad|>"),
        {"tokenizer_class": "GPT2Tokenizer", "pad_token": "<|pad|>"},
        {},
        [3, 3],
        5,
    ),
    "falcon-7b": (
        (">>TITLE<<", "<|endoftext|>"),
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "eos_token": "<|endoftext|>",
        },
        {"special_tokens_map": {"additional_special_tokens": [">>TITLE<<"]}},
        [None, 4],
        5,
    ),
    "bert-base-uncased": (
        ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
        {"do_lower_case": True, "model_max_length": 512},
        {"config": {"model_type": "bert"}},
        [None, None],
        8,
    ),
    "t5-small": (
        ("<pad>", "</s>", "<unk>"),
        {"model_max_length": 512},
        {"config": {"model_type": "t5"}},
        [None, 4],
        6,
    ),
}
