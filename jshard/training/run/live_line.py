"""The line that a run redraws in a terminal."""

import sys
from collections.abc import Callable, Iterable

from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from jshard.system.cli.terminal import is_terminal


class LiveLine(Progress):
    """Steps, a bar, and as much of a text as the terminal's width has room for.

    Args:
      steps: The number of steps.
      newest: Returns the newest step and the text, each time the line is drawn; called
        by another thread.
    """

    def __init__(self, steps: int, newest: Callable[[], tuple[int, str]]):
        self._newest = newest
        super().__init__(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(None, table_column=Column(ratio=1)),
            _Text(),
            # Leaves numbers and paths uncoloured, and long lines for the terminal.
            console=_Console(highlight=False, soft_wrap=True),
            refresh_per_second=8,
            redirect_stderr=is_terminal(sys.stderr),
            expand=True,
        )
        self.add_task("", total=steps, text="")

    def has_terminal(self) -> bool:
        """Returns whether standard output is a terminal that can redraw a line."""
        # FORCE_COLOR makes rich take a pipe for a terminal, so isatty is asked, too.
        terminal = is_terminal(sys.stdout) and self.console.is_terminal
        return terminal and not self.console.is_dumb_terminal

    def print_above(self, text: str) -> None:
        """Prints text that stays on the screen."""
        self.refresh()  # or what follows the text would be an old line
        self.console.print(text, markup=False)

    def stop(self) -> None:
        """Leaves the line as it is; erases it before the first step."""
        self.live.transient = not self._newest()[0]
        super().stop()

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yields the line."""
        for task in self.tasks:  # none while Rich is set up
            step, text = self._newest()
            self.update(task.id, completed=step, text=text)
            # Room for ^C, or the line would wrap.
            yield Constrain(self.make_tasks_table([task]), self.console.width - 3)


class _Text(ProgressColumn):
    """A task's text, cut off where the line ends."""

    def render(self, task: Task) -> Text:
        """Returns the text."""
        return Text(task.fields["text"], no_wrap=True, overflow="ellipsis")


class _Console(Console):
    """Leaves the cursor visible: a process that is killed could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        del show
        return False
