"""Bits that flip between the files of a checkpoint and the devices."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jshard.storage.checkpoint import stored_arrays

Damage = Callable[[jax.Array], jax.Array]


def flipped(rng: np.random.Generator, shape: Any) -> tuple[Damage, list[int]]:
    """What flips one bit of an array of this exact shape, and on which device."""
    where: list[int] = []

    def damage(x: jax.Array) -> jax.Array:
        shards = [np.array(shard.data) for shard in x.addressable_shards]
        firsts = [[part.start or 0 for part in s.index] for s in x.addressable_shards]
        inside = [shape - np.array(first, int) for first in firsts]
        device = int(
            rng.choice([i for i, left in enumerate(inside) if (left > 0).all()])
        )
        where.append(device)
        values = shards[device][tuple(map(slice, inside[device]))]
        element = tuple(map(rng.integers, values.shape))
        bits = np.atleast_1d(values[element]).view(np.uint8)
        bits[rng.integers(bits.size)] ^= 1 << int(rng.integers(8))
        values[element] = bits.view(values.dtype)[0]
        pairs = zip(shards, [s.device for s in x.addressable_shards], strict=True)
        put = [jax.device_put(*pair) for pair in pairs]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, put)

    return damage, where


def on_the_way(monkeypatch: Any, name: str, damage: Damage, times: int = 1) -> None:
    """Damages an array between its file and the devices, the first times."""
    load, left = stored_arrays.load, [times]

    def loading(folder: Path, wanted: Any) -> dict[str, jax.Array]:
        loaded = load(folder, wanted)
        if name in loaded and left[0]:
            left[0] -= 1
            loaded[name] = damage(loaded[name])
        return loaded

    monkeypatch.setattr(stored_arrays, "load", loading)
