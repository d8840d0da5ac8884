"""Where a run starts: at its first step, or after a checkpoint in its folder."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jshard.checkpoint.frozen import source_of
from jshard.checkpoint.restore import CHECKPOINTS, check_fits, find_newest
from jshard.checkpoint.step_folders import find_steps, step_folder
from jshard.config.run_config import Config
from jshard.distributed import Peers
from jshard.errors import UserError
from jshard.fsdp.state import TrainState
from jshard.report.run_report import METRICS, read_metrics
from jshard.run.resume import (
    Changes,
    changed_keys,
    check_changes,
    describe_changes,
    read_config,
    read_object,
)

STOPPED = "stopped"  # the note of a run that a hook ended
_Line: TypeAlias = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run starts.

    Attributes:
      step: The number of updates made so far.
      checkpoint: The verified checkpoint to restore; None starts with new values.
      resumes: Whether the folder already holds this run.
      metrics: The run's lines of metrics up to `step`; None if it starts at 0.
      unevaluated: Whether the evaluation due at `step` was not made.
      held: Whether to go on from the state that the processes hold.
      stopped: Why the run is done at `step`, as a hook asked; empty if it is not.
      message: What to tell the user; empty for a new run.
    """

    step: int = 0
    checkpoint: Path | None = None
    resumes: bool = False
    metrics: Sequence[Mapping[str, Any]] | None = None
    unevaluated: bool = False
    held: bool = False
    stopped: str = ""
    message: str = ""


def find_start(
    workdir: Path,
    config: Config,
    peers: Peers,
    abstract_state: TrainState | None = None,
    held: int | None = None,
    shown: str = "",
) -> Start:
    """Finds the run's newest complete checkpoint, without writing anything.

    A state that the processes hold is preferred, unless the checkpoint is newer.

    Process 0 decides, because a network disk may show older contents to the others.
    Those help to verify the checkpoint, and get neither metrics nor message.

    Args:
      workdir: The run's folder, which need not exist.
      config: The config to resume with.
      peers: All processes; each calls this.
      abstract_state: What is to be restored, to find changes of the config that make
        it another model's, which cannot be accepted.
      held: The step of the state that each process holds, if there is one.
      shown: What to call the folder; by default its path.

    Raises:
      UserError: The folder cannot be read, the config changes what is trained, no
        checkpoint is complete any more, or a process does not see it.
    """
    folder, shown = workdir / CHECKPOINTS, shown or str(workdir)
    changes: Changes = {}

    def obstacle() -> str:
        """Why the newest checkpoint, which is not verified, does not fit the state."""
        if abstract_state is not None:
            try:
                check_fits(step_folder(folder, find_steps(folder)[-1]), abstract_state)
            except (UserError, ValueError) as error:
                return str(error)
        return ""

    try:
        if peers.index == 0 and find_steps(folder):
            changes = changed_keys(read_config(workdir), config)
            check_changes(changes, config.checkpoint.accept, obstacle)
        checkpoint = find_newest(folder)
        start = Start()
        if peers.index == 0 and checkpoint:
            start = _resume(workdir, config, changes, checkpoint, shown)
        elif peers.index == 0:
            start = _start_again(workdir, config, shown)
        if peers.index == 0 and held is not None and held >= start.step:
            start = _hold(workdir, config, start, held)
        if peers.index == 0 and start.step:
            start = dataclasses.replace(start, stopped=_stopped(workdir, config, start))
    except OSError as error:
        where = error.filename or workdir
        raise UserError(f"cannot read {where}: {error.strerror}") from error
    names = ("step", "resumes", "unevaluated", "held", "stopped")
    decided = json.dumps({name: getattr(start, name) for name in names})
    decided = json.loads(peers.publish("start", decided))
    return dataclasses.replace(start, checkpoint=checkpoint, **decided)


