"""A trace of a few steps, for Perfetto and XProf."""

import time
from contextlib import AbstractContextManager

import jax

from jshard.recipe.config.profiled_steps import profiled_steps
from jshard.system.errors import warn
from jshard.system.formatting import format_duration
from jshard.training.prepared_run import PreparedRun
from jshard.training.run.progress import ProgressDisplay
from jshard.training.throughput import Throughput

FOLDER = "profile"  # in the run's folder


class Profile(AbstractContextManager):
    """Traces a range of steps with JAX's profiler; a context manager.

    Process 0 traces its devices. They finish the steps before the range first, so that
    the trace holds nothing else. The time to start and to write a trace is not counted
    as that of steps. A trace that is open when the run ends, for whatever reason, is
    written. If it cannot be written, that costs a warning, not the run.

    `done` steps were made earlier, by a run that this one resumes.

    Attributes:
      note: What will be traced, for the start-up note; empty for nothing.
    """

    def __init__(
        self,
        run: PreparedRun,
        done: int,
        throughput: Throughput,
        display: ProgressDisplay,
    ):
        steps = profiled_steps(run.settings.profile.steps)
        self._steps = range(max(steps.start, done + 1), steps.stop)
        self._run, self._throughput = run, throughput
        self._folder, self._display = run.workdir / FOLDER, display
        self._traces = False
        self.note = ""
        if self._steps:
            first, last = self._steps[0], self._steps[-1]
            which = f"step {first}" if first == last else f"steps {first} to {last}"
            self.note = f"profile         {which}, into {self._folder}"
        elif steps:
            self.note = f"profile         none: step {steps[-1]} is done already"

    def before_step(self, step: int) -> None:
        """Starts the trace if `step` is the first to trace."""
        if step not in self._steps[:1] or self._run.peers.index:
            return
        jax.block_until_ready(self._run.state)
        with self._throughput.paused():
            self._run.peers.at("profiling", step)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # tracing every call would slow steps down
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                jax.profiler.start_trace(
                    self._folder, create_perfetto_trace=True, profiler_options=options
                )
            except (OSError, RuntimeError) as error:
                self._fail(error)
                return
            self._traces = True

    def after_step(self, step: int) -> None:
        """Writes the trace if `step` is the last to trace."""
        if step not in self._steps[-1:]:
            return
        jax.block_until_ready(self._run.state)
        with self._throughput.paused():
            self._run.peers.at("profiling", step)
            self._write()
            # The others wait here, where writing may take minutes, not in a step.
            self._run.peers.publish("profiled", "")

    def _write(self) -> None:
        """Writes the open trace, if there is one."""
        if not self._traces:
            return
        self._traces = False
        started = time.perf_counter()
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError, ValueError) as error:
            self._fail(error)
            return
        took = format_duration(time.perf_counter() - started)
        self._display.say(f"profile written to {self._folder} in {took}")

    def _fail(self, error: Exception) -> None:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        warn(f"no profile: cannot write to {self._folder}: {why}; training continues")

    def __exit__(self, *exception: object) -> None:
        self._write()
