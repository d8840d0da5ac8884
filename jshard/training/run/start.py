"""Where a run starts: at its first step, after a checkpoint, or from local copies."""

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jshard.data.position import read_position
from jshard.recipe.changes import (
    Changes,
    changed_keys,
    check_changes,
    describe_changes,
    read_config,
    read_notes,
)
from jshard.recipe.config.run_config import flatten
from jshard.recipe.config.settings import RunSettings
from jshard.sharding.settings.state import TrainState
from jshard.storage.checkpoint.frozen import source_of
from jshard.storage.checkpoint.local import Found, LocalCopies
from jshard.storage.checkpoint.orbax.folder import check_not_orbax
from jshard.storage.checkpoint.restore import CHECKPOINTS, check_fits, find_newest
from jshard.storage.checkpoint.step_folders import find_steps, step_folder
from jshard.system.errors import UserError
from jshard.system.jobs.peers import Peers
from jshard.training.report.run_files import read_metrics
from jshard.training.run.metrics_lines import Line, Metrics, look_through

STOPPED = "stopped"  # the note of a run that a hook ended
RUN = "run"  # the note that tells a run from another one in the same folder


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run starts.

    Attributes:
      step: The number of updates made so far.
      checkpoint: The verified checkpoint to restore; None starts with new values.
      resumes: Whether the folder already holds this run.
      restored: The newest lines of metrics up to `step`, if the folder's file lacks
        some of them.
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
    restored: Sequence[Line] = ()
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
    settings: RunSettings,
    recorded: Mapping[str, Any],
    peers: Peers,
    abstract_state: TrainState | None = None,
    held: int | None = None,
    copies: LocalCopies | None = None,
    *,
    shown: str = "",
) -> Start:
    """Finds the run's newest complete checkpoint, without writing anything.

    A state that the processes hold is preferred, unless the checkpoint is newer, and
    so are local copies: then no checkpoint is read.

    Process 0 decides, because a network disk may show older contents to the others.
    Those help to verify the checkpoint, and get neither metrics nor message.

    Args:
      workdir: The run's folder, which need not exist.
      settings: What to resume with.
      recorded: All keys of the config to resume with, as `config.json` has them.
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
        check_not_orbax(folder)
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
            changes = changed_keys(read_config(workdir), recorded)
            check_changes(changes, settings.checkpoint.accept, obstacle)
        checkpoint = None if found.step else find_newest(folder)
        start = Start()
        if peers.index == 0:
            if checkpoint:
                step = int(checkpoint.stem)  # the name may have a suffix
                start = _resume(workdir, settings, changes, step, checkpoint, shown)
            elif found.step and found.texts:
                step, texts = found.step, found.texts
                start = _resume(
                    workdir, settings, changes, step, texts, shown, local=True
                )
            else:
                start = _start_again(workdir, settings, recorded, shown)
            if held is not None and held >= start.step:
                start = _hold(workdir, settings, start, held)
            if start.step:
                stopped = _stopped(workdir, settings, start)
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
    settings: RunSettings,
    changes: Changes,
    step: int,
    texts: Path,
    shown: str,
    local: bool = False,
) -> Start:
    metrics = look_through(workdir, step, texts)
    newest = max([step, *find_steps(workdir / CHECKPOINTS)])
    gone = [] if local else sorted({x for x in metrics.saved if x > newest})
    messages = [
        f"resuming {shown} after step {step}" + ", from the hosts' copies" * local,
        describe_changes(changes),
        "checkpoints of later steps were saved but are missing: "
        f"{', '.join(map(str, gone))}" * bool(gone),
        metrics.message,
    ]
    if settings.checkpoint.restore and not local and not source_of(texts):
        messages.append("checkpoint.restore is for new runs: ignored")
    return Start(
        step,
        resumes=True,
        local=local,
        restored=metrics.restored,
        examples=read_position(texts, step, settings.batch_size),
        unevaluated=_unevaluated(settings, step, metrics),
        message="; ".join(filter(None, messages)),
    )


def _hold(workdir: Path, settings: RunSettings, start: Start, step: int) -> Start:
    if step == start.step:
        return dataclasses.replace(start, held=True, local=False)
    metrics = look_through(workdir, step)
    return dataclasses.replace(
        start,
        step=step,
        held=True,
        local=False,
        resumes=metrics.some,
        restored=(),
        unevaluated=_unevaluated(settings, step, metrics),
        message=f"going on after step {step}",
    )


def _unevaluated(settings: RunSettings, step: int, metrics: Metrics) -> bool:
    due = settings.eval_every and step % settings.eval_every == 0
    return bool(due and not metrics.evaluated)


def _stopped(workdir: Path, settings: RunSettings, start: Start) -> str:
    """Returns why the run stopped; "" if it is to be longer now, or did not."""
    stopped = read_notes(workdir).get(STOPPED)
    done = (start.step, settings.steps)
    if not stopped or (stopped["step"], stopped["steps"]) != done:
        return ""
    return stopped["why"]


def _start_again(
    workdir: Path, settings: RunSettings, recorded: Mapping[str, Any], shown: str
) -> Start:
    """A new run, or one that ended before its first checkpoint."""
    some = False
    for line in read_metrics(workdir):
        some = True
        if "checkpoint_bytes" in line:
            raise UserError(
                f"the checkpoints of {shown} are missing: put them back in "
                f"{shown}/{CHECKPOINTS}, or give another --workdir"
            )
    if not some:
        return Start()
    old = read_config(workdir)
    if not flatten(old).get("checkpoint.every"):
        return Start()  # the run never saved: RunFolder refuses to overwrite it
    changes = changed_keys(old, recorded)
    check_changes(changes, settings.checkpoint.accept)
    message = f"{shown} has no checkpoint yet: starting again from step 1"
    changed = describe_changes(changes)
    return Start(resumes=True, message="; ".join(filter(None, (message, changed))))
