"""Log-likelihoods of continuations are those of a plain forward pass over each text."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from jshard.inference.generation.scoring import padded_length, scores
from jshard.inference.generation.weight_placement import replicated, sharded
from jshard.models.gpt import GPT, GPTConfig

CONTEXT = 72
CONFIG = GPTConfig(
    vocab_size=50,
    sequence_length=CONTEXT,
    num_layers=1,
    num_heads=2,
    width=16,
    param_dtype=np.float64,
)


def make_model():
    return filled(lambda: GPT(CONFIG, rngs=nnx.Rngs(0)))


def texts():
    random = np.random.default_rng(0)
    sizes = [(1, 1), (5, 2), (1, 70), (3, 9), (60, 13), (71, 1), (72, 1), (90, 20)]
    found = [tuple(random.integers(0, 50, n).tolist() for n in pair) for pair in sizes]
    question, long = [3, 1, 4, 1], found[-1][0]
    found += [(question, [5, letter]) for letter in range(9)]  # one row
    return [*found, (question, [6, 0]), ([*question, 5], [0]), (long, [1]), (long, [2])]


ROWS = 8 + 4 + 1  # those of sizes, the questions', and that of greedy tokens


@functools.cache
def by_hand():
    """All texts, and the sum and the greediness of each, one after the other."""
    model = make_model()
    forward = nnx.jit(lambda tokens: model(tokens))

    def logits(tokens):
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(forward(padded))[0]

    greedy = [7, 8, 9]
    for _ in range(3):
        greedy.append(int(logits(greedy)[len(greedy) - 1].argmax()))
    asked = [*texts(), (greedy[:3], greedy[3:])]
    found = []
    for before, after in asked:
        tokens = [*before, *after][-CONTEXT - 1 :]
        each = logits(tokens[:-1])
        log_p = each - np.log(np.sum(np.exp(each), -1, keepdims=True))
        where = np.arange(len(tokens) - 1 - len(after), len(tokens) - 1)
        same = bool(np.all(each[where].argmax(-1) == after))
        found.append((log_p[where, after].sum(), same))
    return asked, found


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("whole", [True, False], ids=["replicated", "sharded"])
@pytest.mark.quick("sharded-3")
def test_scores_are_those_of_each_text_alone(whole, devices):
    with jax.enable_x64(True):
        used = jax.devices()[:devices]
        asked, want = by_hand()
        assert [greedy for _, greedy in want] == [False] * (len(asked) - 1) + [True]
        if whole:
            placement = replicated(make_model(), used)
        else:
            fsdp = jshard.FSDP(jshard.make_mesh(devices=used))
            placement = sharded(fsdp, fsdp.from_model(make_model(), optax.identity()))
        batches = list(scores(placement, asked, 4))
        (program,) = placement.programs.values()
        found = dict(score for batch in batches for score in batch)
        assert sorted(found) == list(range(len(asked)))
        for i, (log_p, greedy) in enumerate(want):
            assert found[i].log_p == pytest.approx(log_p, rel=1e-9)
            assert found[i].is_greedy == greedy
        assert len(batches) == -(-ROWS // (-(-4 // devices) * devices))
        # For the longest texts, for those of up to 64 tokens, and for nine answers.
        assert program._cache_size() <= 3


def test_lengths_are_few():
    lengths = {padded_length(n, 1000) for n in range(1, 1001)}
    assert lengths == {64, 128, 256, 512, 1000}
    assert all(padded_length(n, 1000) >= n for n in range(1, 1001))
    assert padded_length(3, 40) == 40
