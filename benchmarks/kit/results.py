"""What a stage has measured so far: one JSON file, whole at any time."""

import json
import time
from pathlib import Path
from typing import Any

from jshard.system.files.atomic import replace_file

DONE, BEGUN, FAILED, TOO_LONG = "done", "begun", "failed", "too long"
Values = dict[str, Any]


class Results:
    """The file of a stage.

    Its ``parts`` have, by name, a ``status``, the ``seconds`` they took, a last
    ``error``, and ``results``: values by key, written as soon as they are measured.
    """

    def __init__(self, out: Path, stage: str):
        """Reads what there is."""
        self.path = out / f"{stage}.json"
        self.values: Values = {"stage": stage, "parts": {}}
        if self.path.exists():
            self.values = json.loads(self.path.read_text())

    def part(self, name: str) -> Values:
        """What is known of a part."""
        empty = {"status": None, "attempts": 0, "results": {}}
        return self.values["parts"].setdefault(name, empty)

    def update(self, name: str, **values: Any) -> None:
        """Sets values of a part, and writes the file."""
        self.part(name).update(values)
        self.write()

    def write(self) -> None:
        """Replaces the file by all that is known."""
        replace_file(self.path, json.dumps(self.values, indent=1))


class Recorder:
    """What a part calls with each of its measurements."""

    def __init__(self, out: Path, stage: str, part: str):
        """Goes on where an earlier try was cut off."""
        self.out, self._part, self._results = out, part, Results(out, stage)

    def has(self, key: str) -> bool:
        """Whether it is measured already."""
        return key in self._results.part(self._part)["results"]

    def __call__(self, key: str, **values: Any) -> None:
        """Keeps what was measured."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        found = self._results.part(self._part)["results"]
        self._results.update(
            self._part, results=found | {key: {**values, "measured": now}}
        )
        print(key, json.dumps(values), flush=True)

    def of(self, stage: str) -> Values:
        """The results of another stage: by part, then by key."""
        parts = Results(self.out, stage).values["parts"]
        return {name: part["results"] for name, part in parts.items()}
