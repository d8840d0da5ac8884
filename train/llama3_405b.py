"""Llama 3 405B: llama3_8b.py with 126 layers of 16384."""

from ml_collections import ConfigDict

from train import llama3_8b

make_model = llama3_8b.make_model
make_optimizer = llama3_8b.make_optimizer
loss_fn = llama3_8b.loss_fn
make_data = llama3_8b.make_data
learning_rate = llama3_8b.learning_rate
flops_per_token = llama3_8b.flops_per_token


def get_config() -> ConfigDict:
    config = llama3_8b.get_config()
    config.model.num_layers = 126
    config.model.num_heads = 128
    config.model.width = 16384
    config.model.hidden = 53248
    config.optimizer.learning_rate = 8e-5
    return config
