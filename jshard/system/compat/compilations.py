"""How long XLA compiles, as JAX reports it, and which of its flags there are."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jax import monitoring
from jaxlib import xla_client

_COMPILED = "/jax/core/compile/backend_compile_duration"


def has_flags(*names: str) -> bool:
    """Returns whether XLA has these flags; one that it has not ends the process."""
    options = xla_client.CompileOptions().executable_build_options.debug_options
    # Of the type, as reading a path that is not set fails in jaxlib.
    return all(hasattr(type(options), name) for name in names)


@contextmanager
def timed_compilations(report: Callable[[float], object]) -> Iterator[None]:
    """Calls `report` with the seconds of each compilation of this thread within it.

    A program that comes from the cache counts with the time to load it.
    """
    thread = threading.get_ident()

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == _COMPILED and threading.get_ident() == thread:
            report(duration_secs)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        monitoring.unregister_event_duration_listener(listen)
