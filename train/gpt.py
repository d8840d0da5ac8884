"""A small GPT: the quick start.

Trains on the source code of Python's standard library, which every machine has, or on
your text, records (JSONL, Parquet) or token files (.bin) with
--config.data.path=FILE_OR_FOLDER and --config.data.tokenizer=FILE_OR_FOLDER.
"""

import functools
from pathlib import Path

import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

import jshard
from jshard.data.text.bigram import bigram_reference
from jshard.data.text.streamed_text import streamed_text
from jshard.data.text.text_data import text_data
from jshard.data.tokenizers.tokenizer import PYTHON, load_tokenizer
from jshard.inference.generation import continue_prompts
from jshard.models import gpt_huggingface as huggingface  # noqa: F401  read by jshard
from jshard.models.gpt import GPT, GPTConfig
from jshard.nn.attention import IMPLEMENTATIONS
from jshard.recipe import Key
from jshard.recipe.schedule.rates import learning_rate, rate_keys
from jshard.recipe.schedule.spikes import skipping, spike_keys

# Keys of data that are streamed, which recipes that change each text do not take.
STREAMED = ("dataset", "config", "split", "validation_rows", "shuffle_rows")


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "steps": 1000,
            "batch_size": 16,
            "seed": 0,
            "log_every": 25,
            "eval_every": 200,
            "eval_batches": 0,
            "checkpoint": {"every": 500},
            "model": {
                "vocab_size": Key(1024, "number of tokens", at_least=2),
                "sequence_length": Key(128, "tokens per example", at_least=1),
                "num_layers": Key(2, "number of blocks", at_least=1, at_most=10_000),
                "num_heads": Key(2, "attention heads, which divide width", at_least=1),
                "width": Key(
                    128, "width of the residual stream", at_least=1, at_most=1_000_000
                ),
                "dropout": Key(
                    0.0, "dropout rate, on embeddings and branches", at_least=0, below=1
                ),
                "tied": Key(False, "whether the head is the transposed embedding"),
                "loss_chunk": Key(
                    1024, "tokens per device whose logits exist at a time", at_least=1
                ),
                **loss_keys(),
                "attention": Key(
                    "auto",
                    "attention kernel; auto picks the fastest one available",
                    choices=IMPLEMENTATIONS,
                ),
            },
            "optimizer": {
                "learning_rate": 3e-3,
                **rate_keys(warmup_steps=40),
                "weight_decay": Key(
                    0.1,
                    "weight decay, multiplied by the learning rate (Hugging Face: 0)",
                    at_least=0,
                    at_most=1000,
                ),
                "decay_norms": Key(
                    False,
                    "whether biases, norms and DoRA's magnitudes decay, too (MaxText: "
                    "all, PEFT under Hugging Face's Trainer: the magnitudes)",
                ),
                "clip_norm": 1.0,
                "b1": 0.9,
                "b2": Key(
                    0.95,
                    "decay of the second moment (Hugging Face: 0.999)",
                    at_least=0,
                    below=1,
                ),
                "eps": 1e-8,
                "moment_dtype": Key(
                    "float32", "dtype of AdamW's state", choices=("float32", "bfloat16")
                ),
                **spike_keys(),
            },
            "data": {
                "path": Key(
                    "",
                    "text, JSONL, CSV, Parquet, or .bin of tokens: a file or folder; "
                    "by default the source of Python's standard library",
                    kind=Path,
                    hub="dataset",
                    bucket=True,
                ),
                "mixture": Key(
                    "",
                    "several sources instead of data.path: PATH:WEIGHT,PATH:WEIGHT",
                    hub="dataset",
                    mixture=True,
                ),
                "dataset": Key(
                    "",
                    "Hugging Face dataset, or a folder, to stream instead of "
                    "data.path; or NAME:WEIGHT,NAME:WEIGHT",
                    hub="stream",
                    mixture=True,
                ),
                "config": Key("", "configuration of data.dataset"),
                "split": Key("train", "split of data.dataset"),
                "validation_rows": Key(
                    1000,
                    "rows to validate with: of data.dataset's split 'validation', "
                    "or else held out of its first file",
                    at_least=0,
                ),
                "shuffle_rows": Key(
                    1000,
                    "rows of data.dataset to shuffle at a time; 0 is none",
                    at_least=0,
                ),
                "tokenizer": Key(
                    PYTHON,
                    "tokenizer.json, or a folder or Hugging Face name with it; python "
                    "is 1024 pieces of source code, and '' is bytes",
                    kind=Path,
                    hub="model",
                ),
                "text_key": Key("text", "name of the text in JSONL and Parquet"),
                "token_dtype": Key(
                    "uint16",
                    "dtype of raw .bin files",
                    choices=("uint16", "uint32", "int32", "int64"),
                ),
                "validation_fraction": Key(
                    0.05,
                    "share held out for validation, if no file is named for it",
                    at_least=0,
                    below=1,
                ),
                "pack": Key(
                    False, "pack whole documents, which do not attend to each other"
                ),
                "train_on": Key(
                    "answers",
                    "tokens of chats that are trained on; all is the default of TRL",
                    choices=("answers", "all"),
                ),
                "max_segments": Key(
                    0,
                    "most documents in a packed row, counting padding; 0 is any number",
                    at_least=0,
                    at_most=1_000_000,
                ),
            },
            "sample": {
                "prompt": Key(
                    "",
                    "prompt of the text sampled at evaluations; '' is how the "
                    "validation text begins, 'The ' without, and a class in Python's",
                ),
                "length": Key(120, "tokens to sample; 0 samples none", at_least=0),
                "temperature": Key(0.5, "sampling temperature", at_least=0.01),
            },
        }
    )


