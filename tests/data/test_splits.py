"""Which tokens are held out: the last ones of all files, whole documents, no others."""

from pathlib import Path

import numpy as np
import pytest

from jshard.data.text.corpus import _chosen, _hold_out_tail
from jshard.data.text.token_files import Piece


def piece(length: int, *ends: int, name: str = "a", start: int = 0) -> Piece:
    """Tokens of a file, whose documents have these ends."""
    tokens, found = np.arange(length), np.array(ends)
    of_documents = (lambda: found) if ends else None
    return Piece(Path(name), name, start, length, lambda: tokens, of_documents)


def spans(pieces: list[Piece]) -> list[tuple[str, int, int]]:
    return [(x.name, x.start, x.stop) for x in pieces]


def held_out(fraction: float, *pieces: Piece) -> tuple[list, list]:
    splits = _hold_out_tail(pieces, fraction)
    return spans(splits["train"]), spans(splits["validation"])


@pytest.mark.parametrize(
    ("fraction", "cut"),
    [
        (0.0, 100),
        (0.05, 70),  # within the last document, which is held out
        (0.29, 70),
        (0.3, 70),  # at its begin
        (0.31, 40),
        (0.59, 40),
        (0.6, 40),
        (0.61, 40),  # within the first document, of which the run would have nothing
    ],
)  # fmt: skip
def test_a_document_is_held_out_if_the_boundary_is_before_its_end(fraction, cut):
    train, validation = held_out(fraction, piece(100, 40, 70, 100))
    assert train == [("a", 0, cut)]
    assert validation == ([("a", cut, 100)] if cut < 100 else [])


def test_one_document_is_divided_and_what_is_held_out_is_last_of_all_files():
    two = piece(60, name="a"), piece(40, name="b")
    assert held_out(0.25, *two) == ([("a", 0, 60), ("b", 0, 15)], [("b", 15, 40)])
    assert held_out(0.4, *two) == ([("a", 0, 60)], [("b", 0, 40)])
    assert held_out(0.5, *two) == ([("a", 0, 50)], [("a", 50, 60), ("b", 0, 40)])
    assert held_out(0.0, *two) == ([("a", 0, 60), ("b", 0, 40)], [])
    # Two documents in each of two files: the boundary counts the tokens of both.
    two = piece(60, 30, 60, name="a"), piece(40, 20, 40, name="b")
    assert held_out(0.1, *two) == ([("a", 0, 60), ("b", 0, 20)], [("b", 20, 40)])
    assert held_out(0.4, *two) == ([("a", 0, 60)], [("b", 0, 40)])
    # A piece that begins within its file.
    assert held_out(0.25, piece(100, start=20)) == ([("a", 20, 80)], [("a", 80, 100)])


def test_an_index_that_does_not_ascend_cuts_within_its_file():
    train, validation = held_out(0.5, piece(100, 400, 30, 100))
    for _, start, stop in train + validation:
        assert 0 <= start < stop <= 100


@pytest.mark.core
@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.5, 0.99])
def test_what_is_held_out_is_not_trained_on(fraction):
    """Of files as of documents; with a fraction, each split gets something."""
    documents = piece(100, 40, 70, 100), piece(50, name="b"), piece(9, 5, 9, name="c")
    train, validation = held_out(fraction, *documents)
    assert bool(validation) == (fraction > 0)
    assert train
    of = lambda split: {(n, i) for n, start, stop in split for i in range(start, stop)}
    assert not of(train) & of(validation)
    assert len(of(train) | of(validation)) == 159
    files = [piece(1, name=f"{i}.txt") for i in range(40)]
    chosen = {x.name for x in _chosen(files, fraction)}
    assert min(1, fraction * 40) <= len(chosen) < 40
    more = [*files, piece(1, name="new.txt")]
    assert {x.name for x in _chosen(more, fraction)} - {"new.txt"} <= chosen


def test_both_splits_get_a_file_and_none_is_held_out_of_one():
    files = [piece(1, name=f"{i}.txt") for i in range(3)]
    counts = {x: len(_chosen(files, x)) for x in (0.0, 1e-9, 0.999999)}
    assert counts == {0.0: 0, 1e-9: 1, 0.999999: 2}
    assert _chosen(files[:1], 0.5) == []
