"""Where a run starts: at its first step, or after a checkpoint in its folder."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jshard.checkpoint.restore import CHECKPOINTS, check_fits, find_newest
from jshard.checkpoint.step_folders import find_steps, step_folder
from jshard.distributed import Peers
from jshard.errors import UserError
from jshard.state import TrainState
from jshard.training.config.config import Config
from jshard.training.report.report import METRICS, read_metrics
from jshard.training.run_folder.resume import (
    Changes,
    changed_keys,
    check_changes,
    describe_changes,
    read_config,
)

_Line: TypeAlias = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run starts.

    Attributes:
      step: Updates made so far.
      checkpoint: The step's folder to restore, verified; None starts with new values.
      resumes: Whether the folder holds the run already.
      metrics: The lines of the run up to `step`; None where it starts at 0.
      unevaluated: Whether the run was stopped before the evaluation due at `step`.
      message: What to tell the user; empty for a new run.
    """

    step: int = 0
    checkpoint: Path | None = None
    resumes: bool = False
    metrics: Sequence[Mapping[str, Any]] | None = None
    unevaluated: bool = False
    message: str = ""


def find_start(
    workdir: Path,
    config: Config,
    peers: Peers,
    abstract_state: TrainState | None = None,
) -> Start:
    """Looks for the run's newest whole checkpoint; nothing is written.

    Process 0 decides: a network disk may show the others what was before. They take
    part in verifying the checkpoint, and know neither metrics nor message.

    Args:
      workdir: The run's folder, which need not exist.
      config: What the run is to go on with.
      peers: The processes; all look together.
      abstract_state: What is to be restored; changes of the config that make it
        another model's cannot be accepted. None does not look.

    Raises:
      UserError: The folder cannot be read, the config changes what the run is about,
        no checkpoint is whole any more, or a process does not see it.
    """
    try:
        return _find_start(workdir, config, peers, abstract_state)
    except OSError as error:
        where = error.filename or workdir
        raise UserError(f"cannot read {where}: {error.strerror}") from error


def _find_start(
    workdir: Path, config: Config, peers: Peers, abstract_state: TrainState | None
) -> Start:
    folder = workdir / CHECKPOINTS
    changes: Changes = {}
    if peers.index == 0 and find_steps(folder):
        changes = changed_keys(read_config(workdir), config)
        check_changes(
            changes, config.checkpoint.accept, lambda: _obstacle(folder, abstract_state)
        )
    checkpoint = find_newest(folder)
    start = Start()
    if peers.index == 0:
        start = (
            _resume(workdir, config, changes, checkpoint)
            if checkpoint
            else _start_again(workdir, config)
        )
    names = ("step", "resumes", "unevaluated")
    decided = json.dumps({name: getattr(start, name) for name in names})
    decided = json.loads(peers.publish("start", decided))
    return dataclasses.replace(start, checkpoint=checkpoint, **decided)


def _resume(workdir: Path, config: Config, changes: Changes, checkpoint: Path) -> Start:
    """Goes on after a checkpoint."""
    folder = workdir / CHECKPOINTS
    step = int(checkpoint.stem)  # the name may have a suffix, of one that is aside
    found = read_metrics(workdir)
    metrics, gone = _metrics_up_to(checkpoint, step, found)
    messages = [
        f"resuming {workdir} after step {step}",
        describe_changes(changes),
        _tell_of_gone_checkpoints(folder, found),
        gone,
    ]
    if config.checkpoint.restore:
        messages.append("checkpoint.restore is for new runs: ignored")
    due = config.eval_every and step % config.eval_every == 0
    evaluated = {line["step"] for line in metrics if "eval_loss" in line}
    return Start(
        step,
        checkpoint,
        resumes=True,
        metrics=metrics,
        unevaluated=bool(due and step not in evaluated),
        message="; ".join(filter(None, messages)),
    )


def _obstacle(folder: Path, abstract_state: TrainState | None) -> str:
    """Why the newest checkpoint cannot become this state; "" where it can.

    Called by process 0 alone, so it verifies nothing.
    """
    if abstract_state is not None:
        newest = step_folder(folder, find_steps(folder)[-1])
        try:
            check_fits(newest, abstract_state)
        except (UserError, ValueError) as error:  # of another model, or unreadable
            return str(error)
    return ""


def _metrics_up_to(
    checkpoint: Path, step: int, found: Sequence[_Line]
) -> tuple[list[_Line], str]:
    """The lines up to a checkpoint, which keeps them, and what to tell of gone ones."""
    found = [line for line in found if line["step"] <= step]
    kept, there = read_metrics(checkpoint), {json.dumps(line) for line in found}
    gone = [line["step"] for line in kept if json.dumps(line) not in there]
    if gone:
        known = {json.dumps(line) for line in kept}
        more = [line for line in found if json.dumps(line) not in known]
        message = (
            f"{METRICS} lacked lines of {_span(min(gone), max(gone))}: they are taken "
            "from the checkpoint"
        )
        return sorted(kept + more, key=lambda line: line["step"]), message
    last = max((line["step"] for line in found if "loss" in line), default=0)
    if last < step:  # a step that is saved is logged
        return found, f"{METRICS} lacks {_span(last + 1, step)}: they are lost"
    return found, ""


def _tell_of_gone_checkpoints(folder: Path, metrics: Sequence[_Line]) -> str:
    steps = find_steps(folder)
    saved = {line["step"] for line in metrics if "checkpoint_bytes" in line}
    gone = sorted(step for step in saved if step > steps[-1])
    if not gone:
        return ""
    listed = ", ".join(map(str, gone))
    return f"the checkpoints of later steps are gone that were saved: {listed}"


def _span(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _start_again(workdir: Path, config: Config) -> Start:
    """A new run, or one that died before its first checkpoint."""
    metrics = read_metrics(workdir)
    if not metrics:
        return Start()
    if any("checkpoint_bytes" in line for line in metrics):
        raise UserError(
            f"{workdir} had checkpoints, and they are gone: put them back in "
            f"{workdir / CHECKPOINTS}, or give another --workdir"
        )
    old = read_config(workdir)
    if not old.get("checkpoint", {}).get("every"):
        return Start()  # it never saved: RunFolder refuses to write over it
    changes = changed_keys(old, config)
    check_changes(changes, config.checkpoint.accept)
    messages = [
        f"{workdir} has no checkpoint yet: starting again from step 1",
        describe_changes(changes),
    ]
    return Start(resumes=True, message="; ".join(filter(None, messages)))
