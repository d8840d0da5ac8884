"""Numbers as people read them."""


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
