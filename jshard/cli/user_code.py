"""Errors of the user's own code: told by its lines, not by jshard's and JAX's."""

import os
import sysconfig
import traceback
from pathlib import Path

import jax

_PACKAGE = Path(__file__).resolve().parents[1]
_RECIPES = _PACKAGE / "recipes"  # of a wheel; they are written as users write theirs
_PYTHON = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
_LONGEST = 300  # letters of an error's text in one line


def describe_user_error(error: BaseException) -> tuple[str, str] | None:
    """Describes an error by the lines of the user's code in its traceback.

    Args:
      error: as it was caught.

    Returns:
      A line that names the function, place and error; and a traceback of the user's
      lines alone. None where there are none, or with JAX_TRACEBACK_FILTERING=off.
    """
    if jax.config.jax_traceback_filtering == "off":  # pyright: ignore[reportAttributeAccessIssue]
        return None
    frames = [
        (frame, summary)
        for (frame, _), summary in zip(
            traceback.walk_tb(error.__traceback__),
            traceback.extract_tb(error.__traceback__),
            strict=True,
        )
        if _is_users(frame.f_code.co_filename)
    ]
    if not frames:
        return None
    (outer, _), (_, last) = frames[0], frames[-1]
    name = outer.f_code.co_qualname
    where = f"{last.filename}:{last.lineno}"
    what = f"{type(error).__qualname__}: {error}"  # less notes on frames left out
    line = " ".join(what.split())
    cut = line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."
    who = where if name == "<module>" else f"{name}() failed at {where}"
    lines = [
        "Your code's part of the traceback (JAX_TRACEBACK_FILTERING=off shows all):\n",
        *traceback.format_list([summary for _, summary in frames]),
        f"{what}\n",
    ]
    return f"{who}: {cut}", "".join(lines)


def _is_users(file: str) -> bool:
    if file.startswith("<"):
        return False
    path = Path(os.path.abspath(file))  # links stay: venvs have them
    if path.is_relative_to(_RECIPES):
        return True
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(path.is_relative_to(folder) for folder in (_PACKAGE, *_PYTHON))