def loss_keys():
    """Returns the keys of the loss that all recipes of texts have in a group model."""
    return {
        "label_smoothing": Key(
            0.0,
            "share of each target that is spread over the vocabulary, in evaluations, "
            "too",
            at_least=0,
            below=1,
        ),
        "z_loss": Key(
            0.0, "factor of the squared logarithm of softmax's divisor", at_least=0
        ),
    }


def make_model(config, rngs):
    max_segments = config.data.max_segments
    return GPT(GPTConfig(**config.model, max_segments=max_segments), rngs=rngs)


def make_optimizer(config):
    options = config.optimizer
    adamw = optax.adamw(
        learning_rate(config),
        b1=options.b1,
        b2=options.b2,
        eps=options.eps,
        weight_decay=options.weight_decay,
        mask=None if options.decay_norms else decayed,
    )
    if options.moment_dtype == "bfloat16":
        adamw = jshard.optim.bf16_moments(adamw, seed=config.seed)
    clip = optax.clip_by_global_norm(options.clip_norm)
    return skipping(jshard.optim.chain(clip, adamw), config)


def decayed(params):
    """Applies weight decay to matrices and embeddings, not to biases and norms."""
    matrices = ("kernel", "embedding", "lora_a", "lora_b")  # adapters: finetune.py
    return nnx.map_state(lambda path, _: path[-1] in matrices, params)


def loss_fn(model, batch):
    packed = {}
    if "segment_ids" in batch:
        packed["segment_ids_BT"] = batch["segment_ids"]
        packed["positions_BT"] = batch["positions"]
    return model.loss(batch["inputs"], batch["targets"], batch["weights"], **packed)


def sequences(config):
    """Names what a batch has for each token; what is packed has all."""
    return ("inputs", "targets", "weights", "segment_ids", "positions")


def make_data(config, split):
    data = config.data
    options = {
        "sequence_length": config.model.sequence_length,
        "seed": config.seed,
        "vocab_size": config.model.vocab_size,
        "tokenizer": data.tokenizer,
        "text_key": data.text_key,
        "pack": data.pack,
        "all_tokens": data.get("train_on") == "all",
        "max_segments": data.max_segments,
    }
    if not data.get("dataset"):
        return text_data(
            data.path,
            split,
            **options,
            validation_fraction=data.validation_fraction,
            token_dtype=data.token_dtype,
            mixture=data.mixture,
        )
    if data.path or data.mixture:
        raise jshard.UserError("data.dataset stands instead of data.path and .mixture")
    return streamed_text(
        data.dataset,
        split,
        **options,
        config=data.config,
        train_split=data.split,
        validation_rows=data.validation_rows,
        shuffle_rows=data.shuffle_rows,
    )


def references(config):
    """Returns the loss of a bigram model of tokens on the evaluation data."""
    data = config.data
    if not config.eval_every or data.mixture or data.get("dataset") or data.pack:
        return {}
    windows = config.eval_batches * config.batch_size
    return bigram_reference(
        config.data.path,
        validation_fraction=config.data.validation_fraction,
        token_dtype=config.data.token_dtype,
        targets=windows * config.model.sequence_length or None,
        text_key=config.data.text_key,
        tokenizer=config.data.tokenizer,
    )


def flops_per_token(config):
    """Counts 6 N without embeddings, plus 6 L D T for causal attention."""
    model = config.model
    matrices = 12 * model.num_layers * model.width**2 + model.width * model.vocab_size
    attention = model.num_layers * model.width * model.sequence_length
    return 6.0 * (matrices + attention)


def sample(config):
    return sample_like(config, make_data)


def sample_like(config, make_data):
    """Returns what samples a text that begins like those of `make_data`."""
    options = config.sample
    if not options.length:
        return None
    tokenizer = load_tokenizer(config.data.tokenizer, config.model.vocab_size)
    prompt = prompt_tokens(config, make_data, tokenizer.encode)
    if not 0 < len(prompt) < config.model.sequence_length:
        raise jshard.UserError(
            f"--config.sample.prompt: has {len(prompt)} tokens; must have at least 1, "
            f"and fewer than model.sequence_length={config.model.sequence_length}"
        )
    batch = {
        "tokens": np.asarray(prompt[None], np.int32),
        "seed": np.asarray([config.seed], np.uint32),
    }
    length = min(options.length, config.model.sequence_length - len(prompt))
    return (
        functools.partial(
            continue_prompts, length=length, temperature=options.temperature
        ),
        batch,
        tokenizer.decode,
    )


def prompt_tokens(config, make_data, encode):
    """Returns the tokens of the prompt, by default the first of the validation text."""
    data, prompt = config.data, config.sample.prompt
    given = data.path or data.get("mixture") or data.get("dataset")
    if prompt or not given:
        return encode(prompt or "class Parser:\n    def")
    validation = make_data(config, "validation") if config.eval_every else None
    if validation is None:
        return encode("The ")
    example = next(iter(validation))
    segments = example.get("segment_ids")
    # Of a packed row the first document; else all but padding.
    own = example["weights"] > 0 if segments is None else segments == segments[0]
    return example["inputs"][own][: min(16, config.model.sequence_length - 1)]