def _resume(
    workdir: Path, config: Config, changes: Changes, checkpoint: Path, shown: str
) -> Start:
    step = int(checkpoint.stem)  # the name may have a suffix
    found = read_metrics(workdir)
    metrics, gone = _metrics_up_to(checkpoint, step, found)
    messages = [
        f"resuming {shown} after step {step}",
        describe_changes(changes),
        _describe_missing_checkpoints(workdir / CHECKPOINTS, found),
        gone,
    ]
    if config.checkpoint.restore and not source_of(checkpoint):
        messages.append("checkpoint.restore is for new runs: ignored")
    return Start(
        step,
        checkpoint,
        resumes=True,
        metrics=metrics,
        unevaluated=_unevaluated(config, step, metrics),
        message="; ".join(filter(None, messages)),
    )


def _hold(workdir: Path, config: Config, start: Start, step: int) -> Start:
    if step == start.step:
        return dataclasses.replace(start, held=True)
    metrics = [line for line in read_metrics(workdir) if line["step"] <= step]
    return dataclasses.replace(
        start,
        step=step,
        held=True,
        resumes=bool(metrics),
        metrics=metrics,
        unevaluated=_unevaluated(config, step, metrics),
        message=f"going on after step {step}",
    )


def _unevaluated(config: Config, step: int, metrics: Sequence[_Line]) -> bool:
    due = config.eval_every and step % config.eval_every == 0
    evaluated = {line["step"] for line in metrics if "eval_loss" in line}
    return bool(due and step not in evaluated)


def _stopped(workdir: Path, config: Config, start: Start) -> str:
    """Returns why the run stopped; "" if it is to be longer now, or did not."""
    notes = workdir / "notes.json"
    if not notes.exists():
        return ""
    stopped = read_object(notes, "repair or remove it").get(STOPPED)
    if not stopped or (stopped["step"], stopped["steps"]) != (start.step, config.steps):
        return ""
    return stopped["why"]


def _metrics_up_to(
    checkpoint: Path, step: int, found: Sequence[_Line]
) -> tuple[list[_Line], str]:
    """Returns the lines up to a checkpoint, and a message if some were missing.

    A checkpoint has a copy of the lines up to its step.
    """
    found = [line for line in found if line["step"] <= step]
    kept = read_metrics(checkpoint)
    there, known = ({json.dumps(line) for line in lines} for lines in (found, kept))
    gone = [line["step"] for line in kept if json.dumps(line) not in there]
    if gone:
        more = [line for line in found if json.dumps(line) not in known]
        message = (
            f"{METRICS} lacked lines of {_span(min(gone), max(gone))}: restored from "
            "the checkpoint"
        )
        return sorted(kept + more, key=lambda line: line["step"]), message
    last = max((line["step"] for line in found if "loss" in line), default=0)
    if last < step:  # every saved step is logged
        return found, f"{METRICS} lacks {_span(last + 1, step)}: they are lost"
    return found, ""


def _describe_missing_checkpoints(folder: Path, metrics: Sequence[_Line]) -> str:
    newest = find_steps(folder)[-1]
    saved = {line["step"] for line in metrics if "checkpoint_bytes" in line}
    gone = ", ".join(str(step) for step in sorted(saved) if step > newest)
    return f"checkpoints of later steps were saved but are missing: {gone}" * bool(gone)


def _span(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _start_again(workdir: Path, config: Config, shown: str) -> Start:
    """A new run, or one that ended before its first checkpoint."""
    metrics = read_metrics(workdir)
    if not metrics:
        return Start()
    if any("checkpoint_bytes" in line for line in metrics):
        raise UserError(
            f"the checkpoints of {shown} are missing: put them back in "
            f"{shown}/{CHECKPOINTS}, or give another --workdir"
        )
    old = read_config(workdir)
    if not old.get("checkpoint", {}).get("every"):
        return Start()  # the run never saved: RunFolder refuses to overwrite it
    changes = changed_keys(old, config)
    check_changes(changes, config.checkpoint.accept)
    message = f"{shown} has no checkpoint yet: starting again from step 1"
    changed = describe_changes(changes)
    return Start(resumes=True, message="; ".join(filter(None, (message, changed))))
