"""T5 on text with gaps: the decoder writes what is missing in the encoder's text.

Span corruption as in Raffel et al. 2020, arXiv:1910.10683, section 3.1.4: of a text,
15 % of the tokens are taken out in spans of three on average, and a sentinel stands for
each. The targets are the sentinels, each followed by its span, and one more at the end:

    inputs     import <0>mpy as <1>
    targets    <0>nu<1>np<2>

Trains on the bytes of Python's standard library by default. The sample at the end shows
the first text that was held out, with what the model writes in its gaps; a run of two
minutes learns which bytes are likely, and to write words takes it longer.
"""

import sys

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

import jshard
from jshard.data.text.text_data import text_data
from jshard.data.tokenizers.tokenizer import load_tokenizer
from jshard.inference.generation import answer_inputs
from jshard.models import t5_huggingface as huggingface  # noqa: F401  read by jshard
from jshard.models.t5 import T5, T5Config
from jshard.recipe import Key
from jshard.recipes import gpt

learning_rate = gpt.learning_rate
make_optimizer = gpt.make_optimizer


def get_config() -> ConfigDict:
    config = gpt.get_config()
    config.steps = 300
    config.batch_size = 32
    config.eval_every = config.checkpoint.every = 100
    config.optimizer.warmup_steps = 20
    config.eval_batches = 40
    size = lambda value, what: Key(value, what, at_least=1, at_most=1_000_000)
    config.model = {
        # Bytes, and sentinels at the end.
        "vocab_size": Key(384, "number of tokens, sentinels included", at_least=2),
        "num_layers": size(2, "layers of the encoder"),
        "num_decoder_layers": size(2, "layers of the decoder"),
        "num_heads": size(4, "attention heads"),
        "head_width": size(32, "width of a head"),
        "width": size(128, "width of the residual stream"),
        "hidden": size(256, "width of the MLP"),
        "gated": Key(True, "whether the MLP is GEGLU (T5 v1.1), or ReLU"),
        "tied": Key(False, "whether the head is the transposed embedding (T5 v1.0)"),
        "buckets": Key(32, "number of classes of relative positions", at_least=4),
        "max_distance": size(128, "distance from which on positions share a class"),
        "norm_eps": Key(
            1e-6, "epsilon of norms, added to mean squares", above=0, at_most=1
        ),
        "dropout": Key(
            0.0, "dropout rate, on embeddings and branches", at_least=0, below=1
        ),
        "loss_chunk": size(1024, "tokens per device whose logits exist at a time"),
        **gpt.loss_keys(),
        "start_token": Key(0, "the decoder's first input token", at_least=0),
    }
    data = config.data
    data.tokenizer = ""
    for key in ("mixture", "pack", "train_on", "max_segments", *gpt.STREAMED):
        del data[key]
    data.sequence_length = Key(96, "tokens of a text before its gaps", at_least=2)
    data.noise = Key(0.15, "share of the tokens to take out", above=0, below=1)
    data.span = Key(3.0, "mean length of a gap, in tokens", at_least=1)
    data.first_sentinel = Key(
        0,
        "token of the first gap, those of the next count down; 0 is the last of the "
        "vocabulary (32099 in the T5 tokenizers)",
        at_least=0,
    )
    config.sample = {"fill": Key(True, "whether to fill the gaps of a held-out text")}
    return config


def make_model(config, rngs):
    return T5(T5Config(**config.model), rngs=rngs)


def loss_fn(model, batch):
    return model.loss(
        batch["inputs"], batch["targets"], batch["weights"], batch["mask"]
    )


def make_data(config, split):
    data = config.data
    texts = text_data(
        data.path,
        split,
        sequence_length=data.sequence_length,
        seed=config.seed,
        validation_fraction=data.validation_fraction,
        token_dtype=data.token_dtype,
        vocab_size=config.model.vocab_size,
        tokenizer=data.tokenizer,
        text_key=data.text_key,
    )
    corrupt = Corruption(config)
    return texts.random_map(
        # Of an incomplete last text, inputs with weight 0 are padding.
        lambda text, rng: corrupt(text["inputs"][text["weights"] > 0], rng),
        seed=config.seed,
    )


