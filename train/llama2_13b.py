"""Llama 2 13B: llama2_7b.py with 40 layers of 5120."""

from ml_collections import ConfigDict

from train import llama2_7b

make_model = llama2_7b.make_model
make_optimizer = llama2_7b.make_optimizer
loss_fn = llama2_7b.loss_fn
make_data = llama2_7b.make_data
learning_rate = llama2_7b.learning_rate
references = llama2_7b.references
flops_per_token = llama2_7b.flops_per_token


def get_config() -> ConfigDict:
    config = llama2_7b.get_config()
    config.model.num_layers = 40
    config.model.num_heads = config.model.num_kv_heads = 40
    config.model.width = 5120
    config.model.hidden = 13824
    return config
