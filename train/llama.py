"""Llama 2 and 3 by size: --config=llama.py:3-8b, or 2-7b, 2-13b, 3-70b, 3-405b.

A step has four million tokens in bf16, as for Llama 2 and the start of Llama 3. On 64
GPUs, a GPU's share is four micro-batches (--config.policy.accumulate) of four sequences
of 4096 tokens for Llama 2, and eight sequences of 8192 tokens for Llama 3; with
--config.batch_size=64 it is one sequence. By default it trains on the bytes of Python's
standard library; for real training, give token files with
--config.data.path=FOLDER_OF_BIN_FILES (uint16 for Llama 2, uint32 for Llama 3).

Sizes and rates are from Touvron et al. 2023, arXiv:2307.09288, section 2.2, and from
Dubey et al. 2024, arXiv:2407.21783, table 3.
"""

from ml_collections import ConfigDict

import jshard
from jshard.training.keys import Key
from models.llama import Llama, LlamaConfig
from train import gpt

make_optimizer = gpt.make_optimizer
loss_fn = gpt.loss_fn
make_data = gpt.make_data
learning_rate = gpt.learning_rate
references = gpt.references

# Layers, heads, heads of keys and values, width, hidden width, learning rate.
SIZES = {
    "2-7b": (32, 32, 32, 4096, 11008, 3e-4),
    "2-13b": (40, 40, 40, 5120, 13824, 3e-4),
    "3-8b": (32, 32, 8, 4096, 14336, 3e-4),
    "3-70b": (80, 64, 8, 8192, 28672, 1.5e-4),
    "3-405b": (126, 128, 8, 16384, 53248, 8e-5),
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
        "remat": "dots",
        "accumulate": 4,
        "unroll": layers <= 80,  # compiling more takes too long
        "precision": precision,
    }
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
            "norm_eps": Key(1e-5, "added to mean squares", above=0, at_most=1),
            "loss_chunk": 4096,
        }
    )
    config.optimizer.learning_rate = rate
    config.optimizer.warmup_steps = 2000
    del config.sample
    if size.startswith("3"):
        config.steps = 1_200_000
        config.batch_size = 512
        config.policy.update({"remat": "full", "accumulate": 1})
        config.model.vocab_size = 128256
        config.model.sequence_length = 8192
        config.model.rope_theta = 500_000.0
        config.model.loss_chunk = 1024
        config.data.token_dtype = "uint32"
        config.optimizer.warmup_steps = 8000
    return config


def make_model(config, rngs):
    max_segments = config.data.max_segments
    return Llama(LlamaConfig(**config.model, max_segments=max_segments), rngs=rngs)


def flops_per_token(config):
    """Counts 6 N without embeddings, plus 6 L D T for causal attention."""
    model = config.model
    kv_width = model.width // model.num_heads * model.num_kv_heads
    attention = 2 * model.width * (model.width + kv_width)
    mlp = 3 * model.width * model.hidden
    matrices = model.num_layers * (attention + mlp) + model.width * model.vocab_size
    scores = model.num_layers * model.width * model.sequence_length
    return 6.0 * (matrices + scores)
