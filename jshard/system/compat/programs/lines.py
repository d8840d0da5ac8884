"""The line of the user that traced an operation, past JAX, Flax and jshard."""

import os
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import flax
from jax._src import source_info_util as source

from jshard.system.compat import jaxprs

_JSHARD = str(Path(__file__).parents[3])
_LIBS = (f"{_JSHARD}/", f"{os.path.dirname(flax.__file__)}/")


def line_of(eqn: Any, within: Iterable[Any] = ()) -> str:
    """Returns which line of the user's traced an equation: "FILE:LINE (FUNCTION)".

    A branch knows no line outside of it; one of ``within`` has it inside.
    """
    around = [
        outer for outer in within if any(x is eqn for x in jaxprs.nested([outer]))
    ]
    return _line(*(x.source_info.traceback for x in (eqn, *around)))


def line_here() -> str:
    """Returns the line of the user's that runs now, as ``line_of``."""
    return _line(source.current().traceback)


def line_of_error(error: Exception) -> str:
    """Returns the last line of the user's that an error passed, as ``line_of``."""
    frames = [(f.f_code, line) for f, line in traceback.walk_tb(error.__traceback__)]
    own = [(code, line) for code, line in frames if is_users(code.co_filename)]
    code, line = (own or frames)[-1]
    return f"{code.co_filename}:{line} ({code.co_qualname})"


def _line(*raws: Any) -> str:
    frames = [frame for raw in raws for frame in source.user_frames(raw)]
    own = [frame for frame in frames if is_users(frame.file_name)]
    for frame in own or frames:
        return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
    return "unknown line"


def is_users(file: str) -> bool:
    """Returns whether a file is not of JAX, Flax or jshard (its models are users')."""
    models = file.startswith((f"{_JSHARD}/models/", f"{_JSHARD}/recipes/"))
    return models or (source.is_user_filename(file) and not file.startswith(_LIBS))


def is_of_sharding(error: Exception) -> bool:
    """Returns whether JAX refuses a sharding, because of the axes that it names."""
    refusals = (
        "not found in mesh",
        "axis names that are of type",
        "only refer to Auto axes",
        "`Manual` AxisType",
    )
    return any(x in str(error) for x in refusals)


def is_of_forward_mode(error: Exception) -> bool:
    """Returns whether JAX refuses forward-mode derivatives of a ``custom_vjp``."""
    return any(x in str(error) for x in ("(jvp) to a custom_vjp", "'custom_lin'"))


def is_of_product(error: Exception) -> bool:
    """Returns whether JAX refuses the dtypes of a product on these devices."""
    return "is not supported by dot_general on" in str(error)
