"""A small GPT on bytes: the quick start.

Trains on the source text of Python's standard library, which every machine has, or on
any text by --config.data.path=FILE_OR_FOLDER (also .bin files of tokens).
"""

import functools

import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

import jshard
from jshard.training.bigram import bigram_reference
from jshard.training.text import BYTE_VOCAB, decode, encode, text_data
from models.gpt import GPT, GPTConfig, generate


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "steps": 200,
            "batch_size": 32,
            "seed": 0,
            "log_every": 10,
            "eval_every": 100,
            "eval_batches": 0,
            "checkpoint": {"every": 100},
            "model": {
                "vocab_size": BYTE_VOCAB,
                "sequence_length": 128,
                "num_layers": 4,
                "num_heads": 4,
                "width": 128,
                "dropout": 0.0,
                "tied": False,
                "loss_chunk": 1024,
                "attention": "auto",
            },
            "optimizer": {
                "learning_rate": 3e-3,
                "warmup_steps": 20,
                "weight_decay": 0.1,
                "clip_norm": 1.0,
                "b2": 0.95,
                "moment_dtype": "float32",  # or bfloat16
            },
            "data": {
                "path": "",
                "token_dtype": "uint16",
                "validation_fraction": 0.05,
            },
            "sample": {"prompt": "def ", "length": 120, "temperature": 0.7},
        }
    )


def make_model(config, rngs):
    return GPT(GPTConfig(**config.model), rngs=rngs)


def learning_rate(config):
    peak = config.optimizer.learning_rate
    warmup = min(config.optimizer.warmup_steps, config.steps // 2)
    return optax.warmup_cosine_decay_schedule(
        peak / (warmup + 1), peak, warmup, config.steps, end_value=peak / 10
    )


def make_optimizer(config):
    options = config.optimizer
    adamw = optax.adamw(
        learning_rate(config),
        b2=options.b2,
        weight_decay=options.weight_decay,
        mask=decayed,
    )
    if options.moment_dtype == "bfloat16":
        adamw = jshard.bf16_moments(adamw, seed=config.seed)
    elif options.moment_dtype != "float32":
        raise jshard.UserError(
            f"--config.optimizer.moment_dtype={options.moment_dtype}: "
            "possible: float32, bfloat16"
        )
    return optax.chain(optax.clip_by_global_norm(options.clip_norm), adamw)


def decayed(params):
    """Weight decay is for matrices and embeddings: not for biases and norms."""
    return nnx.map_state(lambda path, _: path[-1] in ("kernel", "embedding"), params)


def loss_fn(model, batch):
    return model.loss(batch["inputs"], batch["targets"], batch["weights"])


def make_data(config, split):
    return text_data(
        config.data.path,
        split,
        sequence_length=config.model.sequence_length,
        seed=config.seed,
        validation_fraction=config.data.validation_fraction,
        token_dtype=config.data.token_dtype,
        vocab_size=config.model.vocab_size,
    )


def references(config):
    """The loss of a model of pairs of bytes, on what evaluations see."""
    if not config.eval_every:
        return {}
    windows = config.eval_batches * config.batch_size
    return bigram_reference(
        config.data.path,
        validation_fraction=config.data.validation_fraction,
        token_dtype=config.data.token_dtype,
        targets=windows * config.model.sequence_length or None,
    )


def flops_per_token(config):
    """6 N without embeddings, and attention 6 L D T (half of it masked)."""
    model = config.model
    matrices = 12 * model.num_layers * model.width**2 + model.width * model.vocab_size
    attention = model.num_layers * model.width * model.sequence_length
    return 6.0 * (matrices + attention)


def sample(config):
    options = config.sample
    prompt = encode(options.prompt)
    batch = {
        "tokens": np.asarray(prompt[None], np.int32),
        "seed": np.asarray([config.seed], np.uint32),
    }
    length = min(options.length, config.model.sequence_length - len(prompt))
    return (
        functools.partial(generate, length=length, temperature=options.temperature),
        batch,
        to_text,
    )


def to_text(tokens):
    """Bytes as text; tokens of another vocabulary as their numbers."""
    if np.max(tokens) < BYTE_VOCAB:
        return decode(tokens)
    return " ".join(map(str, tokens))
