"""Packed documents: what rows hold, and that their losses are those alone."""

import dataclasses
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings

from filled import filled
from jshard.data.text.packing import best_fit
from jshard.models.gpt import GPT, GPTConfig
from jshard.models.llama import Llama, LlamaConfig
from jshard.system.errors import UserError
from texts import text, window

LINES = [f"Document {i} " + "is long " * (i % 5) + "and ends." for i in range(23)]
T = 64


@pytest.fixture
def folder(tmp_path):
    """A folder of one document a file."""
    for i, line in enumerate(LINES):
        (tmp_path / f"{i:02}.txt").write_text(line)
    return tmp_path


def rows(path, **options):
    data = text(path, "validation", sequence_length=T, pack=True, **options)
    return list(data)


def documents(row):
    """The tokens of each document of a row."""
    found = []
    for segment in range(1, row["segment_ids"].max() + 1):
        at = np.flatnonzero(row["segment_ids"] == segment)
        np.testing.assert_array_equal(row["positions"][at], np.arange(len(at)))
        np.testing.assert_array_equal(np.diff(at), 1)
        np.testing.assert_array_equal(row["inputs"][at][1:], row["targets"][at][:-1])
        found.append(np.append(row["inputs"][at], row["targets"][at[-1]]))
    return found


def test_rows_hold_all_documents_whole(folder):
    for name in list(folder.iterdir()):
        name.rename(name.with_name(f"val-{name.name}"))
    (folder / "other.txt").write_text("trained on")
    found = rows(folder)
    assert len(found) <= 15  # 817 places of 64 need 13
    packed = [bytes(d.tolist()).decode() for row in found for d in documents(row)]
    assert sorted(packed) == sorted(f"{line}\0" for line in LINES)
    for row in found:
        padding = row["segment_ids"] == 0
        np.testing.assert_array_equal(row["weights"], ~padding)
        assert not row["positions"][padding].any()
        assert np.all(np.diff(np.flatnonzero(~padding)) == 1)  # at the end


def test_a_document_longer_than_a_row_is_cut(tmp_path):
    (tmp_path / "val.txt").write_text("".join(map(chr, range(33, 123))) * 2)
    (tmp_path / "train.txt").write_text("trained on")
    first, second, third = rows(tmp_path)
    tokens = [*documents(first)[0][:-1], *documents(second)[0][:-1]]
    tokens += documents(third)[0].tolist()
    whole = "".join(map(chr, range(33, 123))) * 2
    assert bytes(map(int, tokens)).decode() == f"{whole}\0"


def test_rows_keep_the_promise_of_max_segments(folder):
    for most in (2, 3, 4):
        data = text(folder, sequence_length=200, pack=True, max_segments=most, seed=1)
        runs = [
            1 + np.count_nonzero(np.diff(window(data, i)["segment_ids"]))
            for i in range(20)
        ]
        assert max(runs) == most
    with pytest.raises(UserError, match="max_segments=1: padding is one"):
        text(folder, pack=True, max_segments=1)


