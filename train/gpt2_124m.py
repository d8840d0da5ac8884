"""GPT-2 124M: 12 layers of 768, 1024 tokens, bf16, for one or more GPUs.

Half a million tokens a step, as in GPT-2, in as few micro-batches as the memory of the
GPUs allows. Without --config.data.path it trains on the bytes of Python's standard
library; for the real thing point it at token files:
--config.data.path=FOLDER_OF_BIN_FILES (GPT-2 tokens, uint16).
"""

from ml_collections import ConfigDict

from jshard.recipes import gpt

make_model = gpt.make_model
make_optimizer = gpt.make_optimizer
loss_fn = gpt.loss_fn
make_data = gpt.make_data
sequences = gpt.sequences
learning_rate = gpt.learning_rate
references = gpt.references
flops_per_token = gpt.flops_per_token
sample = gpt.sample


def get_config() -> ConfigDict:
    config = gpt.get_config()
    config.steps = 20_000
    config.batch_size = 512
    config.eval_every = 500
    config.eval_batches = 4
    config.checkpoint.every = 1000
    config.policy = {
        "remat": "fit",
        "accumulate": "fit",
        "unroll": True,
        "precision": {"compute": "bfloat16", "reduce": "float32"},
    }
    config.data.tokenizer = ""
    config.model.vocab_size = 50304  # 50257, up to a multiple of 128
    config.model.sequence_length = 1024
    config.model.num_layers = 12
    config.model.num_heads = 12
    config.model.width = 768
    config.model.tied = True
    config.model.loss_chunk = 8192
    config.optimizer.learning_rate = 6e-4
    config.optimizer.warmup_steps = 700
    return config
