"""How a run ends before its last step: a signal, a hook or spikes ask for it."""

from contextlib import AbstractContextManager, ExitStack

import jax

from jshard.recipe.config.profiled_steps import profiled_steps
from jshard.system.errors import Interrupted, Preempted, RunFailed
from jshard.training.callbacks.hooks import Hooks
from jshard.training.callbacks.preemption import Preemption
from jshard.training.callbacks.saving import Saving
from jshard.training.callbacks.step_log import StepLog
from jshard.training.prepared_run import PreparedRun
from jshard.training.run.metrics import RunFolder
from jshard.training.run.progress import ProgressDisplay
from jshard.training.run.start import STOPPED


class Stopping(AbstractContextManager):
    """Listens to signals until it exits, and ends the run after the step one comes in.

    A run that saves nothing does not listen: a signal ends its process, as by default.
    Its last step is finished in any case.

    `keeps_state` is that of `loop.train`.
    """

    def __init__(self, run: PreparedRun, hooks: Hooks, keeps_state: bool):
        settings = run.settings
        self._run, self._hooks, self._keeps_state = run, hooks, keeps_state
        self._saves = bool(settings.checkpoint.every)
        self._preemption = Preemption(saves=self._saves, exits=not keeps_state)
        self._signals = ExitStack()
        # A trace that is open must be written, and processes stop together.
        traces = bool(profiled_steps(settings.profile.steps))
        several = jax.process_count() > 1
        self._listens = self._saves or keeps_state or traces or several

    def listen(self) -> None:
        """Begins to listen to signals, if the run has something to save."""
        if self._listens:
            self._signals.enter_context(self._preemption)

    def before_step(self, step: int) -> None:
        """Listens in the last step in any case."""
        if step == self._run.settings.steps and not self._listens:
            self._signals.enter_context(self._preemption)

    def after_step(self, step: int, log: StepLog, saving: Saving) -> None:
        """Saves and ends the run if a signal asks for it; not after the last step.

        An evaluation that is due is left to the run that resumes.

        Raises:
          Preempted: The state is saved.
          Interrupted: There was a signal, and nothing is saved.
          RunFailed: Too many steps in a row were spikes; the state is saved.
        """
        if log.spikes:
            saving.save(step, log)
            saving.at_end(step)
            saved = f"; the state of step {step} is saved" if self._saves else ""
            raise RunFailed(f"{log.spikes}{saved}")
        asked = self._preemption.requested(step)
        if not asked or step == self._run.settings.steps:
            return
        why = f"{self._preemption.signal_name} at step {step}"
        if self._preemption.signal_name == "SIGINT":  # a user's, not a scheduler's
            why = f"interrupted by {why}"
        if not self._saves:
            kept = "; the state is kept, and fit() again continues"
            kept *= self._keeps_state
            raise Interrupted(f"{why}, and checkpoint.every=0 saves nothing{kept}")
        saving.save(step, log)
        saving.at_end(step)
        again = f"run the same command with --workdir={self._run.shown} to resume"
        raise Preempted(
            f"{why}: saved; {'fit() again continues' if self._keeps_state else again}"
        )

    def at_end(self, step: int, folder: RunFolder, display: ProgressDisplay) -> None:
        """Notes why the run stopped, so that it is not resumed, and says so."""
        why = self._hooks.stop
        stopped = {"step": step, "steps": self._run.settings.steps, "why": why}
        folder.note(**{STOPPED: why and stopped})
        if why:
            display.say(f"stopped at step {step}: {why}")

    def __exit__(self, *exception: object) -> None:
        self._signals.close()
