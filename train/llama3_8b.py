"""Llama 3 8B: 32 layers of 4096, 8192 tokens, bf16.

Four million tokens a step, with which Llama 3 begins: on 64 GPUs, eight sequences each;
--config.batch_size=64 is one each. Without --config.data.path it trains on the bytes of
Python's standard library; for the real thing point it at token files:
--config.data.path=FOLDER_OF_BIN_FILES (Llama 3 tokens, uint32).

Sizes and rates are from table 3 of Dubey et al. 2024, arXiv:2407.21783.
"""

from ml_collections import ConfigDict

from train import llama2_7b

make_model = llama2_7b.make_model
make_optimizer = llama2_7b.make_optimizer
loss_fn = llama2_7b.loss_fn
make_data = llama2_7b.make_data
learning_rate = llama2_7b.learning_rate
flops_per_token = llama2_7b.flops_per_token
references = llama2_7b.references


def get_config() -> ConfigDict:
    config = llama2_7b.get_config()
    config.steps = 1_200_000
    config.batch_size = 512
    config.policy = {
        "remat": "full",
        # Gradients leave in float32, as in section 3.3.2.
        "precision": {"compute": "bfloat16", "reduce": "float32"},
    }
    config.model.vocab_size = 128256
    config.model.sequence_length = 8192
    config.model.num_kv_heads = 8
    config.model.hidden = 14336
    config.model.rope_theta = 500_000.0
    config.model.loss_chunk = 1024
    config.data.token_dtype = "uint32"
    config.optimizer.learning_rate = 3e-4
    config.optimizer.warmup_steps = 8000
    return config
