"""The files of a run as its report reads them: what is damaged is left out."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jshard.system.errors import UserError
from jshard.system.files.untrusted import parse_json, path_inside, read_json

METRICS = "metrics.jsonl"  # in a run's folder, and copied to each checkpoint
_PNG = b"\x89PNG\r\n\x1a\n"
_MOST_STEPS = 2**53


def read_object(file: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns the object in a JSON file, or an empty one; and what is left out."""
    if not file.exists():
        return {}, []
    try:
        value = read_json(file)
    except ValueError as error:
        return {}, [f"{file.name}: {error}"]
    if not isinstance(value, dict):
        return {}, [f"{file.name}: it is not a JSON object"]
    return value, []


def read_metrics(workdir: Path, having: str = "") -> Iterator[dict[str, Any]]:
    """Yields the lines of `metrics.jsonl`, without an incomplete last one.

    Args:
      workdir: A run's folder, or one of its checkpoints.
      having: The metric that is looked for: other lines may be left out.

    Raises:
      UserError: A line is not a JSON object with a step.
    """
    for number, line in _lines(workdir):
        if having and json.dumps(having).encode() not in line:
            continue
        values = _parsed(line)
        if values is None:
            raise UserError(
                f"{workdir / METRICS}, line {number}, is not a line of "
                "metrics: repair the file"
            )
        yield values


def read_numbers(
    workdir: Path, leave_out: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Yields the metrics of each step, and calls `leave_out` with what is left out.

    Values are numbers, or None for those that were not finite.
    """
    for number, line in _lines(workdir):
        values = _parsed(line)
        if values is None or not _is_step(values["step"]):
            leave_out(f"{METRICS}, line {number}: it has no metrics of a step")
            continue
        numbers = {name: x for name, x in values.items() if _is_number(x)}
        for name in values.keys() - numbers.keys():
            leave_out(f"{METRICS}, line {number}: {name!a} is not a number")
        yield numbers


def _lines(workdir: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the number and the text of each line: a long run's are not all held."""
    path = workdir / METRICS
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):  # data after the last newline is incomplete
                yield number, line


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        values = parse_json(line)
    except ValueError:
        return None
    if isinstance(values, dict) and isinstance(values.get("step"), int):
        return values
    return None


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST_STEPS


def _is_number(value: Any) -> bool:
    if value is None or type(value) is float:
        return value is None or math.isfinite(value)
    return type(value) is int and abs(value) < _MOST_STEPS


def read_picture(workdir: Path, name: Any) -> bytes:
    """Returns the content of a PNG file of the run.

    Raises:
      ValueError: it is none, or is not in the run's folder, by a link, say.
      OSError: it cannot be read.
    """
    file = path_inside(workdir, name)
    if not file.resolve().is_relative_to(workdir.resolve()):
        raise ValueError(f"{name} leads out of the folder")
    data = file.read_bytes()
    if not data.startswith(_PNG):
        raise ValueError(f"{name} is not a PNG picture")
    return data


def printable(text: str) -> str:
    """Returns text as UTF-8 can hold it, without control characters."""
    text = text.encode("utf-8", "replace").decode()
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", "\ufffd", text
    )
