"""Fine-tunes a pretrained decoder: LoRA adapters beside it, or all of it.

    python -m jshard.train --config=finetune.py --config.model.from=DIR
        --config.checkpoint.restore=DIR --config.data.path=TEXT

By default the adapters of every linear layer are trained, beside weights that are
frozen in bfloat16 (Hu et al. 2021, arXiv:2106.09685; all layers as in Dettmers et al.
2023, arXiv:2305.14314, section 4). --config.lora.rank=0 trains the model itself. With
--config.policy.precision.gather=int8 the frozen weights travel in one byte.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

import jshard
from jshard.models import llama_huggingface as huggingface  # read by jshard, too
from jshard.recipe import Key
from jshard.recipes import gpt, llama
from jshard.storage.hub.adapters.modules_to_save import trained_whole
from jshard.storage.hub.adapters.targets import add_lora_arguments

loss_fn = llama.loss_fn
sequences = gpt.sequences

RATES = (2e-4, 1e-5)  # of adapters, and of the model itself


def get_config() -> ConfigDict:
    config = llama.get_config("3-8b")
    config.steps = 1000
    config.batch_size = 32
    config.eval_every = 100
    config.eval_batches = 8
    config.checkpoint = {"every": 100}
    # Gradients of the inputs pass through every layer, so that these are bfloat16's.
    precision = {"compute": "bfloat16", "reduce": "float32"}
    config.policy = {"remat": "full", "precision": precision}
    # The model's own sequence length is the longest text that it was made for.
    config.data.sequence_length = Key(1024, "tokens per example", at_least=1)
    config.model.neftune_alpha = Key(
        0.0,
        "noise on embeddings in training, uniform in +-X / sqrt(tokens of a row * "
        "width) (NEFTune)",
        at_least=0,
    )
    config.sample = gpt.get_config().sample
    config.lora = {
        "rank": Key(16, "rank of the adapters; 0 trains the model itself", at_least=0),
        "alpha": Key(32.0, "adapters are scaled by alpha / rank", above=0),
        "targets": Key(
            ("*",),
            "patterns of the paths of adapted layers, e.g. attention.q,attention.v; "
            "* is every linear layer but the head; head, embed and experts.* as well; "
            "or as PEFT has them: q_proj,v_proj, a regular expression, all-linear",
            noun="PATTERN,...",
        ),
        "layers_to_transform": Key(
            (), "numbers of the blocks with adapters; () is all", noun="N,..."
        ),
        "modules_to_save": Key(
            (),
            "modules that are trained whole, too, in float32, by the ends of PEFT's "
            "names: lm_head,embed_tokens",
            noun="NAME,...",
        ),
        "rank_pattern": Key(
            (), "other ranks, by PEFT's names of layers", noun="NAME:RANK,..."
        ),
        "alpha_pattern": Key(
            (), "other alphas, by PEFT's names of layers", noun="NAME:ALPHA,..."
        ),
        "rslora": Key(False, "scales adapters by alpha / sqrt(rank) instead (rsLoRA)"),
        "dora": Key(False, "trains the norm of each column of the weights, too (DoRA)"),
        "dropout": Key(
            0.0, "rate of the dropout of the adapters' inputs", at_least=0, below=1
        ),
        "base_dtype": Key(
            "bfloat16",
            "dtype of the frozen weights in memory",
            choices=("bfloat16", "float32"),
        ),
    }
    config.optimizer.update(
        {
            "learning_rate": rate_key(RATES),
            "warmup_steps": 50,
            "weight_decay": 0.0,
            "b2": 0.999,
        }
    )
    return config


def rate_key(rates: tuple[float, float]) -> Key:
    """Returns the key of a learning rate that depends on what is trained."""
    return Key(
        "auto",
        f"peak of the learning rate schedule; auto is {rates[0]} for adapters, and "
        f"{rates[1]} without",
        kind=float,
        also=("auto",),
        at_least=0,
        at_most=1000,
    )


def make_model(config, rngs):
    model, lora = llama.make_model(config, rngs), config.lora
    if not lora.rank:
        return model
    if config.model.correction_rate:
        raise jshard.UserError(
            "model.correction_rate changes the model beneath its adapters, which are "
            "saved without it: set it to 0, or lora.rank=0"
        )
    in_base_dtype = lambda x: x.astype(jnp.dtype(lora.base_dtype))
    frozen = nnx.All(nnx.Param, nnx.Not(trainable(config)))
    nnx.update(model, jax.tree.map(in_base_dtype, nnx.state(model, frozen)))
    jshard.nn.add_lora(
        model,
        rank=lora.rank,
        alpha=lora.alpha,
        **add_lora_arguments(
            huggingface.tensors(config.model),
            targets=lora.targets,
            rank_pattern=lora.rank_pattern,
            alpha_pattern=lora.alpha_pattern,
            layers_to_transform=lora.layers_to_transform,
            modules_to_save=lora.modules_to_save,
        ),
        dropout=lora.dropout,
        rank_stabilized=lora.rslora,
        dora=lora.dora,
        rngs=rngs,
    )
    return model


def trainable(config):
    if not config.lora.rank:
        return nnx.Param
    names = config.lora.modules_to_save
    whole = trained_whole(names, huggingface.tensors(config.model)) if names else ()
    if config.model.tied and any(name.endswith("embedding") for name in whole):
        raise jshard.UserError(
            "lora.modules_to_save: with model.tied the head is the embedding's table, "
            "of which PEFT would train a copy: name neither"
        )
    in_one = lambda path, _: ".".join(map(str, path)) in whole
    return nnx.Any(nnx.LoRAParam, in_one) if whole else nnx.LoRAParam


def make_data(config, split):
    return gpt.make_data(of_examples(config), split)


def sample(config):
    return gpt.sample_like(config, make_data)


def flops_per_token(config):
    """Counts 6 N, or 4 N where the matrices are frozen, and attention's scores."""
    matrices, scores = llama.products_per_token(of_examples(config))
    return (4.0 if config.lora.rank else 6.0) * matrices + 6.0 * scores


def of_examples(config):
    """Returns the config of a model whose sequences are as long as the examples."""
    config = config.copy_and_resolve_references()
    config.model.sequence_length = config.data.sequence_length
    return config


def learning_rate(config):
    return gpt.learning_rate(with_rate(config))


def make_optimizer(config):
    return gpt.make_optimizer(with_rate(config))


def with_rate(config, rates=RATES):
    """Returns the config with a number for the learning rate."""
    config = config.copy_and_resolve_references()
    if config.optimizer.learning_rate == "auto":
        with config.ignore_type():
            config.optimizer.learning_rate = rates[not config.lora.rank]
    return config
