"""The line that a run redraws in a notebook."""

import contextvars
import html
import threading
from collections.abc import Callable
from typing import Any

from rich.console import Console

from jshard.system.cli.terminal import show

_PERIOD = 0.5  # seconds between two looks at what is newest


class NotebookLine:
    """Steps, a bar and a text, in one output of a cell that is updated in place.

    Args:
      steps: The number of steps.
      newest: Returns the newest step and the text, each time the line is drawn; called
        by another thread.
    """

    def __init__(self, steps: int, newest: Callable[[], tuple[int, str]]):
        self._steps, self._newest = steps, newest
        self._lock = threading.Lock()
        self._handle: Any = None
        self._shown: tuple[int, str] | None = None
        self._ended = threading.Event()
        # The cell that a kernel sends outputs to is in the context.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._redraw,), name="jshard-line", daemon=True
        )

    @staticmethod
    def has_notebook() -> bool:
        """Returns whether this is a notebook: Jupyter, Colab, Kaggle or Databricks."""
        return Console().is_jupyter

    def start(self) -> None:
        """Begins to redraw the line."""
        self._thread.start()

    def refresh(self) -> None:
        """Draws what is newest."""
        with self._lock:
            newest = self._newest()
            if newest != self._shown:
                self._draw(self._bundle(*newest))
                self._shown = newest

    def print_above(self, text: str) -> None:
        """Prints text that stays; a notebook has it below the line."""
        self.refresh()
        show(text)

    def stop(self) -> None:
        """Leaves the line as it is; empties it before the first step."""
        self._ended.set()
        self._thread.join()
        if self._newest()[0]:
            self.refresh()
        elif self._handle is not None:
            self._draw({"text/plain": "", "text/html": ""})

    def _redraw(self) -> None:
        while not self._ended.wait(_PERIOD):
            self.refresh()

    def _draw(self, bundle: dict[str, str]) -> None:
        if self._handle is None:
            # Every notebook has it, and nothing else needs it.
            from IPython.display import (  # pyright: ignore[reportMissingImports]
                display,
            )

            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def _bundle(self, step: int, text: str) -> dict[str, str]:
        """Returns the line in the forms that notebooks choose from."""
        head = f"step {step}/{self._steps}"
        bar = f'<progress value="{step}" max="{self._steps}"></progress>'
        return {
            "text/plain": f"{head}  {text}",
            "text/html": f"<code>{head} {bar} {html.escape(text)}</code>",
        }
