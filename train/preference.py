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

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

import jshard
from jshard.config.keys import Key
from jshard.data.preference_pairs import preference_data
from jshard.models import llama_huggingface as huggingface  # noqa: F401  read by jshard
from jshard.nn.preference import Answers, dpo, orpo, sum_of_answers
from jshard.recipes import finetune, gpt, llama

sample = finetune.sample
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


def get_config() -> ConfigDict:
    config = finetune.get_config()
    config.preference = {
        "loss": Key(
            "dpo",
            "dpo compares the answers with those of a reference; orpo has none, and "
            "trains on the chosen texts, too",
            choices=("dpo", "orpo"),
        ),
        "beta": Key(0.1, "how much a change counts; ORPO's lambda", above=0),
        "label_smoothing": Key(
            0.0,
            "share of the preferences that may be wrong, for dpo",
            at_least=0,
            below=0.5,
        ),
        "length_normalized": Key(
            False, "whether dpo compares answers by their means over tokens"
        ),
    }
    config.optimizer.learning_rate = finetune.rate_key(RATES)
    data = config.data
    for key in ("mixture", "text_key", "token_dtype", "pack", "max_segments"):
        del data[key]
    del data["validation_rows"], data["shuffle_rows"]
    data.path = Key(
        "",
        "JSONL or Parquet of 'prompt', 'chosen' and 'rejected', texts or chats: a file "
        "or folder",
        kind=Path,
        hub="dataset",
        bucket=True,
    )
    data.dataset = Key(
        "", "Hugging Face dataset of them, instead of data.path", hub="stream"
    )
    data.sequence_length = Key(
        1024, "tokens of a prompt with an answer; longer ones are cut", at_least=1
    )
    return config


def make_model(config, rngs):
    objective = Objective(**config.preference)
    if objective.loss == "orpo" and (
        objective.label_smoothing or objective.length_normalized
    ):
        raise jshard.UserError(
            "preference.label_smoothing and preference.length_normalized are for "
            "preference.loss=dpo; leave them out with orpo"
        )
    if objective.loss == "dpo" and not config.lora.rank:
        raise jshard.UserError(
            "lora.rank=0 trains the model itself, and the reference of "
            "preference.loss=dpo would be a second model: train adapters, whose "
            "reference is the model without them, or use preference.loss=orpo"
        )
    model = finetune.make_model(config, rngs)
    model.objective = objective
    return model


def loss_fn(model, batch):
    objective = model.objective
    policy, chosen_texts, penalty = read(model, batch)
    if objective.loss == "orpo":
        loss, metrics = orpo(policy, chosen_texts, beta=objective.beta)
    else:
        with jshard.nn.adapters_off(model):
            reference = jax.lax.stop_gradient(read(model, batch)[0])
        loss, metrics = dpo(
            policy,
            reference,
            beta=objective.beta,
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


def read(model, batch):
    """Returns the answers, the chosen texts' cross-entropy, and the model's penalty."""
    rows = {name: _rows(x_PS) for name, x_PS in batch.items()}
    log_probs_RT, penalty = model.log_probs(rows["inputs"], rows["targets"])
    sums, lengths = sum_of_answers(log_probs_RT, rows["answers"])
    answers = Answers(*jnp.split(sums, 2), *jnp.split(lengths, 2))
    half = len(sums) // 2
    weights_PT, losses_PT = rows["weights"][:half], -log_probs_RT[:half]
    total = jnp.sum(jnp.where(weights_PT > 0, losses_PT * weights_PT, 0))
    return answers, jshard.Mean(total, jnp.sum(weights_PT)), penalty


def _rows(x_PS: jax.Array) -> jax.Array:
    """Returns the chosen rows (P, T), and below them the rejected ones."""
    return jnp.concatenate([x_PS[:, 0::2], x_PS[:, 1::2]])


def make_data(config, split):
    data = config.data
    return preference_data(
        data.path,
        split,
        sequence_length=data.sequence_length,
        seed=config.seed,
        tokenizer=data.tokenizer,
        vocab_size=config.model.vocab_size,
        validation_fraction=data.validation_fraction,
        dataset=data.dataset,
        config=data.config,
        train_split=data.split,
    )


def references(config):
    if not config.eval_every or config.preference.loss != "dpo":
        return {}
    return {"no preference": math.log(2)}


def flops_per_token(config):
    """Counts finetune.py's, and a forward of the reference."""
    flops = finetune.flops_per_token(config)
    if config.preference.loss == "dpo":
        matrices, scores = llama.products_per_token(finetune.of_examples(config))
        flops += 2.0 * (matrices + scores)
    return flops


def learning_rate(config):
    return gpt.learning_rate(finetune.with_rate(config, RATES))


def make_optimizer(config):
    return gpt.make_optimizer(finetune.with_rate(config, RATES))
