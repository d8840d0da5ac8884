"""Numbers as people read them, and texts of strangers as terminals may show them."""

import difflib
import unicodedata
from collections.abc import Iterable

_JOINERS = "\u200c\u200d"  # between letters of some scripts, and between emoji


def printable(text: str) -> str:
    """Escapes what would control a terminal; keeps line ends and tabs.

    Names, configs and samples may be a stranger's, or of a model that is barely
    trained. Escaped are control characters, marks that reverse the direction of text,
    and halves of characters.
    """
    return "".join(c if _is_shown(c) or c in "\n\t" else _escape(c) for c in text)


def one_line(text: str) -> str:
    """Escapes what would control a terminal, and makes spaces of line ends."""
    return " ".join(printable(text).split("\n")).replace("\t", "\\t")


def _is_shown(c: str) -> bool:
    return c.isprintable() or c in _JOINERS or unicodedata.category(c) == "Zs"


def _escape(c: str) -> str:
    return repr(c)[1:-1]


def format_bytes(n: float) -> str:
    """Returns 1536 as "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def format_count(value: float) -> str:
    """Returns 51234 as "51.2k"."""
    value = float(f"{value:.3g}")  # first, or 999999 becomes "1e+03k"
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def format_seconds(seconds: float) -> str:
    """Returns 0.01234 as "12.34 ms"."""
    if seconds >= 10:
        return f"{seconds:.1f} s"
    ms = seconds * 1e3
    return f"{ms:.{1 if ms >= 100 else 2 if ms >= 1 else 3}f} ms"


def format_duration(seconds: float) -> str:
    """Returns 83 as "1:23" and 3723 as "1:02:03"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns "; did you mean X?" for the most similar name, or ""."""
    matches = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f"; did you mean {matches[0]}?" if matches else ""
