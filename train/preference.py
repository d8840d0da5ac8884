"""Preference training of a decoder: DPO or ORPO, on pairs of answers.

    python -m jshard.train --config=preference.py --config.model.from=DIR
        --config.checkpoint.restore=DIR --config.data.tokenizer=DIR
        --config.data.path=PAIRS

trains adapters, as finetune.py does, so that of two answers one becomes likelier and
the other less likely (Rafailov et al. 2023, arXiv:2305.18290). The reference is the
frozen model with its adapters off, so there is no second model in memory.
--config.preference.loss=orpo needs no reference (Hong et al. 2024, arXiv:2403.07691).
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

import jshard
from jshard.data.preferences.preference_data import (
    named_preference_data,
    preference_data,
)
from jshard.models import llama_huggingface as huggingface  # noqa: F401  read by jshard
from jshard.nn.preference import Answers, dpo, orpo, sum_of_answers
from jshard.recipe import Key
from jshard.recipes import finetune, gpt, llama

trainable = finetune.trainable

# Those of Zephyr's DPO (github.com/huggingface/alignment-handbook, recipes/
# zephyr-7b-beta/dpo): of adapters, and of the model itself.
RATES = (5e-6, 5e-7)


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a model is trained for: the keys of config.preference."""

    loss: str
    beta: float
    label_smoothing: float
    length_normalized: bool


KEPT = ("reference_chosen", "reference_rejected")  # in batches, if it is computed once


def get_config() -> ConfigDict:
    config = finetune.get_config()
    config.preference = {
        "loss": Key(
            "dpo",
            "dpo (TRL's sigmoid), robust, hinge and ipo compare the answers with those "
            "of a reference; orpo has none, and trains on the chosen texts, too",
            choices=("dpo", "robust", "hinge", "ipo", "orpo"),
        ),
        "beta": Key(
            0.1,
            "weight of the distance from the reference; of ORPO, its lambda",
            above=0,
        ),
        "label_smoothing": Key(
            0.0,
            "share of the preferences that may be wrong, for robust, as in TRL, and "
            "dpo (conservative DPO; TRL's sigmoid has none, and its aot sorts margins "
            "besides)",
            at_least=0,
            below=0.5,
        ),
        "length_normalized": Key(
            False,
            "whether answers are compared by their means over tokens, as ipo always "
            "does (of dpo: TRL's sigmoid_norm)",
        ),
        "keep_reference": Key(
            False,
            "whether the reference, the model that the run starts from, is computed "
            "once, before the first step, and kept in the run's folder",
        ),
    }
    config.optimizer.learning_rate = finetune.rate_key(RATES)
    data = config.data
    for key in (*gpt.loss_keys(), "neftune_alpha"):
        del config.model[key]
    of_texts = ("mixture", "text_key", "token_dtype", "pack", "train_on")
    for key in (*of_texts, "max_segments"):
        del data[key]
    data.path = Key(
        "",
        "JSONL or Parquet of 'prompt', 'chosen' and 'rejected', texts or chats: a file "
        "or folder",
        kind=Path,
        hub="dataset",
        bucket=True,
    )
    data.dataset = Key(
        "", "Hugging Face dataset of them, streamed, instead of data.path", hub="stream"
    )
    data.sequence_length = Key(
        1024, "tokens of a prompt with an answer; longer ones are cut", at_least=1
    )
    return config


def check(config):
    """Raises a UserError for keys that do not go together."""
    options, restored = config.preference, config.checkpoint.get("adapters", "")
    if options.loss == "orpo":
        for name in ("label_smoothing", "length_normalized", "keep_reference"):
            if options[name]:
                raise jshard.UserError(
                    f"preference.{name} is for losses with a reference; leave it out "
                    "with preference.loss=orpo"
                )
        return
    if options.label_smoothing and options.loss not in ("dpo", "robust"):
        raise jshard.UserError(
            "preference.label_smoothing is for dpo and robust; leave it out with "
            f"preference.loss={options.loss}"
        )
    if not options.keep_reference and not config.lora.rank:
        raise jshard.UserError(
            "lora.rank=0 trains the model itself, whose reference would be a second "
            "model: set preference.keep_reference=True, which computes it once, before "
            "the first step"
        )
    elif not options.keep_reference and restored:
        raise jshard.UserError(
            f"checkpoint.adapters={restored}: the reference would be the model without "
            "them: set preference.keep_reference=True for the model with them"
        )
    elif not options.keep_reference and config.lora.modules_to_save:
        raise jshard.UserError(
            "lora.modules_to_save: the reference would have the modules as they are "
            "trained: set preference.keep_reference=True"
        )


def make_model(config, rngs):
    check(config)
    model: Any = finetune.make_model(config, rngs)
    fields = {x.name: config.preference[x.name] for x in dataclasses.fields(Objective)}
    model.objective = Objective(**fields)
    return model


