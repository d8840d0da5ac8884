"""Llama 2 and 3 by size: --config=llama.py:3-8b, or 2-7b, 2-13b, 3-1b, 3-70b, 3-405b.

The model is a family: with other keys under --config.model it is a Mistral, Qwen,
Gemma, Phi-3 or Mixtral (models/llama.py).

A step has four million tokens in bf16, as for Llama 2 and the start of Llama 3. On 64
GPUs, a GPU's share is 16 sequences of 4096 tokens for Llama 2 and eight of 8192 for
Llama 3, in as few micro-batches and with as little recomputed as their memory allows.
By default it trains on the bytes of Python's standard library; for real training, give
token files with --config.data.path=FOLDER_OF_BIN_FILES (uint16 for Llama 2, uint32 for
Llama 3).

Sizes and rates are from Touvron et al. 2023, arXiv:2307.09288, section 2.2, and from
Dubey et al. 2024, arXiv:2407.21783, table 3. 3-1b has the size of Llama 3.2 1B
(github.com/meta-llama/llama-models, models/llama3_2/MODEL_CARD.md), with a tied head,
and the rate of 3-8b.
"""

import copy

from ml_collections import ConfigDict

import jshard
from jshard.models import llama_huggingface as huggingface  # noqa: F401  read by jshard
from jshard.models.llama import Llama, LlamaConfig
from jshard.models.llama_config import ACTIVATIONS
from jshard.models.rope import SCALINGS
from jshard.recipe import Key
from jshard.recipes import gpt

make_optimizer = gpt.make_optimizer
loss_fn = gpt.loss_fn
make_data = gpt.make_data
sequences = gpt.sequences
learning_rate = gpt.learning_rate
references = gpt.references

# Layers, heads, heads of keys and values, width, hidden width, learning rate.
SIZES = {
    "2-7b": (32, 32, 32, 4096, 11008, 3e-4),
    "2-13b": (40, 40, 40, 5120, 13824, 3e-4),
    "3-1b": (16, 32, 8, 2048, 8192, 3e-4),
    "3-8b": (32, 32, 8, 4096, 14336, 3e-4),
    "3-70b": (80, 64, 8, 8192, 28672, 1.5e-4),
    "3-405b": (126, 128, 8, 16384, 53248, 8e-5),
}

# What other models of the family do differently.
FAMILY = {
    "head_width": Key(0, "width of a head; 0 is width / num_heads", at_least=0),
    "context_length": Key(
        0, "longest text the model is for; 0 is sequence_length", at_least=0
    ),
    "rope_scaling": Key(
        "none", "scaling of rotary positions for longer texts", choices=SCALINGS
    ),
    "rope_factor": Key(
        1.0, "factor by which rope_scaling extends the context", above=0
    ),
    "rope_low": Key(
        1.0, "a frequency with fewer turns in rope_length is scaled in full", above=0
    ),
    "rope_high": Key(
        4.0, "a frequency with more turns in rope_length is not scaled", above=0
    ),
    "rope_length": Key(8192, "context length before rope_scaling", at_least=1),
    "rope_attention_factor": Key(
        0.0, "yarn's factor of attention; 0 is that of its paper", at_least=0
    ),
    "rope_truncate": Key(True, "whether yarn rounds its bounds to integers"),
    "rope_mscale": Key(0.0, "mscale_all_dim of DeepSeek's yarn", at_least=0),
    "rotary_width": Key(0, "rotated dimensions of a head; 0 is all", at_least=0),
    "kv_rank": Key(0, "width of the latents of keys and values; 0 is none", at_least=0),
    "q_rank": Key(0, "width of the latents of queries; 0 is none", at_least=0),
    "value_width": Key(0, "width of values, with kv_rank", at_least=0),
    "qkv_bias": Key(False, "whether queries, keys and values have biases"),
    "out_bias": Key(False, "whether the attention's output has a bias"),
    "fused": Key(False, "whether q, k and v are one projection, and gate and up"),
    "qk_norm": Key(False, "whether queries and keys are normalised"),
    "joint_qk_norm": Key(False, "whether qk_norm normalises all heads together"),
    "pattern": Key(
        "f", "repeated over layers: f full attention, s a sliding window, as in ssf"
    ),
    "window": Key(0, "positions that layers s of pattern attend to", at_least=0),
    "sliding_theta": Key(
        0.0, "rope_theta of layers s of pattern; 0 is rope_theta", at_least=0
    ),
    "sinks": Key(False, "whether heads have attention sinks"),
    "attention_scale": Key(
        0.0,
        "scores are divided by the root of this; 0 is the width of a head",
        at_least=0,
    ),
    "attention_soft_cap": Key(0.0, "soft cap of scores; 0 is none", at_least=0),
    "logit_soft_cap": Key(0.0, "soft cap of logits; 0 is none", at_least=0),
    "activation": Key(
        "silu", "activation of the gated MLP", choices=tuple(ACTIVATIONS)
    ),
    "norm_offset": Key(False, "whether norms multiply with 1 + their scale"),
    "pre_norms": Key(True, "whether the inputs of branches are normalised"),
    "post_norms": Key(False, "whether the outputs of branches are normalised"),
    "scaled_embeddings": Key(False, "whether embeddings are scaled by sqrt(width)"),
    "num_experts": Key(0, "experts of the MLP; 0 is an ordinary MLP", at_least=0),
    "experts_per_token": Key(2, "experts that a token takes", at_least=1),
    "normalized_experts": Key(True, "whether weights of a token's experts sum to 1"),
    "expert_bias": Key(False, "whether router and experts have biases"),
    "expert_limit": Key(
        0.0, "bound at which gate and up are clamped (gpt-oss); 0 is none", at_least=0
    ),
    "sigmoid_router": Key(False, "whether scores of experts are sigmoids"),
    "correction_rate": Key(
        0.0,
        "how much a step corrects sigmoid_router towards an even load (DeepSeek-V3: "
        "0.001)",
        at_least=0,
    ),
    "expert_groups": Key(
        1, "number of groups into which the experts are divided", at_least=1
    ),
    "chosen_groups": Key(
        1, "number of expert_groups that a token's experts are in", at_least=1
    ),
    "expert_scale": Key(1.0, "factor of the weights of a token's experts", above=0),
    "shared_hidden": Key(
        0, "width of an MLP beside the experts; 0 is none", at_least=0
    ),
    "dense_layers": Key(0, "number of first layers, which have no experts", at_least=0),
    "dense_hidden": Key(0, "width of the MLP of dense_layers", at_least=0),
    "balance_weight": Key(
        0.0, "weight of the experts' load-balancing loss", at_least=0
    ),
    "expert_capacity": Key(
        1.25, "size of an exchange's first round, relative to an even share", above=0
    ),
}


