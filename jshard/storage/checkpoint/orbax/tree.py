"""Where the parts of a state are in a tree that someone else saved.

A part, such as the parameters, is at a *place* if all its paths follow that prefix. An
``nnx.State`` ends paths in "value", a pure dict does not: both are the same path.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from jshard.storage.checkpoint.orbax.folder import Keys
from jshard.system.errors import some_of

Part: TypeAlias = Mapping[Keys, str]  # names in the state, by paths within the part

_VALUE = "value"
_STREAM = {"key", "count"}  # the variables of an nnx.RngStream


class Tree:
    """The paths of a checkpoint, with and without "value" at their ends."""

    def __init__(self, paths: Iterable[Keys]):
        """Indexes the paths."""
        self.paths = sorted(paths)
        self._stored = {
            path[:-1]: path for path in self.paths if path[-1:] == (_VALUE,)
        }
        self._stored |= {path: path for path in self.paths}

    def get(self, path: Keys) -> Keys | None:
        """Returns the path of an array as it is stored, if there is one."""
        return self._stored.get(path)

    def at(self, place: Keys, part: Part) -> dict[str, Keys]:
        """Returns the stored paths of what there is of a part, by names."""
        found = {name: self.get((*place, *path)) for path, name in part.items()}
        return {name: path for name, path in found.items() if path is not None}

    def below(self, place: Keys) -> list[Keys]:
        """Returns the paths that a place holds."""
        return [path for path in self.paths if path[: len(place)] == place]

    def counts(self, part: Part) -> Counter[Keys]:
        """Returns how many arrays of a part each place holds, if any."""
        found: Counter[Keys] = Counter()
        for path in self._stored:
            for i in range(len(path) + 1):
                found[path[:i]] += path[i:] in part
        return +found

    def places(self, part: Part) -> list[Keys]:
        """Returns the places that hold all of a part."""
        if not part:
            return []
        counts = self.counts(part)
        return sorted(place for place, n in counts.items() if n == len(part))

    def named(self, key: str) -> set[Keys]:
        """Returns the stored paths of the arrays that have this name."""
        return {path for bare, path in self._stored.items() if bare[-1:] == (key,)}

    def streams(self) -> set[Keys]:
        """Returns the paths of Flax's random streams: a "key" beside a "count"."""
        inside: dict[Keys, dict[str, Keys]] = {}
        for path in self.paths:
            bare = path[:-1] if path[-1:] == (_VALUE,) else path
            if bare:
                inside.setdefault(bare[:-1], {})[bare[-1]] = path
        found = [x for x in inside.values() if x.keys() == _STREAM]
        return {path for stream in found for path in stream.values()}

    def groups(self, left: Iterable[Keys], taken: Iterable[Keys]) -> Iterator[str]:
        """Describes paths that are left, by the shortest prefixes with no taken one."""
        shared = {path[:i] for path in taken for i in range(len(path) + 1)}
        sizes: Counter[Keys] = Counter()
        for path in left:
            ends = range(1, len(path) + 1)
            sizes[next((path[:i] for i in ends if path[:i] not in shared), path)] += 1
        for prefix, n in sizes.items():
            yield dotted(prefix) + (f" ({n} arrays)" if n > 1 else "")


def dotted(path: Keys) -> str:
    """Returns a path as messages have it."""
    path = path[:-1] if path[-1:] == (_VALUE,) else path
    return ".".join(path) or "the root"


def differences(tree: Tree, place: Keys, part: Part, fine: set[Keys]) -> str:
    """Returns what a place lacks of a part, and has beyond it and what is ``fine``."""
    found = tree.at(place, part)
    lacks = [dotted(path) for path, name in part.items() if name not in found]
    others = {*tree.below(place)} - {*found.values()} - fine
    more = [dotted(path[len(place) :]) for path in sorted(others)]
    texts = []
    if lacks:
        texts.append(f"it lacks {some_of(sorted(lacks))}")
    if more:
        texts.append(f"it has unexpected {some_of(more)}")
    return "; ".join(texts)
