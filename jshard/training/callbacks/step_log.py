"""The metrics of steps: read when they are known, and written as a line for each."""

import collections
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax

from jshard.sharding.update import counts
from jshard.training.non_finite import (
    check_finite,
    describe_skipped,
    too_many_spikes,
)
from jshard.training.prepared_run import PreparedRun
from jshard.training.recipe_functions import RecipeFunctions
from jshard.training.run.metrics import RunFolder
from jshard.training.run.progress import ProgressDisplay

# Steps that are under way: two keep the devices busy. More would fill their memory with
# batches.
UNDER_WAY = 2
_LONG = 1e-3  # seconds of collecting garbage from which on a step's line has them


class StepLog(AbstractContextManager):
    """Writes a line of metrics for each step, once the devices have computed it.

    Reading the newest step's metrics would wait for the devices, and they for the next
    step. So they are read two steps later. On exit, whatever the reason, the lines that
    are missing are written.

    `done` steps were made earlier, by a run that this one resumes. `started` is when
    the process started, as `time.time()`.
    """

    def __init__(
        self,
        run: PreparedRun,
        done: int,
        recipe: RecipeFunctions,
        folder: RunFolder,
        display: ProgressDisplay,
        started: float,
    ):
        self._settings, self._first, self._peers = run.settings, done + 1, run.peers
        self._recipe, self._throughput = recipe, recipe.throughput
        self._folder, self._display, self._started = folder, display, started
        self._under_way: collections.deque[tuple[int, Any, dict[str, float]]]
        self._under_way = collections.deque()
        self._ahead = 0  # steps under way that were complete when the last was read
        self._times: list[float] = []  # of the steps since the display's last line
        self._newest: dict[str, float] = {}
        self._ahead_of_steps = 0  # the optimizer's count, see `begin`
        self.spikes = ""  # that too many steps in a row were spikes
        self.skipped = 0  # steps, those of runs that this one resumes included

    def begin(self, opt_state: Any) -> None:
        """Reads the optimizer's count before the first step, which may be restored."""
        if self._recipe.learning_rate is not None:
            made = jax.jit(counts.of_schedules)(opt_state)
            if made is not None:
                self._ahead_of_steps = int(made) - (self._first - 1)

    def after_step(
        self,
        step: int,
        metrics: Mapping[str, jax.Array],
        data_wait: float = 0.0,
        collect_time: float = 0.0,
    ) -> None:
        """Adds a step that was dispatched; waits until only two are under way.

        `data_wait` is how many seconds it waited for its batch; the first step's was
        read before the run began. `collect_time` is how many seconds Python collected
        garbage since the step before.
        """
        for x in metrics.values():
            x.copy_to_host_async()
        more = {} if step == self._first else {"data_wait": data_wait}
        if collect_time >= _LONG:
            more["collect_time"] = collect_time
        self._under_way.append((step, metrics, more))
        if len(self._under_way) > UNDER_WAY:
            self._write(1)

    def add_returned(self, step: int, returned: Mapping[str, Any]) -> None:
        """Adds what hooks returned for the newest step: numbers to its line."""
        _, _, more = self._under_way[-1]
        more |= {name: x for name, x in returned.items() if isinstance(x, float)}
        samples = {name: x for name, x in returned.items() if name not in more}
        self._folder.log(step, samples)
        if step == self._first:  # mostly compilation: it is waited for
            self._peers.at("computing", step)
            with self.drained():
                pass

    def logs(self, step: int) -> bool:
        """Returns whether the display gets a line for a step."""
        ends = (self._first, self._settings.steps)
        return step in ends or step % self._settings.log_every == 0

    @contextmanager
    def drained(self, *, shows: bool = True) -> Iterator[dict[str, float]]:
        """Waits for all steps, shows the newest if asked to, and yields its metrics.

        What is done within it does not count as time of steps.
        """
        self._write(len(self._under_way), shows=shows)
        yield self._newest
        self._throughput.restart()

    def _write(self, count: int, *, shows: bool = False) -> None:
        """Writes the lines of the oldest steps; shows the last of them, at least."""
        oldest = [self._under_way.popleft() for _ in range(count)]
        read = [(step, self._read(step, x), more) for step, x, more in oldest]
        speed = self._measure(count) if count else {}
        for step, values, more in read:
            values |= self._throughput.seen(step)
            if step == self._first:  # mostly compilation: no sign of the speed
                values["time_to_first_step"] = time.time() - self._started
            else:
                values |= speed
                self._times.append(speed["step_time"])
            self._newest = values | more
            self._folder.write(step, self._newest)
            if self.logs(step) or (shows and step == oldest[-1][0]):
                shown = dict(self._newest)
                if self._times:
                    shown |= self._throughput.speed(statistics.fmean(self._times))
                self._display.log(step, shown)
                self._times.clear()
            try:
                check_finite(step, values, self._recipe.find_cause)
            except BaseException:
                self._under_way.clear()  # steps after one that failed say nothing
                raise
            if skipped := describe_skipped(step, values):
                self._display.say(skipped)
            most = self._settings.watch.spikes
            self.spikes = self.spikes or too_many_spikes(step, values, most)
            self.skipped = int(values.get("skipped_steps", 0))

    def _read(self, step: int, metrics: Mapping[str, jax.Array]) -> dict[str, float]:
        """Waits for a step, and returns its metrics and its learning rate."""
        fetched = {name: float(x) for name, x in metrics.items()}
        # What the optimizer's schedules read; the step tells where it can be skipped.
        count = int(fetched.pop("optimizer_updates", self._ahead_of_steps + step - 1))
        values = {"loss": fetched.pop("loss"), **fetched}
        if self._recipe.learning_rate is not None:
            values["learning_rate"] = self._recipe.learning_rate(count)
        return values

    def _measure(self, count: int) -> dict[str, float]:
        """Returns the speed of steps that were read, which is the same for each.

        Others may be complete, too: on CPUs a step can be as soon as it is dispatched,
        and where data are slow, before the next one is. Each counts once.
        """
        ahead = 0
        for _, metrics, _ in self._under_way:
            if not all(x.is_ready() for x in metrics.values()):
                break
            ahead += 1
        steps, self._ahead = count + ahead - self._ahead, ahead
        return self._throughput.measure(steps, drained=not self._under_way)

    def __exit__(self, kind: Any = None, *exception: object) -> None:
        try:
            while self._under_way:
                self._write(1)
        except Exception:
            if kind is None:  # otherwise the first error is what matters
                raise
