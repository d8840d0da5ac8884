"""Steps of one small array in a bucket, saved without a state."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jshard.storage.checkpoint.buckets.objects import Objects
from jshard.storage.checkpoint.buckets.saves import BucketSaves
from jshard.storage.checkpoint.participants import Participants


class Written:
    """A save of one array, below a URL and in a local folder."""

    def __init__(self, there: Objects, local: Path):
        self.saves = BucketSaves(there.url, local)

    def save(self, step: int, expired: Any = lambda folders, newest: []) -> int:
        arrays = {"params.w": jnp.arange(6.0), "params.b": jnp.ones(2)}
        started = self.saves.start(step, arrays, {})
        parts: list[Any] = [self.saves.write(started, Participants("saves", 0))]
        content = {"step": step, "arrays": {}}
        return self.saves.commit(content, {"notes.txt": "x"}, parts, expired)
