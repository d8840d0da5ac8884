"""An event of a profile, whichever form its file has."""

from typing import Any, NamedTuple


class Row(NamedTuple):
    """An event of a line (a stream, a thread) of a plane (a device, a host)."""

    plane: str
    line: str
    name: str
    start: float  # seconds
    seconds: float
    source: Any  # an event of ``ProfileData``, or a dict of its stats

    def stats(self) -> dict[str, Any]:
        """Returns its statistics by name; to read them takes long."""
        return self.source if isinstance(self.source, dict) else dict(self.source.stats)
