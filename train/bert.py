"""A small BERT on bytes: masked-language modelling of Python's standard library.

Trains on your text, records (JSONL, Parquet) or token files (.bin) with
--config.data.path=FILE_OR_FOLDER and --config.data.tokenizer=FILE_OR_FOLDER;
--config.model.from=DIR takes the sizes from a Hugging Face folder, and
--config.checkpoint.restore=DIR its weights.

The model restores 15% of the tokens, of which 80% are replaced by the mask token and
10% by random ones (Devlin et al. 2018, arXiv:1810.04805, section 3.1). There is no next
sentence prediction, without which models do as well or better (Liu et al. 2019,
arXiv:1907.11692, section 4.2).
"""

import functools

import numpy as np
from ml_collections import ConfigDict

import jshard
from jshard.data.tokenizers.tokenizer import BYTE_VOCAB, FileTokenizer, load_tokenizer
from jshard.models import bert_huggingface as huggingface  # noqa: F401  read by jshard
from jshard.models.bert import ACTIVATIONS, Bert, BertConfig
from jshard.recipe import Key
from jshard.recipes import gpt

make_optimizer = gpt.make_optimizer
learning_rate = gpt.learning_rate


def get_config() -> ConfigDict:
    config = gpt.get_config()
    del config.sample, config.model.tied
    config.steps = 200
    config.batch_size = 32
    config.eval_every = config.checkpoint.every = 100
    config.optimizer.warmup_steps = 20
    config.model.num_layers = config.model.num_heads = 4
    config.data.tokenizer = ""
    config.model.vocab_size = BYTE_VOCAB + 1  # and the mask token
    config.model.hidden = Key(512, "width of the MLP", at_least=1, at_most=1_000_000)
    config.model.token_types = Key(2, "number of kinds of tokens", at_least=1)
    config.model.norm_eps = Key(
        1e-12, "epsilon of norms, added to variances", above=0, at_most=1
    )
    config.model.activation = Key(
        "gelu", "activation of the MLP", choices=tuple(ACTIVATIONS)
    )
    config.model.pooler = Key(False, "whether the first token has a pooler")
    for key in ("train_on", *gpt.STREAMED):
        del config.data[key]
    config.data.mask_rate = Key(
        0.15, "share of the tokens to restore", above=0, below=1
    )
    config.data.mask_token = Key(
        "auto",
        "id of the mask token; auto is the tokenizer's mask_token, and 256 for bytes",
        kind=int,
        also=("auto",),
        at_least=0,
    )
    return config


def make_model(config, rngs):
    # Without packing, padding is a segment, and only in the last rows of validation.
    max_segments = config.data.max_segments if config.data.pack else 2
    return Bert(BertConfig(**config.model, max_segments=max_segments), rngs=rngs)


def loss_fn(model, batch):
    inputs = {
        f"{name}_BT": batch[name]
        for name in ("positions", "segment_ids")
        if name in batch
    }
    names = ("inputs", "places", "targets", "weights")
    return model.loss(*(batch[name] for name in names), **inputs)


def sequences(config):
    """Names what a batch has for each token, and for each masked one."""
    return ("places", *gpt.sequences(config))


def make_data(config, split):
    token, special = mask_token(config)
    mask = functools.partial(
        masked,
        rate=config.data.mask_rate,
        mask_token=token,
        vocab_size=config.model.vocab_size,
        special=special,
        padded=split == "validation",
    )
    # The generator depends on the seed and the number of the example alone: every epoch
    # has new masks, each mesh the same, and validation the same every time.
    return gpt.make_data(config, split).random_map(mask, seed=config.seed)


def masked(example, rng, *, rate, mask_token, vocab_size, special, padded):
    """Masks a row of tokens.

    Args:
      example: of ``text_data``.
      rng: a NumPy generator.
      rate: the share of tokens to mask.
      mask_token: what most of them become.
      vocab_size: random ones are below it.
      special: ids that are never masked.
      padded: whether the row may have padding, which the model then does not see.

    Returns:
      "inputs", int32[T]; "places", "targets", int32[M], and "weights", float32[M], of
      masked tokens, M being ``rate`` of T, with weights 0 where there are fewer; and
      the "segment_ids" and "positions" of packed rows.
    """
    tokens = example["inputs"].copy()
    packed = ("segment_ids", "positions")
    about = {key: example[key] for key in packed if key in example}
    if "segment_ids" not in about and padded:
        # weights[t] says whether there is a token t+1.
        real = np.append(True, example["weights"][:-1] > 0)
        about["segment_ids"] = real.astype(np.int32)
    real = about.get("segment_ids", np.ones(len(tokens), np.int32)) > 0
    candidates = np.flatnonzero(real & ~np.isin(tokens, special))
    count = min(max(1, round(rate * np.sum(real))), len(candidates))
    chosen = np.sort(rng.permutation(candidates)[:count])

    M = max(1, round(rate * len(tokens)))
    places, targets = np.zeros(M, np.int32), np.zeros(M, np.int32)
    weights = np.zeros(M, np.float32)
    places[:count], targets[:count], weights[:count] = chosen, tokens[chosen], 1
    draw = rng.random(count)
    others = rng.integers(0, vocab_size, count)
    tokens[chosen] = np.select(
        [draw < 0.8, draw < 0.9], [mask_token, others], tokens[chosen]
    )
    masks = {"places": places, "targets": targets, "weights": weights}
    return {"inputs": tokens, **masks, **about}


def mask_token(config):
    """Returns the id of the mask token, and those that are never masked."""
    data, vocab_size = config.data, config.model.vocab_size
    tokenizer = load_tokenizer(data.tokenizer, vocab_size)
    if not isinstance(tokenizer, FileTokenizer):
        token, special = tokenizer.vocab_size, [tokenizer.eos_id]
    else:
        numbers = tokenizer.special_ids
        token, special = numbers.get("mask_token"), list(numbers.values())
    if data.mask_token != "auto":
        token = data.mask_token
    if token is None:
        raise jshard.UserError(
            f"{data.tokenizer}: names no mask_token: set --config.data.mask_token=ID"
        )
    if token >= vocab_size:
        raise jshard.UserError(
            f"--config.data.mask_token: {token} is not below "
            f"model.vocab_size={vocab_size}"
        )
    return token, special


def flops_per_token(config):
    """Counts 6 N of the blocks, the scores, and the head for masked tokens alone."""
    model = config.model
    D, F, T = model.width, model.hidden, model.sequence_length
    blocks = model.num_layers * (4 * D * D + 2 * D * F)
    scores = model.num_layers * 2 * D * T
    head = config.data.mask_rate * (D * D + D * model.vocab_size)
    return 6.0 * (blocks + scores + head)