def get_config(size: str = "") -> ConfigDict:
    if size not in SIZES:
        raise jshard.UserError(
            f"--config=llama.py:{size or 'SIZE'}: the size must be one of "
            f"{', '.join(SIZES)}"
        )
    layers, heads, kv_heads, width, hidden, rate = SIZES[size]
    config = gpt.get_config()
    config.steps = 500_000
    config.batch_size = 1024
    config.eval_every = 1000
    config.eval_batches = 4
    config.checkpoint.every = 1000
    # Gradients are reduced in float32, as in section 3.3.2 of the Llama 3 paper.
    precision = {"compute": "bfloat16", "reduce": "float32"}
    config.policy = {
        "remat": "fit",
        "accumulate": "fit",
        "unroll": layers <= 80,  # compiling more takes too long
        "precision": precision,
    }
    config.data.tokenizer = ""
    del config.model.dropout
    config.model.update(
        {
            "vocab_size": 32000,
            "sequence_length": 4096,
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": Key(
                kv_heads, "heads of keys and values, which divide num_heads", at_least=1
            ),
            "width": width,
            "hidden": Key(
                hidden, "width of the gated MLP", at_least=1, at_most=1_000_000
            ),
            "rope_theta": Key(
                10000.0, "base of the wavelengths of rotary positions", above=0
            ),
            "norm_eps": Key(
                1e-5, "epsilon of norms, added to mean squares", above=0, at_most=1
            ),
            "loss_chunk": 4096,
            "mlp_tile": Key(
                0, "tokens per device in the MLP at a time; 0 is all", at_least=0
            ),
            **copy.deepcopy(FAMILY),
        }
    )
    config.optimizer.learning_rate = rate
    config.optimizer.warmup_steps = 2000
    del config.sample
    if size.startswith("3"):
        config.steps = 1_200_000
        config.batch_size = 512
        config.model.vocab_size = 128256
        config.model.tied = size == "3-1b"
        config.model.sequence_length = 8192
        config.model.rope_theta = 500_000.0
        config.model.loss_chunk = 1024
        config.data.token_dtype = "uint32"
        config.optimizer.warmup_steps = 8000
    return config


def make_model(config, rngs):
    max_segments = config.data.get("max_segments", 0)
    return Llama(LlamaConfig(**config.model, max_segments=max_segments), rngs=rngs)


def flops_per_token(config):
    """Counts 6 N without embeddings or idle experts, plus attention's scores.

    The scores of L layers of N heads take 6 L N H T with causal attention, and less in
    layers with a window W: a token attends to W - W**2 / 2T others on average.
    """
    matrices, scores = products_per_token(config)
    return 6.0 * (matrices + scores)


def products_per_token(config):
    """Counts the products of a token with matrices, and half of those of its scores."""
    model = LlamaConfig(**config.model)
    heads, T = model.H * model.num_heads, model.sequence_length
    attention = 2 * model.width * (heads + model.H * model.num_kv_heads)
    if model.kv_rank:
        N, C, R, V = model.num_heads, model.kv_rank, model.R, model.value_width
        attention = model.width * (C + R + N * V) + C * N * (model.H - R + V)
        attention += model.q_rank * (model.width + heads) or model.width * heads
    mlp = 3 * model.width * model.hidden
    if model.num_experts:
        mlp = mlp * model.experts_per_token + model.width * model.num_experts
        mlp += 3 * model.width * model.shared_hidden
    matrices = model.num_layers * (attention + mlp) + model.width * model.vocab_size
    dense = 3 * model.width * model.dense_hidden
    matrices += model.dense_layers * (dense - mlp)
    near = min(model.window, T)
    scores = sum(
        heads * (2 * near - near**2 / T if sliding else T)
        for sliding in model.sliding_layers
    )
    return matrices, scores
