"""The state of a stream in a checkpoint: a text, of all parts.

States are trees of what JSON can hold, and of bytes, tuples and arrays: those of random
generators. They are never pickled, as a checkpoint need not be trusted.
"""

import base64
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jshard.data.stream_reader import StreamState
from jshard.system.errors import UserError
from jshard.system.files.untrusted import read_json
from jshard.system.formatting import format_bytes

FILE = "data_state.json"  # in a step's folder
MOST = 2**28  # bytes of it: a buffer of examples fits, and JSON of it can be parsed


def state_files(state: StreamState | None) -> dict[str, str]:
    """Returns the files that a checkpoint stores for a stream's state, by name.

    All processes call it after the same step, and all get the states of all parts.

    Args:
      state: That of this process's parts; None for data without one.

    Raises:
      UserError: Something in a state can not be stored, or is too large.
    """
    if state is None:
        return {}
    mine = {part: _encoded(x, state.kind) for part, x in state.of_part.items()}
    of_part: dict[str, Any] = {}
    for text in _gathered(json.dumps(mine)):
        of_part |= json.loads(text)
    about = {
        "kind": state.kind,
        "fingerprint": dict(state.fingerprint),
        "parts": state.parts,
        "of_part": of_part,
    }
    text = json.dumps(about)
    if len(text) > MOST:
        raise UserError(
            f"data: the state of {state.kind} takes {format_bytes(len(text))} in a "
            f"checkpoint, of which {format_bytes(MOST)} can be read again; keep "
            "what the source can read again, such as a buffer of examples, out of it"
        )
    return {FILE: text}


def read_state(folder: Path | None) -> StreamState | None:
    """Reads the state of a stream from a step's folder; None if it has none.

    Raises:
      UserError: It is damaged.
    """
    if folder is None or not (folder / FILE).exists():
        return None
    try:
        about = read_json(folder / FILE, MOST)
        of_part = {int(part): _decoded(x) for part, x in about["of_part"].items()}
        if sorted(of_part) != list(range(about["parts"])):
            raise ValueError("it lacks parts")
        known = {str(k): str(x) for k, x in about["fingerprint"].items()}
        return StreamState(str(about["kind"]), len(of_part), of_part, known)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder / FILE}: cannot be read as the state of training data: {error!r}"
        ) from error


def _gathered(text: str) -> list[str]:
    """Returns the texts of all processes."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(data)))
    padded = np.pad(data, (0, int(sizes.max()) - len(data)))
    rows = np.asarray(multihost_utils.process_allgather(padded), np.uint8)
    return [
        row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)
    ]


def _encoded(value: Any, kind: str) -> Any:
    """Returns JSON; what it does not have becomes an object with one key, from "$"."""
    encode = lambda x: _encoded(x, kind)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [encode(x) for x in value]
    if isinstance(value, tuple):
        return {"$tuple": [encode(x) for x in value]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key[:1] != "$" for key in value):
            return {key: encode(x) for key, x in value.items()}
        return {"$dict": [[encode(key), encode(x)] for key, x in value.items()]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    tensor = hasattr(value, "detach")
    array = np.asarray(value.detach().cpu()) if tensor else value
    if isinstance(array, np.ndarray | np.generic) and array.dtype.kind in "biufc":
        data = base64.b64encode(array.tobytes()).decode()
        found = [array.dtype.str, list(array.shape), data]
        return {"$tensor" if tensor else "$array": found}
    raise UserError(
        f"data: the state of {kind} has a {type(value).__name__}, which a checkpoint "
        "cannot store: use numbers, texts, bytes, arrays, and lists and dicts of them"
    )


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(x) for x in value]
    if not isinstance(value, dict):
        return value
    match list(value.items()):
        case [("$tuple", items)]:
            return tuple(_decoded(x) for x in items)
        case [("$dict", items)]:
            return {_decoded(key): _decoded(x) for key, x in items}
        case [("$bytes", data)]:
            return base64.b64decode(data)
        case [("$array" | "$tensor" as name, (dtype, shape, data))]:
            array = np.frombuffer(base64.b64decode(data), np.dtype(dtype))
            array = array.reshape(shape).copy()
            if name == "$tensor":  # of a source of PyTorch, which has imported it
                return sys.modules["torch"].from_numpy(array)
            return array if shape else array[()]
    return {key: _decoded(x) for key, x in value.items()}
