"""What is said of a difference between devices, and what is kept of it."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jshard.sharding.step.replay.bits import WORDS
from jshard.sharding.step.replay.replayed import Difference
from jshard.sharding.step.replay.replicas import Copies
from jshard.sharding.step.replay.verdict import occurrences
from jshard.system.errors import some_of
from jshard.system.files.atomic import replace_file

_MOST = 1000  # hashes that are kept
_MOST_BYTES = 2**20  # of a batch that is kept


class Devices:
    """The devices of a mesh by place, with the names of their hosts."""

    def __init__(self, mesh: Any, hosts: Sequence[str]):
        self._devices, self._hosts = [*mesh.devices.flat], hosts

    def name(self, place: int) -> str:
        """Returns "device 3 (process 0, host a1)"."""
        device = self._devices[place]
        process = device.process_index
        return f"device {device.id} (process {process}, host {self._hosts[process]})"

    def names(self, places: Iterable[int]) -> str:
        """Returns the names of the devices in some places, if they are few."""
        return some_of([self.name(place) for place in places], limit=4)

    def listed(self) -> list[dict[str, Any]]:
        """Returns all of them, for JSON."""
        return [
            {
                "place": place,
                "device": device.id,
                "kind": device.device_kind,
                "process": device.process_index,
                "host": self._hosts[device.process_index],
            }
            for place, device in enumerate(self._devices)
        ]


def say_difference(step: int, found: Difference, devices: Devices) -> str:
    """Describes a step of which computations differ, in one line."""
    verdict, computed = found.verdict, len(found.computations)
    arrays = some_of(verdict.arrays, limit=1)
    where = f"first in {arrays}" if arrays else f"first in a {verdict.first}"
    if verdict.kind == "random":
        return (
            f"step {step}, computed {computed} times, has other bits even on the same "
            f"devices, {where}: its program is not deterministic, so that watch.replay "
            "cannot judge devices. On GPUs deterministic=true makes XLA's operations "
            "so; a callback may draw random numbers"
        )
    if verdict.kind == "device":
        (place,) = verdict.places
        again = "again and again" if verdict.again else f"once in {computed} times"
        return (
            f"step {step}: {devices.name(place)} computed other bits than other "
            f"devices, {again}, {where}"
        )
    return (
        f"step {step}: devices computed other bits than others, {where}, and who is "
        f"wrong cannot be told: it may be {devices.names(verdict.places)}"
    )


def say_copies(
    step: int, found: Sequence[Copies], agreed: int | None, devices: Devices
) -> str:
    """Describes arrays of which copies differ after a step, in one line."""
    first, *others = found
    more = f" (and of {len(others)} more arrays)" if others else ""
    if first.right:
        what = (
            f"{devices.names(first.wrong)} holds other bits of {first.name}{more} than "
            f"its copies on {devices.names(first.right)}"
        )
    else:
        what = (
            f"{devices.names(first.wrong)} hold other copies of {first.name}{more}, "
            "and which is right cannot be told"
        )
    known = "" if agreed is None else f"; copies agreed after step {agreed}"
    return f"after step {step} {what}{known}"


def keep_difference(
    file: Path, step: int, found: Difference, devices: Devices, batch: Any
) -> None:
    """Writes the hashes that differ as JSON, and a small batch beside it as .npz."""
    values = np.stack([x.words for x in found.computations])
    values = values.reshape(*values.shape[:2], -1, WORDS)
    differing = occurrences(found.events, values)
    verdict = found.verdict
    content = {
        "step": step,
        "found": verdict.kind,
        "places": verdict.places,
        "devices": devices.listed(),
        "computations": [
            {"devices_further_on": x.distance} for x in found.computations
        ],
        "differing": len(differing),
        "hashes": [
            {
                "kind": one.kind,
                "name": one.name,
                "by_computation_and_place": [
                    [_text(words) for words in places]
                    for places in values[:, :, one.number]
                ],
            }
            for one in differing[:_MOST]
        ],
    }
    replace_file(file, json.dumps(content, indent=1))
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if sum(x.nbytes for _, x in leaves) <= _MOST_BYTES:
        names = [
            jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves
        ]
        arrays = {
            name or "batch": x for name, (_, x) in zip(names, leaves, strict=True)
        }
        np.savez(file.with_suffix(".npz"), **arrays)


def keep_copies(
    file: Path, step: int, found: Sequence[Copies], agreed: int, devices: Devices
) -> None:
    """Writes which copies differ as JSON."""
    arrays = [one._asdict() for one in found]
    content = {"step": step, "agreed": agreed, "arrays": arrays}
    content |= {"devices": devices.listed()}
    replace_file(file, json.dumps(content, indent=1))


def _text(words: np.ndarray) -> str:
    return "".join(f"{word:08x}" for word in words.tolist())
