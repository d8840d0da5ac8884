"""Who computed something else: the first difference of several computations of a step.

Each place of the mesh computed the same thing in each of them, on another device. The
first that differs, in the order of the program, is no consequence of another one, so
the device there that is alone with its value is the one that is wrong.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from jshard.sharding.step.replay.bits import WORDS
from jshard.sharding.step.replay.sent import Event, Loop


class Computation(NamedTuple):
    """Hashes of a step, computed with all places ``distance`` devices further on."""

    distance: int
    words: np.ndarray  # uint32 (places, words)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Which devices computed something else, as far as that can be told.

    Attributes:
      kind: "device" if only one can have computed wrong; "random" if the program
        computes something else on the same devices, too; "open" if several can have.
      places: the places of these devices in the mesh as it is.
      again: whether the device was wrong in more than one computation.
      first: what differs first.
      arrays: the gradients that differ, or else what else does; in words.
    """

    kind: Literal["device", "random", "open"]
    places: tuple[int, ...]
    again: bool
    first: str
    arrays: tuple[str, ...]


class Occurrence(NamedTuple):
    """A hash that differs: when it was taken, which it is, and of what."""

    when: tuple[int, ...]
    number: int
    kind: str
    name: str


def differs(one: Computation, other: Computation) -> bool:
    """Returns whether two computations of a step have any other bits."""
    return not np.array_equal(one.words, other.words)


def judge(events: Sequence[Event], computations: Sequence[Computation]) -> Verdict:
    """Finds the first difference of computations, and who is alone with its value.

    Args:
      events: what has hashes, in the order of words.
      computations: at least two, which differ. Those on other devices than the ones
        before vote; of two devices, which are always the same, all do.
    """
    all_words = np.stack([x.words for x in computations])  # (computations, places, ...)
    values = all_words.reshape(*all_words.shape[:2], -1, WORDS)
    found = occurrences(events, values)
    _, index, _, first = found[0]
    there = [[tuple(words) for words in one[:, index].tolist()] for one in values]
    places = len(there[0])
    wrong: list[tuple[int, int]] = []  # (device, computation)
    is_open = is_random = False
    for place in range(places):
        seen = [one[place] for one in there]
        if len({*seen}) == 1:
            continue
        voters = _voters(computations, places)
        (most, votes), *_ = collections.Counter(seen[i] for i in voters).most_common(1)
        if 2 * votes > len(voters):
            odd = [i for i, value in enumerate(seen) if value != most]
        else:
            odd, is_open = list(range(len(seen))), True
            is_random |= _repeats_differently(computations, seen)
        wrong += [((place + computations[i].distance) % places, i) for i in odd]
    devices = tuple(sorted({device for device, _ in wrong}))
    alone = not is_open and len(devices) == 1
    return Verdict(
        kind="device" if alone else "random" if is_random else "open",
        places=devices,
        again=alone and len({i for _, i in wrong}) > 1,
        first=first,
        arrays=_arrays(found),
    )


def occurrences(events: Sequence[Event], values: np.ndarray) -> list[Occurrence]:
    """Returns the hashes that differ, in the order of the program.

    ``values`` are uint32 (computations, places, hashes, words).
    """
    differing = np.flatnonzero((values != values[0]).any(axis=(0, 1, 3)))
    return sorted(_occurrence(events, int(index)) for index in differing)


def _voters(computations: Sequence[Computation], places: int) -> list[int]:
    """Returns the computations that are each on other devices, if there are three."""
    first = {x.distance: i for i, x in reversed([*enumerate(computations)])}
    return sorted(first.values()) if places > 2 else list(range(len(computations)))


def _repeats_differently(computations: Sequence[Computation], seen: Sequence) -> bool:
    pairs = zip(computations, seen, strict=True)
    by_distance: dict[int, set] = {}
    for computation, value in pairs:
        by_distance.setdefault(computation.distance, set()).add(value)
    return any(len(values) > 1 for values in by_distance.values())


def _occurrence(events: Sequence[Event], index: int) -> Occurrence:
    start = 0
    for event in events:
        size = math.prod(event.shape)
        if index < start + size:
            break
        start += size
    else:
        raise ValueError(f"there is no hash {index}")
    turns = [int(i) for i in np.unravel_index(index - start, event.shape or (1,))]
    left, when = iter(turns), []
    for part in event.path:
        if isinstance(part, Loop):
            turn = next(left)
            when.append(part.length - 1 - turn if part.reverse else turn)
        else:
            when.append(part)
    inside = ", ".join(map(str, turns)) if event.shape else ""
    what = "layer" if event.layers else "turn"
    name = f"{event.name}, {what} {inside}" if inside else event.name
    return Occurrence((*when, *left), index, event.kind, name)


def _arrays(found: Sequence[Occurrence]) -> tuple[str, ...]:
    for kind in ("gradient", "state"):
        if names := tuple(one.name for one in found if one.kind == kind):
            return names
    return ()
