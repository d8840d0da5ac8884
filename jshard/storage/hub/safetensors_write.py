"""Writes safetensors files in Hugging Face's layout, of limited size."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def assign_files(sizes: Mapping[str, int], shard_bytes: int) -> dict[str, list[str]]:
    """Assigns tensors to files, in order.

    Args:
      sizes: The bytes of each tensor, by name.
      shard_bytes: The most bytes of tensors in a file; a larger tensor gets a file of
        its own.

    Returns:
      The tensors of each file, by file name.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": names
        for number, names in enumerate(shards, 1)
    }


def write_tensors(
    file: Path, tensors: dict[str, np.ndarray], framework: str = "flax"
) -> None:
    """Writes a safetensors file durably.

    Args:
      file: The file.
      tensors: Arrays in C order, by name.
      framework: What its metadata says about the names, for other readers.

    Raises:
      OSError: The disk is full or cannot be written.
      SafetensorError: The format lacks a dtype.
    """
    file.touch()
    mode = file.stat().st_mode
    try:
        save_file(tensors, file, {"format": framework})
    except SafetensorError as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            code = int(number[1])
            raise OSError(code, os.strerror(code), str(file)) from error
        raise
    # safetensors 0.8 makes files that only their owner can read (its issue 782).
    file.chmod(mode)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def write_index(
    folder: Path, files: Mapping[str, list[str]], sizes: Mapping[str, int]
) -> None:
    """Writes the index of several files, with arguments as for ``assign_files``."""
    index = {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    text = json.dumps(index, indent=2) + "\n"
    (folder / INDEX).write_text(text, encoding="utf-8")
