"""What is known of a stream's data at little cost, so that others are noticed."""

import hashlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grain

from jshard.data.places import is_torch
from jshard.system.formatting import one_line

_SHOWN = 60  # characters


def fingerprint(data: Any) -> dict[str, str]:
    """Returns texts, by what they are of; none for functions and other iterables."""
    if is_huggingface(data):
        return {
            "the dataset": f"{data.info.dataset_name}, {data.info.config_name}",
            "the split": str(data.split),
            "the columns": _short(map(str, (data.features or {}).items())),
            "the number of files": str(data.num_shards),
        }
    if is_torch(data, "DataLoader"):
        rows = data.dataset
        return {
            "the number of rows": str(len(rows)) if hasattr(rows, "__len__") else "any",
            "batch_size of the loader": str(data.batch_size),
            "num_workers of the loader": str(data.num_workers),
        }
    if isinstance(data, grain.IterDataset):
        return {"the number of rows": ", ".join(map(str, _lengths(data)))}
    return {}


def of_files(files: Sequence[str]) -> dict[str, str]:
    """Returns the number of files, and a digest of their names and sizes in order.

    Names on a hub have the commit.
    """
    if not files:
        return {}
    sizes = [os.path.getsize(x) if os.path.exists(x) else "" for x in files]
    named = map("{} {}".format, files, sizes)
    return {"the files": f"{len(files)} (digest {_digest(named)})"}


def difference(now: Mapping[str, str], then: Mapping[str, str]) -> str:
    """Says what differs between two fingerprints; "" if nothing does."""
    return "; ".join(
        f"{name}: {now[name]}, but {then[name]} at the checkpoint"
        for name in now
        if name in then and now[name] != then[name]
    )


def is_huggingface(data: Any) -> bool:
    """Returns whether an object is an `IterableDataset` of Hugging Face."""
    datasets: Any = sys.modules.get("datasets")
    return datasets is not None and isinstance(data, datasets.IterableDataset)


def _lengths(data: Any) -> list[int]:
    """Returns the lengths of what a dataset of Grain is made of."""
    if data.parents:
        return [n for parent in data.parents for n in _lengths(parent)]
    return [len(data)] if hasattr(data, "__len__") else []


def _short(texts: Iterable[str]) -> str:
    text = one_line(", ".join(texts))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({_digest([text])})"


def _digest(texts: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=4).hexdigest()
