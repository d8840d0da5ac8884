"""Renders a chat template: a program of its own, which a hostile one cannot hold up.

A template may loop for years, or ask for a number with a billion digits. The system
ends this process, whatever it is in, when a text takes more processor time than is
allowed; its memory is limited, too.

It reads a JSON object a line from standard input and answers with one a line. The first
has the template and where Python looks for modules, the others have its variables. It
ends with its input. Nothing of jshard is imported here, which takes seconds.
"""

import contextlib
import datetime
import functools
import json
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_LONGEST = 2**24  # characters of a text
_LONGEST_PROBLEM = 300


def main() -> None:
    """Answers until the input ends."""
    for number in _SIGNALS:  # of a terminal or a cluster: the parent process decides
        signal.signal(number, signal.SIG_IGN)
    start = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # not everywhere
        resource.setrlimit(resource.RLIMIT_AS, (start["memory"], start["memory"]))
    sys.path[:] = start["path"]
    make = functools.partial(_compile, start["template"], start["marks"])
    template, problem = _attempt(make, start["seconds"])
    _answer("", problem)
    for line in sys.stdin:
        render = functools.partial(template.render, **json.loads(line))
        _answer(*_attempt(render, start["seconds"]))


def _attempt(make: Callable[[], Any], seconds: float) -> tuple[Any, str]:
    """Returns what is made, or why there is nothing."""
    try:
        with _limited(seconds):
            return make(), ""
    except BaseException as error:  # whatever a template's operations raise
        return None, str(error)[:_LONGEST_PROBLEM] or type(error).__name__


def _answer(text: str, problem: str) -> None:
    if not problem and len(text) > _LONGEST:
        problem = f"a text of {len(text):,} characters"
    answer = json.dumps({"error": problem} if problem else {"text": text})
    sys.stdout.write(f"{answer}\n")
    sys.stdout.flush()


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Lets the system end the process if something takes longer, in processor time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _compile(template: str, marks: tuple[str, str]) -> Any:
    """Compiles a template in an environment like that of transformers.

    The marks are written before and after a `{% generation %}` block.
    """
    import jinja2  # pyright: ignore[reportMissingImports]
    import jinja2.ext  # pyright: ignore[reportMissingImports]
    import jinja2.nodes  # pyright: ignore[reportMissingImports]
    import jinja2.sandbox  # pyright: ignore[reportMissingImports]

    class Generation(jinja2.ext.Extension):
        """`{% generation %}answer{% endgeneration %}`."""

        tags = {"generation"}  # noqa: RUF012  # read from the class

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call: Any = self.call_method("_mark")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return marks[0] + caller() + marks[1]

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    # Unlike Jinja's own, it leaves `<` and `'` as they are.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda f: datetime.datetime.now().strftime(f)
    return environment.from_string(template)


if __name__ == "__main__":
    main()