class Corruption:
    """Takes spans out of texts; all examples have the shapes of the longest text."""

    def __init__(self, config):
        data, vocab_size = config.data, config.model.vocab_size
        self.noise, self.span = data.noise, data.span
        self.first = data.first_sentinel or vocab_size - 1
        missing, spans = self.count(data.sequence_length)
        self.inputs = data.sequence_length - missing + spans
        self.targets = missing + spans + 1
        self.last = self.first - spans  # the lowest sentinel
        if self.last < 1 or self.first >= vocab_size:
            raise jshard.UserError(
                f"data.sequence_length={data.sequence_length} needs {spans + 1} "
                f"sentinels, tokens {self.last} to {self.first}, and model.vocab_size "
                f"is {vocab_size}"
            )

    def count(self, length: int) -> tuple[int, int]:
        """Returns how many tokens of a text are taken out, and in how many spans."""
        missing = min(max(round(length * self.noise), 1), length - 1)
        spans = min(max(round(missing / self.span), 1), missing, length - missing)
        return missing, spans

    def __call__(self, text, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Returns the example of a text, integers [n]."""
        if np.max(text, initial=0) >= self.last:
            raise jshard.UserError(
                f"token {np.max(text)} of the text is one of the sentinels, tokens "
                f"{self.last} to {self.first}: set data.first_sentinel, or raise "
                "model.vocab_size"
            )
        missing, spans = self.count(len(text))
        inputs, targets, position = [], [], 0
        kept = split_at_random(len(text) - missing, spans, rng)
        for i, (keep, gap) in enumerate(
            zip(kept, split_at_random(missing, spans, rng), strict=True)
        ):
            stop = position + keep
            inputs += [*text[position:stop], self.first - i]
            targets += [self.first - i, *text[stop : stop + gap]]
            position = stop + gap
        inputs += [*text[position:]]  # of a single token, nothing is taken out
        targets.append(self.first - spans)
        return {
            "inputs": _padded(inputs, self.inputs),
            "mask": np.arange(self.inputs) < len(inputs),
            "targets": _padded(targets, self.targets),
            "weights": (np.arange(self.targets) < len(targets)).astype(np.float32),
        }

    def filled(self, inputs: np.ndarray, targets: np.ndarray, tokenizer) -> str:
        """Returns the text of inputs, with the spans of targets in brackets."""
        spans, sentinels = {}, range(self.last, self.first + 1)
        span = []  # what comes before the first sentinel is dropped
        for token in targets.tolist():
            if token in sentinels:
                span = spans[token] = []
            else:
                span.append(token)
        text, gaps = "", np.isin(inputs, sentinels)
        for part in np.split(inputs, np.flatnonzero(gaps)):
            if part.size and part[0] in sentinels:
                found = np.asarray(spans.get(int(part[0]), []), np.int32)
                text, part = f"{text}[{tokenizer.decode(found)}]", part[1:]
            text += tokenizer.decode(part)
        return text


def split_at_random(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Returns ``parts`` numbers of at least 1 that sum to ``total``."""
    if not parts:
        return np.zeros(0, int)
    cuts = 1 + np.sort(rng.choice(total - 1, parts - 1, replace=False))
    return np.diff([0, *cuts, total])


def _padded(tokens: list[int], length: int) -> np.ndarray:
    return np.asarray([*tokens, *[0] * (length - len(tokens))], np.int32)


def references(config):
    """Returns the loss of a model of the frequencies of targets, on held-out texts."""
    if not config.eval_every:
        return {}
    most = config.eval_batches * config.batch_size or sys.maxsize
    train, held_out = _count(config, "train", 2000), _count(config, "validation", most)
    p = (train + 1) / np.sum(train + 1)
    return {"unigram model": -float(held_out @ np.log(p) / held_out.sum())}


def _count(config, split: str, most: int) -> np.ndarray:
    """Returns how often each token is a target in a split's first examples."""
    counts, data = np.zeros(config.model.vocab_size), make_data(config, split)
    for i in range(min(len(data), most)):
        example = data[i]
        np.add.at(counts, example["targets"], example["weights"])
    return counts


def sample(config):
    if not config.sample.fill:
        return None
    split = "validation" if config.data.validation_fraction else "train"
    example, corrupt = make_data(config, split)[0], Corruption(config)
    tokenizer = load_tokenizer(config.data.tokenizer, config.model.vocab_size)

    def fill(model, prompts):
        targets = answer_inputs(model, prompts, length=corrupt.targets)
        return jnp.concatenate([prompts["inputs"], targets], axis=1)

    def decode(tokens):
        inputs, targets = np.split(np.asarray(tokens), [corrupt.inputs])
        inputs = inputs[example["mask"]]
        filled = corrupt.filled(inputs, targets, tokenizer)
        truth = corrupt.filled(inputs, example["targets"], tokenizer)
        return f"{filled}\n\nand as it was written:\n{truth}"

    prompts = {key: example[key][None] for key in ("inputs", "mask")}
    prompts["seed"] = np.zeros(1, np.uint32)  # nothing is random
    return fill, prompts, decode
