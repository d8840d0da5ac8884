"""Where a run starts: at its first step, after a checkpoint, or from local copies."""

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jshard.checkpoint.frozen import source_of
from jshard.checkpoint.local import Found, LocalCopies
from jshard.checkpoint.restore import CHECKPOINTS, check_fits, find_newest
from jshard.checkpoint.step_folders import find_steps, step_folder
from jshard.config.run_config import Config, flatten
from jshard.data.position import read_position
from jshard.distributed.peers import Peers
from jshard.errors import UserError
from jshard.fsdp.state import TrainState
from jshard.report.run_report import METRICS, read_metrics
from jshard.run.resume import (
    Changes,
    changed_keys,
    check_changes,
    describe_changes,
    read_config,
    read_notes,
)

STOPPED = "stopped"  # the note of a run that a hook ended
RUN = "run"  # the note that tells a run from another one in the same folder
_Line: TypeAlias = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run starts.

    Attributes:
      step: The number of updates made so far.
      checkpoint: The verified checkpoint to restore; None starts with new values.
      resumes: Whether the folder already holds this run.
      metrics: The run's lines of metrics up to `step`; None if it starts at 0.
      examples: How many examples of the training data were read up to `step`; not
        known of a state that is `held`.
      unevaluated: Whether the evaluation due at `step` was not made.
      held: Whether to go on from the state that the processes hold.
      local: Whether to go on from local copies, which are newer than checkpoints.
      texts: The folder of what was saved besides arrays: the checkpoint's, or one with
        what this process had kept with its local copy. None starts with nothing.
      run: Tells the run from another one in the same folder.
      number: How many times the run was started before.
      stopped: Why the run is done at `step`, as a hook asked; empty if it is not.
      message: What to tell the user; empty for a new run.
    """

    step: int = 0
    checkpoint: Path | None = None
    resumes: bool = False
    metrics: Sequence[Mapping[str, Any]] | None = None
    examples: int = 0
    unevaluated: bool = False
    held: bool = False
    local: bool = False
    texts: Path | None = None
    run: str = ""
    number: int = 0
    stopped: str = ""
    message: str = ""


def find_start(
    workdir: Path,
    config: Config,
    peers: Peers,
    abstract_state: TrainState | None = None,
    held: int | None = None,
    copies: LocalCopies | None = None,
    shown: str = "",
) -> Start:
    """Finds the run's newest complete checkpoint, without writing anything.

    A state that the processes hold is preferred, unless the checkpoint is newer, and
    so are local copies: then no checkpoint is read.

    Process 0 decides, because a network disk may show older contents to the others.
    Those help to verify the checkpoint, and get neither metrics nor message.

    Args:
      workdir: The run's folder, which need not exist.
      config: The config to resume with.
      peers: All processes; each calls this.
      abstract_state: What is to be restored, to find changes of the config that make
        it another model's, which cannot be accepted.
      held: The step of the state that each process holds, if there is one.
      copies: The run's local copies, if it makes them.
      shown: What to call the folder; by default its path.

    Raises:
      UserError: The folder cannot be read, the config changes what is trained, no
        checkpoint is complete any more, or a process does not see it.
    """
    folder, shown = workdir / CHECKPOINTS, shown or str(workdir)
    changes: Changes = {}

    def obstacle() -> str:
        """Why the newest checkpoint, which is not verified, does not fit the state."""
        if abstract_state is not None and (steps := find_steps(folder)):
            try:
                check_fits(step_folder(folder, steps[-1]), abstract_state)
            except (UserError, ValueError) as error:
                return str(error)
        return ""

    try:
        found, known, numbers = Found(), "", []
        if copies is not None:
            told = ""
            if peers.index == 0:
                least = max([1, *find_steps(folder)])
                notes = read_notes(workdir)
                resumed = notes.get("resumed", [])
                told = json.dumps([notes.get(RUN, ""), resumed, least])
            known, numbers, least = json.loads(peers.publish("run", told))
            found = copies.find(known, numbers, least)
        if peers.index == 0 and (find_steps(folder) or found.step):
            changes = changed_keys(read_config(workdir), config)
            check_changes(changes, config.checkpoint.accept, obstacle)
        checkpoint = None if found.step else find_newest(folder)
        start = Start()
        if peers.index == 0:
            if checkpoint:
                step = int(checkpoint.stem)  # the name may have a suffix
                start = _resume(workdir, config, changes, step, checkpoint, shown)
            elif found.step and found.texts:
                start = _resume(
                    workdir, config, changes, found.step, found.texts, shown, local=True
                )
            else:
                start = _start_again(workdir, config, shown)
            if held is not None and held >= start.step:
                start = _hold(workdir, config, start, held)
            if start.step:
                stopped = _stopped(workdir, config, start)
                start = dataclasses.replace(start, stopped=stopped)
            if copies is not None:
                start = _numbered(start, known, numbers, found.note)
    except OSError as error:
        where = error.filename or workdir
        raise UserError(f"cannot read {where}: {error.strerror}") from error
    names = (
        "step", "resumes", "examples", "unevaluated", "held", "local", "run", "number",
        "stopped",
    )  # fmt: skip
    decided = json.dumps({name: getattr(start, name) for name in names})
    decided = json.loads(peers.publish("start", decided))
    texts = checkpoint or found.texts
    return dataclasses.replace(start, checkpoint=checkpoint, texts=texts, **decided)


def _numbered(start: Start, known: str, numbers: Sequence[int], note: str) -> Start:
    """Adds which run this is, how often it was started, and a note for the user."""
    run = known if start.resumes and known else secrets.token_hex(8)
    number = len(numbers) + 1 if start.resumes else 0
    message = "; ".join(filter(None, (start.message, note)))
    return dataclasses.replace(start, run=run, number=number, message=message)


def _resume(
    workdir: Path,
    config: Config,
    changes: Changes,
    step: int,
    texts: Path,
    shown: str,
    local: bool = False,
) -> Start:
    found = read_metrics(workdir)
    metrics, gone = _metrics_up_to(texts, step, found)
    folder = workdir / CHECKPOINTS
    messages = [
        f"resuming {shown} after step {step}" + ", from the hosts' copies" * local,
        describe_changes(changes),
        "" if local else _describe_missing_checkpoints(folder, found),
        gone,
    ]
    if config.checkpoint.restore and not local and not source_of(texts):
        messages.append("checkpoint.restore is for new runs: ignored")
    return Start(
        step,
        resumes=True,
        local=local,
        metrics=metrics,
        examples=read_position(texts, step, config.batch_size),
        unevaluated=_unevaluated(config, step, metrics),
        message="; ".join(filter(None, messages)),
    )


def _hold(workdir: Path, config: Config, start: Start, step: int) -> Start:
    if step == start.step:
        return dataclasses.replace(start, held=True, local=False)
    metrics = [line for line in read_metrics(workdir) if line["step"] <= step]
    return dataclasses.replace(
        start,
        step=step,
        held=True,
        local=False,
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
    stopped = read_notes(workdir).get(STOPPED)
    if not stopped or (stopped["step"], stopped["steps"]) != (start.step, config.steps):
        return ""
    return stopped["why"]


def _metrics_up_to(
    texts: Path, step: int, found: Sequence[_Line]
) -> tuple[list[_Line], str]:
    """Returns the lines up to a step, and a message if some were missing.

    A checkpoint or a local copy has those up to its step, in the folder `texts`.
    """
    found = [line for line in found if line["step"] <= step]
    kept = read_metrics(texts)
    there, known = ({json.dumps(line) for line in lines} for lines in (found, kept))
    gone = [line["step"] for line in kept if json.dumps(line) not in there]
    if gone:
        more = [line for line in found if json.dumps(line) not in known]
        message = (
            f"{METRICS} lacked lines of {_span(min(gone), max(gone))}: restored from "
            "the copy saved with the state"
        )
        return sorted([*kept, *more], key=lambda line: line["step"]), message
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
    if not flatten(old).get("checkpoint.every"):
        return Start()  # the run never saved: RunFolder refuses to overwrite it
    changes = changed_keys(old, config)
    check_changes(changes, config.checkpoint.accept)
    message = f"{shown} has no checkpoint yet: starting again from step 1"
    changed = describe_changes(changes)
    return Start(resumes=True, message="; ".join(filter(None, (message, changed))))
