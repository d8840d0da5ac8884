"""Datasets of text, and what is in them."""

from pathlib import Path
from typing import Any

import numpy as np

from jshard.data.text.text_data import text_data
from jshard.data.text.token_files import Piece


def write_tokens(file: Path, count: int, dtype: str = "uint16") -> Path:
    np.arange(count, dtype=dtype).tofile(file)
    return file


def piece(*tokens: int, ends: Any = None, start: int = 0, stop: int = 0) -> Piece:
    values = np.array(tokens, np.uint32)
    found = None if ends is None else (lambda: np.array(ends, np.uint64))
    file = Path("a.txt")
    return Piece(file, "a", start, stop or len(tokens), lambda: values, found)


def text(path, split="train", **options):
    options = {"sequence_length": 8, "seed": 0, **options}
    return text_data(str(path), split, **options)


def window(dataset, index):
    element = dataset[index]
    assert element is not None
    return element


def tokens_of(dataset):
    """The tokens that a finite dataset of windows covers, weight 0 left out."""
    windows = list(dataset)
    targets = [w["targets"][w["weights"] > 0] for w in windows]
    return np.concatenate([windows[0]["inputs"][:1], *targets])


def epoch(dataset, number, length):
    """The inputs of one epoch, in order, [length, T]."""
    start = number * length
    return np.stack([window(dataset, start + i)["inputs"] for i in range(length)])


def write_text(folder, count, size=100):
    for i in range(count):
        (folder / f"{i:03}.txt").write_text(chr(ord("A") + i % 26) * size)


def enough(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("0123456789" * 9)
    return tmp_path / "a.txt"
