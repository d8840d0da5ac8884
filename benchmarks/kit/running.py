"""Stages as processes with limits: what one of them does to the GPU ends with it."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.machine import Machine
from kit.results import BEGUN, DONE, FAILED, TOO_LONG, Recorder, Results

ATTEMPTS = 2  # of a part that was cut off from outside


@dataclass(frozen=True)
class Part:
    """A piece of a stage, which runs in a process of its own.

    Attributes:
      name: unique within the stage.
      run: measures, and records.
      limit: seconds; one that takes longer hangs.
      environment: of the process, besides that of this one; None removes.
      repeat: run it again though it is done.
    """

    name: str
    run: Callable[[Recorder], None]
    limit: float = 180
    environment: Mapping[str, str | None] = field(default_factory=dict)
    repeat: bool = False


def run_stage(
    stage: str,
    parts: Sequence[Part],
    out: Path,
    machine: Machine,
    *,
    seconds: float,
    again: bool,
    command: Sequence[str],
) -> Results:
    """Runs the parts of a stage that are not done, as long as there is time.

    Args:
      stage: its name.
      parts: all of them, the most wanted first.
      out: the folder of results.
      machine: this one, which the results are of.
      seconds: that the stage may take.
      again: whether to repeat those that failed.
      command: starts a part's process, with "stage/part" after it.
    """
    results = Results(out, stage)
    results.values["machine"] = machine.about()
    end = time.monotonic() + seconds
    for part in parts:
        known = results.part(part.name)
        gone = known["status"] == BEGUN and known["attempts"] >= ATTEMPTS
        if known["status"] == DONE and not part.repeat:
            continue
        if (known["status"] in (FAILED, TOO_LONG) or gone) and not again:
            continue
        left = end - time.monotonic()
        if left < min(30, part.limit):
            break
        results.update(part.name, status=BEGUN, attempts=known["attempts"] + 1)
        print(f"--- {stage}/{part.name}", flush=True)
        outcome = _run(part, [*command, f"{stage}/{part.name}"], left)
        results = Results(out, stage)  # the part has written to it
        results.update(part.name, **outcome)
        print(f"    {outcome['status']} in {outcome['seconds']} s", flush=True)
    results.write()
    return results


def _run(part: Part, words: list[str], left: float) -> dict[str, Any]:
    """What became of a part's process."""
    environment = dict(os.environ)
    for name, value in part.environment.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            words, env=environment, stderr=errors, start_new_session=True
        )
        try:
            code = process.wait(min(part.limit, left))
        except subprocess.TimeoutExpired:
            code = None
        finally:  # with all that it has started, also when this one is interrupted
            _end(process)
        took = round(time.monotonic() - start, 1)
        errors.seek(0)
        text = errors.read()
    if code == 0:
        return {"status": DONE, "seconds": took, "error": ""}
    sys.stderr.write(text[-4000:])
    if code is None and part.limit > left:
        return {"status": BEGUN, "seconds": took, "error": "the stage's time was over"}
    status = TOO_LONG if code is None else FAILED
    return {"status": status, "seconds": took, "error": last_words(code, text)}


def _end(process: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended, and left nothing behind
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_words(code: int | None, text: str) -> str:
    """What says most about a failure: its error, and the last lines."""
    how = "killed at its limit" if code is None else f"exit {code}"
    lines = [line for line in text.splitlines() if line.strip()]
    named = [x for x in lines if "Error" in x or "RESOURCE_EXHAUSTED" in x]
    return "\n".join([how, *named[-1:], *lines[-3:]])[:2000]
