"""The bigram reference: fitted on training text, evaluated on what is held out."""

import itertools
import math
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from jshard.data.batches import eval_batches
from jshard.data.text.bigram import (
    bigram_loss,
    bigram_probabilities,
    bigram_reference,
    count_pairs,
)
from jshard.data.text.corpus import split_corpus
from jshard.data.text.token_files import Piece
from jshard.data.tokenizers.tokenizer import load_tokenizer
from jshard.recipe.load import find_recipe, open_recipe
from texts import text

SPLITS = {"validation_fraction": 0.25, "token_dtype": "uint16"}


def pieces(*parts: bytes) -> list[Piece]:
    arrays = [np.frombuffer(part, np.uint8) for part in parts]
    return [
        Piece(Path("a"), "a", 0, len(a), lambda a=a: a) for a in arrays if len(a) > 0
    ]


def loss(train: bytes, held_out: bytes) -> float:
    return bigram_loss(count_pairs(pieces(train)), count_pairs(pieces(held_out)))


def probability(train: bytes, first: int, second: int) -> float:
    """Witten and Bell's, written out."""
    following = [b for a, b in itertools.pairwise(train) if a == first]
    seconds = train[1:]
    single = (seconds.count(second) + len(set(seconds)) / 256) / (
        len(seconds) + len(set(seconds))
    )
    if not following:
        return single
    kinds = len(set(following))
    return (following.count(second) + kinds * single) / (len(following) + kinds)


@settings(max_examples=20)
@given(st.binary(min_size=2, max_size=60), st.binary(min_size=2, max_size=60))
def test_the_loss_is_the_mean_of_witten_and_bells_probabilities(train, held_out):
    pairs = itertools.pairwise(held_out)
    want = [-math.log(probability(train, a, b)) for a, b in pairs]
    assert loss(train, held_out) == pytest.approx(np.mean(want), rel=1e-12)


@settings(max_examples=20)
@given(st.binary(max_size=60))
def test_probabilities_are_positive_and_sum_to_one_after_every_byte(train):
    p = bigram_probabilities(count_pairs(pieces(train)))
    assert p.min() > 0
    np.testing.assert_allclose(p.sum(axis=1), 1, rtol=1e-12)


def test_pairs_never_seen_have_a_finite_loss_and_seen_ones_a_small_one():
    assert 0 < loss(b"ab" * 1000, b"ab" * 100) < 0.01
    assert math.log(256) < loss(b"ab" * 1000, b"xyz") < math.inf


def test_text_that_is_not_predictable_costs_its_entropy():
    rng = np.random.default_rng(0)
    train, held_out = (
        rng.integers(0, 8, n, np.uint8).tobytes() for n in (400_000, 100_000)
    )
    assert loss(train, held_out) == pytest.approx(math.log(8), abs=1e-3)


def test_the_held_out_text_is_not_what_the_model_is_fitted_on(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"ab" * 300 + b"xy" * 100)
    (name, got), *others = bigram_reference(str(file), **SPLITS, targets=None).items()
    assert (name, others) == ("bigram model", [])
    # Fitted on itself it would be 0: of "xy" each byte tells the next.
    assert got == pytest.approx(loss(b"ab" * 300, b"xy" * 100))
    assert got > 5


@settings(max_examples=20)
@given(
    st.lists(st.binary(max_size=9), max_size=5),
    st.one_of(st.none(), st.integers(0, 50)),
)
def test_pairs_cross_files_and_the_first_so_many_count(parts, most):
    whole = b"".join(parts)
    want = np.zeros((256, 256), np.int64)
    for a, b in [*itertools.pairwise(whole)][:most]:
        want[a, b] += 1
    np.testing.assert_array_equal(count_pairs(pieces(*parts), most), want)


def test_counts_do_not_depend_on_how_much_is_counted_at_a_time(monkeypatch):
    parts = [np.random.default_rng(i).bytes(100) for i in range(3)]
    want = count_pairs(pieces(*parts), 250)
    monkeypatch.setattr("jshard.data.text.bigram._CHUNK", 7)
    np.testing.assert_array_equal(count_pairs(pieces(*parts), 250), want)


@pytest.mark.parametrize("batches", [0, 2])
def test_it_is_evaluated_on_what_evaluations_see(tmp_path, batches):
    for i in range(40):
        content = np.random.default_rng(i).integers(65, 70, 50 + i, np.uint8)
        (tmp_path / f"{i:02}.txt").write_bytes(content.tobytes())
    with open_recipe(find_recipe("gpt.py")) as recipe:
        config = recipe.get_config()
        config.data.path, config.data.tokenizer = str(tmp_path), ""
        config.data.validation_fraction = 0.25
        config.model.sequence_length = 8
        config.batch_size, config.eval_batches = 4, batches
        assert recipe.references
        got = recipe.references(config)["bigram model"]
    seen = np.zeros((256, 256))
    data = text(tmp_path, "validation", validation_fraction=0.25)
    for batch, _ in eval_batches(data, batch_size=4, max_batches=batches or None):
        np.add.at(seen, (batch["inputs"], batch["targets"]), batch["weights"])
    train = split_corpus(str(tmp_path), **SPLITS)["train"]
    assert seen.sum() == 64 if batches else seen.sum() > 500
    assert got == pytest.approx(bigram_loss(count_pairs(train), seen), rel=1e-12)


@pytest.mark.parametrize("name", ["gpt.py", "gpt2_124m.py", "llama.py:3-8b"])
def test_tokens_that_are_no_bytes_and_runs_without_evaluation_have_none(tmp_path, name):
    np.arange(4000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with open_recipe(find_recipe(name)) as recipe:
        config = recipe.get_config()
        assert recipe.references
        config.eval_every = 0
        assert recipe.references(config) == {}
        config.eval_every, config.data.path = 1, str(tmp_path)
        assert recipe.references(config) == {}


def test_text_without_a_pair_is_refused():
    with pytest.raises(ValueError, match="no pair"):
        loss(b"a", b"ab")
    with pytest.raises(ValueError, match="no pair"):
        loss(b"ab", b"a")


def test_pieces_have_a_bigram_model_too(tmp_path):
    for i in range(20):
        (tmp_path / f"{i:02}.py").write_text(
            f"def f{i}(self):\n    return self.x{i}\n" * 9
        )
    (got,) = bigram_reference(
        str(tmp_path), **SPLITS, targets=None, tokenizer="python"
    ).values()
    tokenizer = load_tokenizer("python")
    splits = split_corpus(str(tmp_path), **SPLITS, tokenizer=tokenizer)
    train, held_out = (
        count_pairs(splits[s], None, 1024) for s in ("train", "validation")
    )
    assert train.shape == (1024, 1024)
    assert got == pytest.approx(bigram_loss(train, held_out))
    assert 0 < got < 2