@given(st.lists(st.integers(1, 20)), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_best_fit_fills_rows_and_no_more(lengths, most):
    row = best_fit(np.array(lengths, np.int64), 20, most)
    used = np.bincount(row, lengths)
    assert np.all(used <= 20)
    assert np.all(used > 0)
    if most:
        assert np.all(np.bincount(row) <= most)
    else:  # no two rows would fit in one
        smallest = np.sort(used)[:2]
        assert len(used) < 2 or smallest.sum() > 20


def test_training_repeats_all_rows_in_another_order(folder):
    data = text(folder, sequence_length=T, pack=True, validation_fraction=0.2)
    again = text(folder, sequence_length=T, pack=True, validation_fraction=0.2)
    held_out = rows(folder, validation_fraction=0.2)
    seen = [window(data, i)["inputs"].tobytes() for i in range(40)]
    assert seen == [window(again, i)["inputs"].tobytes() for i in range(40)]
    assert not set(seen) & {row["inputs"].tobytes() for row in held_out}
    num_rows = len(set(seen))
    assert sorted(seen[:num_rows]) == sorted(seen[num_rows : 2 * num_rows])
    assert seen[:num_rows] != seen[num_rows : 2 * num_rows]


SIZES = {
    "vocab_size": 128, "sequence_length": T, "num_layers": 2, "num_heads": 2,
    "width": 16, "loss_chunk": 32, "dtype": jnp.float64, "param_dtype": jnp.float64,
}  # fmt: skip
LLAMA = LlamaConfig(**SIZES, num_kv_heads=1, hidden=24)
MODELS: dict[str, Any] = {
    "gpt": (GPT, GPTConfig(**SIZES, tied=False)),
    "gpt-tied": (GPT, GPTConfig(**SIZES)),
    "llama": (Llama, LLAMA),
    "llama-sliding": (
        Llama,
        dataclasses.replace(
            LLAMA, pattern="sf", window=9, attention_soft_cap=5.0, qk_norm=True
        ),
    ),
}


@pytest.mark.slow  # test_decoder_family.py has gemma's
@pytest.mark.parametrize("name", MODELS)
def test_losses_of_packed_documents_are_those_of_the_documents_alone(folder, name):
    # jax.nn.dot_product_attention takes every softmax in float32; a soft cap is ours.
    tolerance = 1e-9 if name == "llama-sliding" else 1e-5
    with jax.enable_x64(True):
        kind, config = MODELS[name]
        check_losses(kind, config, folder, tolerance)


def check_losses(kind, config, folder, tolerance):
    """Compares sums of losses and of gradients."""
    data = text(folder, sequence_length=T, pack=True, max_segments=4)
    found = [window(data, i) for i in range(8)]
    several = dataclasses.replace(config, max_segments=4)
    packed = filled(lambda: kind(several, rngs=nnx.Rngs(0)))
    model = filled(lambda: kind(config, rngs=nnx.Rngs(0)))
    batch = {key: np.stack([row[key] for row in found]) for key in found[0]}

    def packed_loss(model):
        return model.loss(
            batch["inputs"], batch["targets"], batch["weights"],
            positions_BT=batch["positions"], segment_ids_BT=batch["segment_ids"],
        ).total  # fmt: skip

    alone = [document for row in found for document in documents(row)]
    longest = max(map(len, alone))
    inputs, targets, weights = np.zeros((3, len(alone), longest - 1), int)
    for i, document in enumerate(alone):
        size = len(document) - 1
        inputs[i, :size], targets[i, :size] = document[:-1], document[1:]
        weights[i, :size] = 1
    assert batch["weights"].sum() == weights.sum() > 8 * 40

    def loss_alone(model):
        return model.loss(inputs, targets, weights.astype(float)).total

    one, one_grad = nnx.jit(nnx.value_and_grad(packed_loss))(packed)
    other, other_grad = nnx.jit(nnx.value_and_grad(loss_alone))(model)
    np.testing.assert_allclose(one, other, rtol=1e-12)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        one_grad,
        other_grad,
    )


def test_token_files_need_the_ends_of_documents(tmp_path):
    tokens = np.arange(100, dtype=np.uint16)
    tokens.tofile(tmp_path / "a.bin")
    with pytest.raises(UserError, match=r"a\.bin: packing needs .* a\.idx beside it"):
        text(tmp_path, pack=True)
    np.array([10, 99], np.uint64).tofile(tmp_path / "a.idx")
    with pytest.raises(UserError, match=r"a\.idx: does not end at the 100 tokens"):
        text(tmp_path, pack=True)
    np.array([10, 60, 100], np.uint64).tofile(tmp_path / "a.idx")
    data = text(tmp_path, sequence_length=T, pack=True, validation_fraction=0.2)
    # The last document is not divided: all of it is for validation.
    for i in range(2):
        assert sorted(map(len, documents(window(data, i)))) == [10, 50]
