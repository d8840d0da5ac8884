"""The lines of a run's metrics up to the step that it resumes after.

They are read one after the other: a run of a million steps has 250 MB of them. What is
saved with a state holds the newest alone, in case the folder's file lost them.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jshard.system.files.atomic import replacing
from jshard.training.report.run_files import METRICS, read_metrics

NEWEST = 2**20  # bytes of lines that are saved with a state, where there are as many

Line: TypeAlias = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Metrics:
    """What a run's lines say about its steps up to one.

    Attributes:
      some: Whether there are any.
      evaluated: Whether it was evaluated after the step.
      saved: The steps after it of which a checkpoint was saved.
      restored: The newest lines, as saved with the state, if the folder's file lacks
        some of them.
      message: Which were missing; "" if none.
    """

    some: bool
    evaluated: bool
    saved: Sequence[int]
    restored: Sequence[Line]
    message: str


def look_through(workdir: Path, step: int, texts: Path | None = None) -> Metrics:
    """Reads what a run's lines say; those of a step may be in the folder `texts`, too.

    Raises:
      UserError: A line is damaged.
    """
    kept = [] if texts is None else list(read_metrics(texts))
    first = min((line["step"] for line in kept), default=step + 1)
    missing = {json.dumps(line): line["step"] for line in kept}
    some, saved, last = bool(kept), [], 0
    evaluated = any(_evaluates(step, line) for line in kept)
    lost: list[int] = []  # steps before the first that is kept, by the ends of gaps
    for line in read_metrics(workdir):
        if line["step"] > step:
            saved += [line["step"]] * ("checkpoint_bytes" in line)
            continue
        some = True
        evaluated |= _evaluates(step, line)
        if line["step"] >= first:
            missing.pop(json.dumps(line), None)
        elif "loss" in line:  # as every step has
            lost += [last + 1, line["step"] - 1] * (line["step"] > last + 1)
            last = max(last, line["step"])
    if texts is not None and last < first - 1:
        lost += [last + 1, first - 1]
    messages = []
    if missing:
        steps = _span(list(missing.values()))
        messages.append(
            f"{METRICS} lacked lines of {steps}: restored from the copy saved with the "
            "state"
        )
    if lost:
        messages.append(f"{METRICS} lacks {_span(lost)}: they are lost")
    restored = kept if missing else ()
    return Metrics(some, evaluated, saved, restored, "; ".join(messages))


def _evaluates(step: int, line: Line) -> bool:
    return line["step"] == step and "eval_loss" in line


def cut_back(workdir: Path, step: int, restored: Sequence[Line] = ()) -> int:
    """Drops the lines of later steps, and puts restored ones in their places.

    Returns the last step of them all.

    Raises:
      OSError: The folder cannot be written.
      UserError: A line is damaged.
    """
    last = 0
    with replacing(workdir / METRICS) as file:
        for line in _merged(read_metrics(workdir), restored):
            last = max(last, line["step"])
            if line["step"] <= step:
                file.write(f"{json.dumps(line)}\n".encode())
    return last


def _merged(found: Iterator[Line], restored: Sequence[Line]) -> Iterator[Line]:
    """Yields lines before the restored ones, and then all others by their steps."""
    if not restored:
        yield from found
        return
    first = min(line["step"] for line in restored)
    known = {json.dumps(line) for line in restored}
    late = []
    for line in found:
        if line["step"] < first:
            yield line
        elif json.dumps(line) not in known:
            late.append(line)
    yield from sorted([*restored, *late], key=lambda line: line["step"])


def _span(steps: Sequence[int]) -> str:
    first, last = min(steps), max(steps)
    return f"step {first}" if first == last else f"steps {first} to {last}"
