"""Losses of preferences: of two answers to a prompt, which one a person chose.

They read the log-probabilities of whole answers, which ``sum_of_answers`` adds up from
those of tokens (``jshard.nn.token_log_probs``).

Shape suffixes: P pairs, R rows of tokens, T time of this device.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jshard.sharding.settings.loss import Loss, Mean
from jshard.sharding.settings.mesh import sequence_axes
from jshard.system.errors import UserError

DPO_KINDS = ("dpo", "robust", "hinge", "ipo")
SMOOTHED = ("dpo", "robust")


class Answers(NamedTuple):
    """What a model makes of the answers to some prompts, in pairs.

    Attributes:
      chosen: their log-probabilities, (P,).
      rejected: the same of the others, (P,).
      chosen_length: how many tokens they have, (P,).
      rejected_length: the same of the others, (P,).
    """

    chosen: jax.Array
    rejected: jax.Array
    chosen_length: jax.Array
    rejected_length: jax.Array


def sum_of_answers(
    log_probs_RT: jax.Array, is_answer_RT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Adds up the log-probabilities of each row's answer.

    In a step that splits sequences, the sums are those of whole sequences.

    Args:
      log_probs_RT: of each token, given those before.
      is_answer_RT: bool; which tokens are the answer's.

    Returns:
      The sums and the numbers of tokens, (R,) each.
    """
    sums = jnp.sum(jnp.where(is_answer_RT, log_probs_RT, 0), axis=1)
    lengths = jnp.sum(is_answer_RT, axis=1, dtype=sums.dtype)
    axes = sequence_axes()
    return lax.psum((sums, lengths), axes) if axes else (sums, lengths)


def dpo(
    policy: Answers,
    reference: Answers,
    *,
    beta: float,
    kind: str = "dpo",
    label_smoothing: float = 0.0,
    length_normalized: bool = False,
) -> tuple[Mean, dict[str, Mean]]:
    """Returns a loss of direct preference optimization, and its rewards.

    Of the margin m of the rewards, ``beta log(policy / reference)``, it is

    - ``-log sigmoid(m)`` (``dpo``; Rafailov et al. 2023, arXiv:2305.18290, equation 7);
    - the same without the bias of wrong preferences (``robust``; Ray Chowdhury et al.
      2024, arXiv:2403.00409, equation 12);
    - ``max(0, 1 - m)`` (``hinge``; Zhao et al. 2023, arXiv:2305.10425);
    - ``(m / beta - 1 / (2 beta))**2`` of means over tokens (``ipo``; Azar et al. 2023,
      arXiv:2310.12036, equation 17).

    Args:
      policy: of the model that is trained.
      reference: of the model that it started from.
      beta: how much a change of a log-probability counts.
      kind: which loss.
      label_smoothing: how many of the preferences are wrong, below 0.5, for ``dpo``
        (the conservative loss of Mitchell 2023, https://ericmitchell.ai/cdpo.pdf) and
        ``robust``.
      length_normalized: whether the loss compares means over tokens, as ``ipo`` always
        does (of ``dpo``, ``sigmoid_norm`` in TRL); the rewards are still those of
        whole answers.

    Returns:
      The loss, and by name its means of what ``rewards`` returns.

    Raises:
      UserError: there is no such kind, or it has no label smoothing.
    """
    if kind not in DPO_KINDS:
        raise UserError(f"dpo: kind={kind!r} is not one of {', '.join(DPO_KINDS)}")
    if label_smoothing and kind not in SMOOTHED:
        raise UserError(f"dpo: label_smoothing is for {' and '.join(SMOOTHED)}")
    chosen = policy.chosen - reference.chosen
    rejected = policy.rejected - reference.rejected
    margin = chosen - rejected
    if length_normalized or kind == "ipo":
        margin = chosen / policy.chosen_length - rejected / policy.rejected_length
    right, wrong = jax.nn.log_sigmoid(beta * margin), jax.nn.log_sigmoid(-beta * margin)
    if kind == "ipo":
        losses = jnp.square(margin - 1 / (2 * beta))
    elif kind == "hinge":
        losses = jnp.maximum(1 - beta * margin, 0)
    elif kind == "robust":
        losses = (label_smoothing * wrong - (1 - label_smoothing) * right) / (
            1 - 2 * label_smoothing
        )
    else:
        losses = -(1 - label_smoothing) * right - label_smoothing * wrong
    return _mean(losses), rewards(beta * chosen, beta * rejected)


def orpo(
    policy: Answers, chosen_texts: Mean, *, beta: float
) -> tuple[Loss, dict[str, Mean]]:
    """Returns the loss of odds ratio preference optimization, and its rewards.

    Hong et al. 2024, arXiv:2403.07691, equation 6: the cross-entropy of the chosen
    texts, and ``-beta log sigmoid`` of the logarithm of the ratio of odds. There is no
    reference; the rewards are ``beta`` times means over tokens.

    Args:
      policy: of the model that is trained.
      chosen_texts: the cross-entropy of the chosen answers with their prompts.
      beta: the weight of the preference, lambda in the paper.
    """
    chosen = policy.chosen / policy.chosen_length
    rejected = policy.rejected / policy.rejected_length
    log_odds = _log_odds(chosen) - _log_odds(rejected)
    ratio = _mean(-jax.nn.log_sigmoid(log_odds))
    metrics = rewards(beta * chosen, beta * rejected)
    metrics |= {"chosen_loss": chosen_texts}
    return chosen_texts + beta * ratio, metrics


def _log_odds(log_p: jax.Array) -> jax.Array:
    """Returns ``log(p / (1 - p))``, without a gradient where p rounds to 1."""
    # The odds of 1 are infinite, and so would be the gradient.
    log_p = jnp.minimum(log_p, -jnp.finfo(log_p.dtype).eps)
    return log_p - jax.nn.log1mexp(-log_p)


def rewards(chosen: jax.Array, rejected: jax.Array) -> dict[str, Mean]:
    """Returns the means of rewards (P,), of how often and by how much the first win."""
    return {
        "reward_chosen": _mean(chosen),
        "reward_rejected": _mean(rejected),
        "reward_accuracy": _mean((chosen > rejected).astype(chosen.dtype)),
        "reward_margin": _mean(chosen - rejected),
    }


def _mean(x_P: jax.Array) -> Mean:
    return Mean(jnp.sum(x_P), x_P.size)
