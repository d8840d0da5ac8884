"""What the user sees while a run trains: a live line, or plain lines."""

import threading
import time
import types
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

from jshard.system.cli.terminal import outliving_terminal, show
from jshard.system.formatting import format_count, format_duration, one_line, printable
from jshard.training.run.live_line import LiveLine
from jshard.training.run.notebook_line import NotebookLine

_STEPS = ("step", "computing", "hooks", "data")  # the phases between steps
_LONG = 2.0  # seconds from which on one of these is shown
_NAMED = 0.3  # seconds from which on a part of the start is named


class ProgressDisplay:
    """Shows step, loss, speed, time left and the last evaluation; a context manager.

    In a terminal or a notebook it redraws one line; otherwise it prints a line for each
    logged step.
    The line shows the newest step whose metrics have arrived, which may be one or two
    behind the step that was started last; it never waits for a device. Until there is
    one, it shows what the run waits for.

    Without `enabled` it shows nothing, as in all processes but the first. `waited` has
    the seconds that the process has spent so far, by what it did.

    Attributes:
      references: Losses to show beside the evaluation's, by name.
    """

    def __init__(
        self,
        steps: int,
        *,
        enabled: bool = True,
        waited: Mapping[str, float] = types.MappingProxyType({}),
    ):
        self.references: Mapping[str, float] = {}
        self._steps = steps
        self._enabled = enabled
        # The live line is drawn by another thread.
        self._lock = threading.Lock()
        self._done = 0  # the newest step whose metrics are known
        self._known: dict[str, float] = {}  # they
        self._started = deque[tuple[int, Mapping[str, Any]]](maxlen=8)  # steps after it
        self._phase, self._since = "", time.monotonic()
        self._before_first = True  # step of this process
        self._waits = dict(waited)  # seconds by phase, before it
        self._step_time: float | None = None
        self._speed = self._evaluation = ""
        if NotebookLine.has_notebook():
            self._line, self._is_live = NotebookLine(steps, self._newest), enabled
        else:
            self._line = LiveLine(steps, self._newest)
            self._is_live = enabled and self._line.has_terminal()

    def say(self, text: str) -> None:
        """Prints text that stays on the screen."""
        with outliving_terminal():
            if self._is_live:
                self._line.print_above(printable(text))
            elif self._enabled:
                show(text)

    def at(self, phase: str, step: int) -> None:
        """Notes what the run does now, in or after which step."""
        del step
        now = time.monotonic()
        with self._lock:
            if self._phase and self._before_first:
                waited = self._waits.get(self._phase, 0.0)
                self._waits[self._phase] = waited + now - self._since
            self._phase, self._since = phase, now
        if self._is_live and self._before_first:
            with outliving_terminal():
                self._line.refresh()

    def after_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics of a step that was started, arrays on the devices."""
        if self._is_live:
            shown = {
                name: metrics[name] for name in ("loss", "accuracy") if name in metrics
            }
            with self._lock:
                self._started.append((step, shown))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the metrics of a logged step."""
        waited = ""
        if "time_to_first_step" in values:
            self.at("", step)
            self._before_first = False
            waited = f"  after {values['time_to_first_step']:.1f} s{self._waited()}"
        with self._lock:
            if step >= self._done:
                self._done, self._known = step, dict(values)
            self._step_time = values.get("step_time", self._step_time)
            for name, value in values.items():
                if name.endswith("_per_second"):
                    unit = name.removesuffix("_per_second")
                    self._speed = f"{format_count(value)} {unit}/s"
            line = "  ".join(self._parts())
        if not self._is_live:
            self.say(f"step {step}/{self._steps}  {line}{waited}")
        elif waited:
            self.say(f"step {step}/{self._steps}{waited}")

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the result of an evaluation."""
        with self._lock:
            self._evaluation = f"eval {values['eval_loss']:.4f}"
        shown = {**values, **self.references}
        line = "  ".join(f"{name} {value:.4f}" for name, value in shown.items())
        self.say(f"step {step}/{self._steps}  {line}")

    def _parts(self) -> list[str]:
        """Returns what is known of the newest step, the most important first."""
        parts = [f"loss {self._known['loss']:.4f}"]
        if "accuracy" in self._known:
            parts.append(f"accuracy {self._known['accuracy']:.3f}")
        if self._speed:
            parts.append(self._speed)
        if self._step_time is not None:
            left = (self._steps - self._done) * self._step_time
            parts.append(f"{format_duration(left)} left")
        return [*parts, *filter(None, [self._evaluation])]

    def _waited(self) -> str:
        """Returns what took the time until the first step, in order."""
        long = {name: x for name, x in self._waits.items() if x >= _NAMED}
        parts = [f"{name} {seconds:.1f}" for name, seconds in long.items()]
        return f" ({', '.join(parts)})" if parts else ""

    def _newest(self) -> tuple[int, str]:
        """Returns the newest known step, and what the live line says of it."""
        with self._lock:
            self._take_newest()
            parts = self._parts() if self._done else []
            lasts = time.monotonic() - self._since
            if self._phase and not (parts and self._phase in _STEPS and lasts < _LONG):
                parts.insert(min(1, len(parts)), f"{self._phase} {lasts:.0f} s")
            return self._done, one_line("  ".join(parts))

    def _take_newest(self) -> None:
        """Takes the metrics of the newest step that have arrived."""
        for step, metrics in reversed(self._started):
            if step <= self._done:
                break
            with suppress(RuntimeError):  # of a step that failed: the loop raises it
                if all(x.is_ready() for x in metrics.values()):
                    self._known = {name: float(x) for name, x in metrics.items()}
                    self._done = step
                    break
        while self._started and self._started[0][0] <= self._done:
            self._started.popleft()

    def __enter__(self) -> Self:
        if self._is_live:
            self._line.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_live:
            self._phase = ""
            with outliving_terminal():
                self._line.stop()
