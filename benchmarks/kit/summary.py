"""A stage's results as a page of Markdown."""

from typing import Any

from kit.results import Values


def summarize(values: Values) -> str:
    """What was measured on what, part by part, with what failed."""
    machine = values["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    lines = [
        f"# {values['stage']}: {machine['gpus']} x {machine['gpu']}",
        "",
        f"{machine['date']}, commit {machine['commit']}, Python {machine['python']}, "
        f"{versions}",
    ]
    driver = machine["driver"]
    if driver:
        lines += ["", ", ".join(f"{name} {value}" for name, value in driver.items())]
    for name, part in values["parts"].items():
        lines += ["", f"## {name}: {part['status']} ({part.get('seconds', 0)} s)", ""]
        if part.get("error"):
            lines += ["```", part["error"], "```", ""]
        lines += _table(part["results"])
    return "\n".join(lines) + "\n"


def _table(results: dict[str, Any]) -> list[str]:
    """A line for each measurement."""
    if not results:
        return []
    rows = [
        f"| {key} | " + ", ".join(_pairs(values)) + " |"
        for key, values in results.items()
    ]
    return ["| | |", "|---|---|", *rows]


def _pairs(values: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _pairs(value, f"{prefix}{name} ")
        elif name != "measured" and value not in (None, [], ""):
            found.append(f"{prefix}{name.replace('_', ' ')} {_text(name, value)}")
    return found


def _text(name: str, value: Any) -> str:
    """Bytes and rates in units that one reads."""
    if isinstance(value, bool) or not isinstance(value, int | float | list):
        return str(value)
    if isinstance(value, list):
        if value and isinstance(value[0], dict):
            return "; ".join(", ".join(_pairs(item)) for item in value)
        if len(value) > 6:
            return f"{_text(name, value[0])} ... {_text(name, value[-1])}"
        return " ".join(_text(name, item) for item in value)
    if name == "flops_per_second":
        return f"{value / 1e12:.1f} T"
    if name == "bytes_per_second":
        return f"{value / 1e9:.1f} GB/s"
    if "bytes" in name or name == "memory_limit":
        return f"{value / 2**30:.3g} GiB"
    return f"{value:.5g}"
