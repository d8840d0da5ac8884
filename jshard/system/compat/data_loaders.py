"""Data of other libraries: whether they are divided already, and their processes.

Neither library says in public whether data were divided among processes: a run that
divides such data again would train on a part of them alone.
"""

import contextlib
from typing import Any

from absl import flags


def is_split_by_node(data: Any) -> bool:
    """Returns whether an ``IterableDataset`` was given to ``split_dataset_by_node``."""
    return bool(getattr(data, "_distributed", None))


def is_sharded_loader(data: Any) -> bool:
    """Returns whether this is a ``DataLoader`` of Grain for one of several parts."""
    return getattr(getattr(data, "_shard_options", None), "shard_count", 1) > 1


def end_iterator(source: Any, items: Any) -> None:
    """Ends what an iterator over a source has started, such as processes.

    Those of PyTorch would stay until their loader is deleted, which keeps them.
    """
    close = getattr(items, "close", None)
    if not getattr(source, "persistent_workers", False):
        close = close or getattr(items, "_shutdown_workers", None)
    if close is not None:
        # Grain's, when a thread of its own ends the same process as the data end.
        with contextlib.suppress(AttributeError):
            close()


def allow_grain_processes() -> None:
    """Lets Grain start processes in a program that does not parse Abseil's flags.

    Grain reads one of its flags when it does, which fails before they are parsed.
    """
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
