"""Where the time of a run went, over all its attempts, and its goodput.

Each attempt adds lines to `attempts.jsonl`, with its seconds by category so far. No
line is ever changed, so that a killed attempt has what it did until its last one.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jshard.system.files.untrusted import parse_json

ATTEMPTS = "attempts.jsonl"  # in a run's folder
_LOST, OTHER = "lost", "other"
CATEGORIES = {
    "training": "training",
    "starting": "starting",
    "compiling": "compiling",
    "restoring": "restoring",
    "data": "waiting for data",
    "saving": "saving",
    "evaluating": "evaluating",
    "profiling": "profiling",
    "checking": "checking devices",
    "collecting": "collecting garbage",
    "hooks": "hooks and logs",
    OTHER: "other",  # what has no category yet, also in a file of another version
    _LOST: "lost and repeated after a failure",
}
_ONCE = ("starting", "compiling", "restoring")  # what an attempt does before its steps
_COUNTS = ("attempt", "from_step", "reached", "step")
_SAME = ("attempt", "from_step", "reached", "started")  # in all lines of an attempt
_MOST_STEPS, _MOST_SECONDS = 2**53, 2.0**40


@dataclasses.dataclass(frozen=True)
class Goodput:
    """A run's account.

    Attributes:
      attempts: How often it was started.
      seconds: By category, the longest first; they sum to the attempts' wall time.
      lost_steps: Steps that were computed and then lost.
      down: Seconds between attempts, when the run did not exist.
    """

    attempts: int
    seconds: Mapping[str, float]
    lost_steps: int
    down: float

    @property
    def total(self) -> float:
        """The attempts' wall time, in seconds."""
        return sum(self.seconds.values())

    @property
    def training(self) -> float:
        """The goodput: the share of the time that went to steps which were kept."""
        return self.seconds.get("training", 0.0) / self.total if self.total else 0.0

    def __str__(self) -> str:
        shares = {name: round(100 * x / self.total) for name, x in self.seconds.items()}
        parts = [
            f"{share}% {self.describe(name)}"
            for name, share in shares.items()
            if share and name != "training"
        ]
        attempts = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        text = f"of {format_long(self.total)} in {attempts}, "
        text += f"{self.training:.0%} was training"
        text += f"; {', '.join(parts)}" * bool(parts)
        between = f"; {format_long(self.down)} down between attempts"
        return text + between * (self.down >= 1)

    def describe(self, category: str) -> str:
        """Returns a category in words."""
        steps = "1 step" if self.lost_steps == 1 else f"{self.lost_steps} steps"
        return CATEGORIES[category] + f" ({steps})" * (category == _LOST)


def read_goodput(
    workdir: Path, leave_out: Callable[[str], object] = lambda _: None
) -> Goodput | None:
    """Reads a run's account; None if it has none.

    Damaged lines are left out, and `leave_out` is called with what they are.
    """
    newest: dict[int, Mapping[str, Any]] = {}
    for line in _lines(workdir, leave_out):
        newest[line["attempt"]] = line
    if not newest:
        return None
    attempts = [newest[number] for number in sorted(newest)]
    for i, following in enumerate(attempts[1:]):  # a kill cost the lines of seconds
        step = max(attempts[i]["step"], following["reached"])
        attempts[i] = {**attempts[i], "step": step}
    kept, lowest = {}, _MOST_STEPS  # how many steps of each attempt were kept
    for line in reversed(attempts):
        kept[line["attempt"]] = lowest
        lowest = min(lowest, line["from_step"])
    bases = _at_steps(workdir, kept)
    seconds, lost_steps, down = dict.fromkeys(CATEGORIES, 0.0), 0, 0.0
    for line in attempts:
        for name, value in line["seconds"].items():
            seconds[name] += value
        number = line["attempt"]
        if line["step"] > kept[number]:
            lost_steps += line["step"] - max(kept[number], line["from_step"])
            for name, value in line["seconds"].items():
                lost = value - bases.get(number, line)["seconds"][name]
                lost = 0.0 if name in _ONCE else max(0.0, lost)
                seconds[name] -= lost
                seconds[_LOST] += lost
    for one, following in itertools.pairwise(attempts):
        down += max(0.0, following["started"] - one["time"])
    found = sorted(((x, name) for name, x in seconds.items() if x > 0), reverse=True)
    return Goodput(len(attempts), {name: x for x, name in found}, lost_steps, down)


def newest_attempt(workdir: Path) -> int:
    """Returns the number of the run's last attempt, 0 if there was none."""
    return max((line["attempt"] for line in _lines(workdir, lambda _: None)), default=0)


def _at_steps(workdir: Path, steps: Mapping[int, int]) -> dict[int, Mapping[str, Any]]:
    """Returns what each attempt had done when it came to its step in `steps`.

    That is the line of the save of this step, if there is one, and otherwise the first
    one at the step or after it.
    """
    found: dict[int, Mapping[str, Any]] = {}
    for line in _lines(workdir, lambda _: None):
        number = line["attempt"]
        if line["step"] < steps[number]:
            continue
        saved = line.get("saved") is True and line["step"] == steps[number]
        if number not in found or saved:
            found[number] = line
    return found


def _lines(
    workdir: Path, leave_out: Callable[[str], object]
) -> Iterator[Mapping[str, Any]]:
    """Yields the lines that hold what they must."""
    path = workdir / ATTEMPTS
    if not path.exists():
        return
    earlier: dict[int, Mapping[str, Any]] = {}
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):  # it is being written, or a kill cut it
                continue
            line = _parsed(text)
            if line is None or not _follows(line, earlier):
                leave_out(f"{ATTEMPTS}, line {number}: it is no account of an attempt")
                continue
            earlier[line["attempt"]] = line
            yield line


def _follows(line: Mapping[str, Any], earlier: Mapping[int, Mapping[str, Any]]) -> bool:
    """Returns whether a line goes on where the one before it of its attempt ended."""
    before = earlier.get(line["attempt"])
    return before is None or all(line[name] == before[name] for name in _SAME)


def _parsed(text: bytes) -> dict[str, Any] | None:
    """Returns a line of the file; None if it is none, or half of one."""
    try:
        line = parse_json(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or not isinstance(line.get("seconds"), dict):
        return None
    numbers = [line.get("started"), line.get("time"), *line["seconds"].values()]
    counts = [line.get(name) for name in _COUNTS]
    whole = all(type(n) is int and 0 <= n < _MOST_STEPS for n in counts)
    if not whole or not all(map(_is_duration, numbers)):
        return None
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    for name, value in line["seconds"].items():
        seconds[name if name in CATEGORIES else OTHER] += value
    return line | {"seconds": seconds}


def _is_duration(value: Any) -> bool:
    numeric = type(value) in (int, float) and math.isfinite(value)
    return numeric and 0 <= value < _MOST_SECONDS


def format_long(seconds: float) -> str:
    """Returns 45 as "45 s", 750 as "12 min" and 7800 as "2 h 10 min"."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours} h"] * bool(hours) + [f"{minutes} min"] * bool(minutes)
    return " ".join(parts)
