"""What the user sees while a run trains: a live line, or plain lines."""

import sys
from collections.abc import Mapping
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from jshard.formatting import format_count, format_duration


class ProgressDisplay:
    """Shows step, loss, speed, time left and the last evaluation.

    In a terminal, one line that is redrawn; otherwise one line for each logged step.
    Used as a context manager.
    """

    def __init__(
        self, steps: int, references: Mapping[str, float], *, enabled: bool = True
    ):
        """Makes the display.

        Args:
          steps: How many steps the run has.
          references: Losses to show beside the evaluation's, by name.
          enabled: False shows nothing at all: only the first process shows.
        """
        self._steps = steps
        self._references = "".join(f"  {k} {v:.4f}" for k, v in references.items())
        self._enabled = enabled
        # Numbers and paths stay uncoloured, and long lines are the terminal's to fold.
        self._console = Console(highlight=False, soft_wrap=True)
        # Not rich's opinion alone: FORCE_COLOR makes it take a pipe for a terminal.
        self._live = (
            enabled
            and sys.stdout.isatty()
            and self._console.is_terminal
            and not self._console.is_dumb_terminal
        )
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            console=self._console,
            expand=True,
            auto_refresh=self._live,
            disable=not self._live,
        )
        self._task = self._bar.add_task("compiling", total=steps)
        self._status: dict[str, str] = {}

    def say(self, text: str) -> None:
        """Prints text that stays on the screen."""
        if self._live:
            self._console.print(text, markup=False)
        elif self._enabled:
            print(text, flush=True)

    def update(self, step: int) -> None:
        """Moves the live line on; called at each step."""
        self._bar.update(self._task, completed=step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Shows a logged step: on the live line, or as a line of its own."""
        self._status["loss"] = f"loss {values['loss']:.4f}"
        for name, value in values.items():
            if name.endswith("_per_second"):
                unit = name.removesuffix("_per_second")
                self._status["speed"] = f"{format_count(value)} {unit}/s"
        if "step_time" in values:
            left = (self._steps - step) * values["step_time"]
            self._status["left"] = f"{format_duration(left)} left"
        self._redraw(step)
        if not self._live:
            line = "  ".join(self._status.values())
            if "time_to_first_step" in values:
                line += f"  after {values['time_to_first_step']:.1f} s"
            self.say(f"step {step}/{self._steps}  {line}")

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the result of an evaluation."""
        self._status["eval"] = f"eval {values['eval_loss']:.4f}"
        self._redraw(step)
        line = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        self.say(f"step {step}/{self._steps}  {line}{self._references}")

    def _redraw(self, step: int) -> None:
        line = "  ".join(self._status.values())
        self._bar.update(self._task, completed=step, description=line)

    def __enter__(self) -> Self:
        """Starts the live line."""
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Leaves the last state of the live line on the screen."""
        self._bar.stop()