def loss_fn(model, batch):
    objective = model.objective
    policy, chosen_texts, penalty = read(model, batch)
    if objective.loss == "orpo":
        loss, metrics = orpo(policy, chosen_texts, beta=objective.beta)
    else:
        loss, metrics = dpo(
            policy,
            reference_of(model, batch, policy),
            beta=objective.beta,
            kind=objective.loss,
            label_smoothing=objective.label_smoothing,
            length_normalized=objective.length_normalized,
        )
    metrics |= {
        "log_prob_chosen": jshard.Mean(jnp.sum(policy.chosen), policy.chosen.size),
        "log_prob_rejected": jshard.Mean(
            jnp.sum(policy.rejected), policy.rejected.size
        ),
    }
    return (loss if penalty is None else loss + penalty), metrics


def reference_of(model, batch, policy):
    """Returns the reference's answers, kept or computed."""
    if KEPT[0] in batch:
        return policy._replace(chosen=batch[KEPT[0]], rejected=batch[KEPT[1]])
    with jshard.nn.adapters_off(model):
        return jax.lax.stop_gradient(read(model, batch)[0])


def precompute(config):
    if not config.preference.keep_reference:
        return None

    def reference(model, batch):
        answers, *_ = read(model, batch)
        return dict(zip(KEPT, answers, strict=False))

    return reference


def read(model, batch):
    """Returns the answers, the chosen texts' cross-entropy, and the model's penalty."""
    names = ("inputs", "targets", "texts", "answers")
    rows = {name: _rows(batch[name]) for name in names}
    is_text_RT = rows["texts"]
    log_probs_RT, penalty = model.log_probs(rows["inputs"], rows["targets"], is_text_RT)
    sums, lengths = sum_of_answers(log_probs_RT, rows["answers"])
    answers = Answers(*jnp.split(sums, 2), *jnp.split(lengths, 2))
    half = len(sums) // 2
    is_text_PT, losses_PT = rows["texts"][:half], -log_probs_RT[:half]
    total = jnp.sum(jnp.where(is_text_PT, losses_PT, 0))
    return answers, jshard.Mean(total, jnp.sum(is_text_PT)), penalty


def sequences(config):
    return ("inputs", "targets", "texts", "answers")


def _rows(x_PS: jax.Array) -> jax.Array:
    """Returns the chosen rows (P, T), and below them the rejected ones."""
    return jnp.concatenate([x_PS[:, 0::2], x_PS[:, 1::2]])


def make_data(config, split):
    data, kept = config.data, config.preference.keep_reference
    if bool(data.path) == bool(data.dataset):
        raise jshard.UserError(
            "preferences are read from data.path, JSONL or Parquet with 'prompt', "
            "'chosen' and 'rejected', or from data.dataset; give one of them"
        )
    options = {
        "sequence_length": data.sequence_length,
        "seed": config.seed,
        "tokenizer": data.tokenizer,
        "vocab_size": config.model.vocab_size,
    }
    pairs: Any
    if data.dataset:
        pairs = named_preference_data(
            data.dataset,
            split,
            **options,
            config=data.config,
            train_split=data.split,
            validation_rows=data.validation_rows,
            shuffle_rows=data.shuffle_rows,
            kept=kept,
        )
    else:
        pairs = preference_data(
            data.path, split, **options, validation_fraction=data.validation_fraction
        )
    if not kept or pairs is None:
        return pairs
    more = dict.fromkeys(KEPT, np.float32(np.nan))  # until it is computed
    return pairs.map(lambda pair: pair | more)


def sample(config):
    def chosen_texts(config, split):
        pairs = make_data(config, split)
        return pairs and pairs.map(
            lambda x: {"inputs": x["inputs"][::2], "weights": x["texts"][::2]}
        )

    return gpt.sample_like(config, chosen_texts)


def references(config):
    """Returns the loss of a model that is its reference still."""
    options = config.preference
    if not config.eval_every or options.loss == "orpo":
        return {}
    none = {"hinge": 1.0, "ipo": 1 / (2 * options.beta) ** 2}
    return {"no preference": none.get(options.loss, math.log(2))}


def flops_per_token(config):
    """Counts finetune.py's, and a forward of the reference."""
    flops = finetune.flops_per_token(config)
    if config.preference.loss != "orpo" and not config.preference.keep_reference:
        matrices, scores = llama.products_per_token(finetune.of_examples(config))
        flops += 2.0 * (matrices + scores)
    return flops


def learning_rate(config):
    return gpt.learning_rate(finetune.with_rate(config, RATES))


def make_optimizer(config):
    return gpt.make_optimizer(finetune.with_rate(config, RATES))
