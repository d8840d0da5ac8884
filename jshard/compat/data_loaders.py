"""Whether data of other libraries were divided among processes already.

Neither library says so in public: a run that divides such data again would train on a
part of them alone.
"""

from typing import Any


def is_split_by_node(data: Any) -> bool:
    """Returns whether an ``IterableDataset`` was given to ``split_dataset_by_node``."""
    return bool(getattr(data, "_distributed", None))


def is_sharded_loader(data: Any) -> bool:
    """Returns whether this is a ``DataLoader`` of Grain for one of several parts."""
    return getattr(getattr(data, "_shard_options", None), "shard_count", 1) > 1
