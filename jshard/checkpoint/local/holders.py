"""Who has which parts of a copy, and from whom a process takes what it needs."""

import dataclasses
from collections.abc import Mapping, Sequence

from jshard.checkpoint.local.pieces import Division, Key


@dataclasses.dataclass(frozen=True)
class Holders:
    """The holders of the parts of one step's copy."""

    division: Division
    # For each process, who has a copy of its file, and how many of its bytes.
    copies: Mapping[int, Sequence[tuple[int, int]]]

    def missing(self) -> list[int]:
        """Returns the processes of which something is nowhere.

        Each needs its texts, which its own file alone has, and all its pieces.
        """
        return [process for process in self.copies if not self._is_whole(process)]

    def _is_whole(self, process: int) -> bool:
        if (process, self.division.sizes[process]) in self.copies[process]:
            return True
        keys = self.division.files[process]
        found = all(self.source(process, key) for key in keys)
        return found and bool(self.copies[process])

    def source(self, process: int, key: Key) -> tuple[int, int] | None:
        """Returns who has a piece that a process needs, and in whose file."""
        for owner in (process, *self.copies):
            piece = self.division.files[owner].get(key)
            if piece is None:
                continue
            end = piece.start + piece.size
            having = [holder for holder, size in self.copies[owner] if end <= size]
            if having:
                return process if process in having else having[0], owner
        return None

    def sources(self, process: int) -> dict[tuple[int, int], list[Key]]:
        """Returns what a process takes from whom, and from whose files."""
        found: dict[tuple[int, int], list[Key]] = {}
        for key in self.division.files[process]:
            source = self.source(process, key)
            if source is None:
                raise ValueError(f"no process has {key}")
            found.setdefault(source, []).append(key)
        return found
