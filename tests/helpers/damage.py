"""Changes of contents that others wrote, and how such contents may be read."""

import copy
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

import jshard
from jshard.system.cli.command import expected_ending
from jshard.system.errors import RunFailed
from jshard.system.formatting import one_line

MOST_MEMORY = 2**25

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**30])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["../x", "/etc/passwd", ".", "a/../../x", "\0", "\ud800", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.just("format"), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def changed_json(draw, content: Any) -> str:
    """JSON with one value, at any depth, replaced by any other or removed."""
    content = copy.deepcopy(content)
    place: Any = content
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw(st.sampled_from(keys))
        inner = place[key]
        if not inner or not isinstance(inner, dict | list) or draw(st.booleans()):
            break
        place = inner
    if draw(st.integers(0, 4)):
        place[key] = draw(VALUES)
    else:
        del place[key]
    return json.dumps(content)


@st.composite
def changed_bytes(draw, content: bytes, head: int) -> bytes:
    """Bytes cut off, or with up to eight of them replaced, mostly at the beginning."""
    if draw(st.booleans()):
        content = content[: draw(st.integers(0, len(content)))]
    data = bytearray(content)
    for _ in range(draw(st.integers(0, 3))):
        if not data:
            break
        last = min(head, len(data)) if draw(st.integers(0, 3)) else len(data)
        at = draw(st.integers(0, last - 1))
        data[at : at + 8] = draw(st.binary(max_size=8))
    return bytes(data)


def read_or_refuse(read: Callable[[], object]) -> None:
    """Reads something; tracemalloc must have been started.

    It is not stopped after each: Python may crash if another thread, such as
    TensorStore's, takes the interpreter's lock meanwhile (python/cpython#128679).
    """
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    try:
        read()
    except (jshard.UserError, RunFailed) as error:
        ending = expected_ending(error)
    else:
        ending = 0, ""
    finally:
        _, peak = tracemalloc.get_traced_memory()
    assert peak - before < MOST_MEMORY
    assert ending
    assert ending[1] == one_line(ending[1])  # and nothing that controls terminals


def json_text(value: object) -> bytes:
    return json.dumps(value).encode()
