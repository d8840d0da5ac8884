"""Where a run starts: at its first step, or after a checkpoint in its folder."""

import dataclasses
from pathlib import Path

from jshard.errors import UserError
from jshard.restore import CHECKPOINTS, newest_whole
from jshard.step_folders import find_steps
from jshard.training.config import Config
from jshard.training.report import read_metrics
from jshard.training.resume import (
    changed_keys,
    check_changes,
    describe_changes,
    read_config,
)


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run starts.

    Attributes:
      step: Updates made so far.
      checkpoint: The step's folder to restore, verified; None starts with new values.
      resumes: Whether the folder holds the run already.
      unevaluated: Whether the run was stopped before the evaluation due at `step`.
      message: What to tell the user; empty for a new run.
    """

    step: int = 0
    checkpoint: Path | None = None
    resumes: bool = False
    unevaluated: bool = False
    message: str = ""


def find_start(workdir: Path, config: Config) -> Start:
    """Looks for the run's newest whole checkpoint; nothing is written.

    Args:
      workdir: The run's folder, which need not exist.
      config: What the run is to go on with.

    Raises:
      UserError: The config changes what the run is about, or no checkpoint is whole
        any more.
    """
    folder = workdir / CHECKPOINTS
    if not find_steps(folder):
        return _start_again(workdir, config)
    changes = changed_keys(read_config(workdir), config)
    check_changes(changes, config.checkpoint.accept)
    checkpoint = newest_whole(folder)
    step = int(checkpoint.stem)  # the name may have a suffix, of one that is aside
    messages = [f"resuming {workdir} after step {step}", describe_changes(changes)]
    if config.checkpoint.restore:
        messages.append("checkpoint.restore is for new runs: ignored")
    due = config.eval_every and step % config.eval_every == 0
    evaluated = {line["step"] for line in read_metrics(workdir) if "eval_loss" in line}
    return Start(
        step,
        checkpoint,
        resumes=True,
        unevaluated=bool(due and step not in evaluated),
        message="; ".join(filter(None, messages)),
    )


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
