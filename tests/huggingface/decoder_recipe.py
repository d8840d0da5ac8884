"""A recipe that trains any decoder of models/llama.py on given tokens."""

RECIPE = """\
import grain
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

import jshard
from models import llama_huggingface as huggingface
from models.llama import Llama, LlamaConfig


def get_config():
    return ConfigDict(
        {
            "steps": 1,
            "batch_size": 8,
            "log_every": 1,
            "policy": {"min_shard_elements": 0},
            "model": {"loss_chunk": 256},
            "tokens": "tokens.npy",  # rows, one token more than is trained on
            "rate": 0.0,
        }
    )


def make_model(config, rngs):
    return Llama(LlamaConfig(**config.model), rngs=rngs)


def make_optimizer(config):  # the defaults of torch.optim.AdamW
    return optax.adamw(config.rate, weight_decay=0.01)


def loss_fn(model, batch):
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    return model.loss(inputs, targets, jnp.ones(targets.shape, jnp.float32))


def make_data(config, split):
    rows = np.load(config.tokens).astype(np.int32)
    return grain.MapDataset.source(rows).map(lambda row: {"tokens": row}).repeat()
"""
