"""Llama 3 70B: llama3_8b.py with 80 layers of 8192."""

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
    config.model.num_layers = 80
    config.model.num_heads = 64
    config.model.width = 8192
    config.model.hidden = 28672
    config.optimizer.learning_rate = 1.5e-4
    return config
