"""Llama 2 7B: 32 layers of 4096, 4096 tokens, bf16.

Four million tokens a step, as in Llama 2: on 64 GPUs, four micro-batches of four
sequences each (--config.policy.accumulate). Without --config.data.path it trains on the
bytes of Python's standard library; for the real thing point it at token files:
--config.data.path=FOLDER_OF_BIN_FILES (Llama tokens, uint16).
"""

from ml_collections import ConfigDict

from jshard.training.keys import Key
from models.llama import Llama, LlamaConfig
from train import gpt

make_optimizer = gpt.make_optimizer
loss_fn = gpt.loss_fn
make_data = gpt.make_data
learning_rate = gpt.learning_rate
references = gpt.references


def get_config() -> ConfigDict:
    config = gpt.get_config()
    config.steps = 500_000
    config.batch_size = 1024
    config.eval_every = 1000
    config.eval_batches = 4
    config.checkpoint.every = 1000
    config.policy = {
        "remat": "dots",
        "accumulate": 4,
        "precision": {"compute": "bfloat16", "reduce": "float32"},
    }
    del config.model.dropout
    config.model.update(
        {
            "vocab_size": 32000,
            "sequence_length": 4096,
            "num_layers": 32,
            "num_heads": 32,
            "num_kv_heads": Key(
                32, "heads of keys and values, which divide num_heads", at_least=1
            ),
            "width": 4096,
            "hidden": Key(
                11008, "width of the gated MLP", at_least=1, at_most=1_000_000
            ),
            "rope_theta": Key(
                10000.0, "base of the wavelengths of rotary positions", above=0
            ),
            "norm_eps": Key(1e-5, "added to mean squares", above=0, at_most=1),
            "loss_chunk": 4096,
        }
    )
    # Touvron et al. 2023, arXiv:2307.09288, section 2.2.
    config.optimizer.learning_rate = 3e-4
    config.optimizer.warmup_steps = 2000
    del config.sample
    return config


def make_model(config, rngs):
    return Llama(LlamaConfig(**config.model), rngs=rngs)


def flops_per_token(config):
    """6 N without embeddings, and attention 6 L D T (half of it masked)."""
    model = config.model
    kv_width = model.width // model.num_heads * model.num_kv_heads
    attention = 2 * model.width * (model.width + kv_width)
    mlp = 3 * model.width * model.hidden
    matrices = model.num_layers * (attention + mlp) + model.width * model.vocab_size
    scores = model.num_layers * model.width * model.sequence_length
    return 6.0 * (matrices + scores)
