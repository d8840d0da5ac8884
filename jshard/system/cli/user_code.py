"""Describes errors of the user's own code by its lines, without jshard's and JAX's."""

import os
import sysconfig
import traceback
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]
_RECIPES = _PACKAGE / "recipes"  # packaged recipes count as the user's code
_PYTHON = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
_LONGEST = 300  # characters of an error's message in one line


def describe_user_error(error: BaseException) -> tuple[str, str] | None:
    """Describes an error by the user's lines in its traceback.

    Returns:
      A line with the function, place and error, and a traceback of the user's lines
      only. None if there are no such lines, or with JAX_TRACEBACK_FILTERING=off.
    """
    import jax  # slow, and needed only here

    if jax.config.jax_traceback_filtering == "off":  # pyright: ignore[reportAttributeAccessIssue]
        return None
    frames = [
        (frame.f_code, summary)
        for (frame, _), summary in zip(
            traceback.walk_tb(error.__traceback__),
            traceback.extract_tb(error.__traceback__),
            strict=True,
        )
        if _is_users(summary.filename)
    ]
    if not frames:
        return None
    (outer, _), (_, last) = frames[0], frames[-1]
    where = f"{last.filename}:{last.lineno}"
    name = outer.co_qualname
    who = where if name == "<module>" else f"{name}() failed at {where}"
    what = f"{type(error).__qualname__}: {error}"  # without notes about left-out frames
    line = " ".join(what.split())
    if len(line) > _LONGEST:
        line = f"{line[:_LONGEST]} ..."
    lines = [
        "Your code's part of the traceback (JAX_TRACEBACK_FILTERING=off shows all):\n",
        *traceback.format_list([summary for _, summary in frames]),
        f"{what}\n",
    ]
    return f"{who}: {line}", "".join(lines)


def _is_users(file: str) -> bool:
    if file.startswith("<"):
        return False
    path = Path(os.path.abspath(file))  # keeps symbolic links, which venvs have
    if path.is_relative_to(_RECIPES):
        return True
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(path.is_relative_to(folder) for folder in (_PACKAGE, *_PYTHON))
