"""Templates of strangers, rendered in a process with limits of time and memory."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).with_name("chat_template_program.py")
_SECONDS = 5.0  # of processor time for a text, which takes milliseconds
_MEMORY = 2**30  # bytes of the process


class TemplateError(ValueError):
    """A template that is none, or that cannot write a text; the message says why."""


class Template:
    """A Jinja template.

    Args:
      template: The Jinja program.
      marks: What to write before and after a `{% generation %}` block.

    Raises:
      ImportError: jinja2 is missing.
      TemplateError: It is no Jinja program.
    """

    def __init__(self, template: str, marks: tuple[str, str]):
        if importlib.util.find_spec("jinja2") is None:
            raise ImportError("no jinja2")
        self._first = {
            "template": template,
            "marks": marks,
            "path": sys.path,
            "seconds": _SECONDS,
            "memory": _MEMORY,
        }
        self._lock = threading.Lock()  # readers of data may be threads
        self._start()

    def render(self, variables: Mapping[str, Any]) -> str:
        """Returns the text.

        Raises:
          TemplateError: The template refuses the variables, or takes too long.
        """
        with self._lock:
            if self._owner != os.getpid():  # after a fork the process is another's
                self._start()
            return self._ask(variables)

    def _start(self) -> None:
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._end = weakref.finalize(self, _end, self._process, self._owner)
        self._ask(self._first)

    def _ask(self, question: Mapping[str, Any]) -> str:
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        with contextlib.suppress(BrokenPipeError):  # told by what it answers
            pipe_in.write(json.dumps(question, default=_plain).encode() + b"\n")
            pipe_in.flush()
        answer = pipe_out.readline()
        if not answer.endswith(b"\n"):
            self._end()
            self._owner = -1  # a new one for the next text
            raise TemplateError(_why(self._process.returncode))
        found = json.loads(answer)
        if "error" in found:
            raise TemplateError(found["error"])
        return found["text"]


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Ends a process, unless it is the one of the process that was forked."""
    if os.getpid() == owner:
        process.kill()
        with contextlib.suppress(BrokenPipeError), process:
            pass  # closes the pipes, and waits


def _why(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"it takes more than {_SECONDS:g} s"
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"the process that renders it died ({name})"


def _plain(value: Any) -> Any:
    """Returns a value that JSON lacks, as records of Parquet may have."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)
