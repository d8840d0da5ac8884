"""Weights in 4 bits as bitsandbytes keeps them in safetensors files.

Beside ``NAME``, with the codes (bytes, 1), are ``NAME.absmax``, the scales;
``NAME.nested_absmax``, the scales of these; the tables of both, ``NAME.quant_map`` and
``NAME.nested_quant_map``; and ``NAME.quant_state.bitsandbytes__nf4``, JSON. Without
double quantization the scales are float32, and nothing is nested.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jshard.sharding.layout.four_bit.codes import (
    BLOCK,
    CODES,
    GROUP,
    SINGLE,
    FourBit,
    scale_table,
)
from jshard.storage.hub.file_tensor import FileTensor
from jshard.storage.hub.safetensors_file import Stored
from jshard.system.files.untrusted import parse_json

_SCALES, _OF_SCALES = ".absmax", ".nested_absmax"
_TABLE, _TABLE_OF_SCALES = ".quant_map", ".nested_quant_map"
_STATE = ".quant_state.bitsandbytes__"
# What config.json says of weights that can be read; other keys matter to products.
_STORAGE = "bnb_4bit_quant_storage"


def problem_of_config(config: Mapping[str, Any]) -> str:
    """Returns why a ``quantization_config`` cannot be read; "" if it can."""
    if not (config.get("load_in_4bit") or config.get("_load_in_4bit")):
        return "bitsandbytes in 8 bits"
    if config.get("bnb_4bit_quant_type") not in CODES:
        return f"bnb_4bit_quant_type={config.get('bnb_4bit_quant_type')!r}"
    if config.get(_STORAGE, "uint8") != "uint8":
        return f"{_STORAGE}={config[_STORAGE]!r}"
    return ""


def kind_of(name: str, found: Mapping[str, Stored]) -> str:
    """Returns the kind of 4 bits (``FourBit``) of a weight in the files; "" if none."""
    end = SINGLE if name + _OF_SCALES not in found else ""
    known = [kind for kind in ("nf4", "fp4") if name + _STATE + kind in found]
    return known[0] + end if known else ""


def is_stored(place: FileTensor, found: Mapping[str, Stored]) -> bool:
    """Returns whether the files have a weight in 4 bits."""
    return len(place.names) == 1 and place.names[0] + _SCALES in found


def tensors(name: str, kind: str) -> list[str]:
    """Returns the names of all tensors of a weight."""
    ends = ["", _SCALES, _TABLE, _STATE + kind.removesuffix(SINGLE)]
    if not kind.endswith(SINGLE):
        ends += [_OF_SCALES, _TABLE_OF_SCALES]
    return [name + end for end in ends]


def problem(place: FileTensor, four_bit: FourBit, found: Mapping[str, Stored]) -> str:
    """Returns why the files' tensors are not a weight's, as "NAME ..."; "" if they are.

    Tables are read; they are small.
    """
    name = place.names[0]
    stored = kind_of(name, found)
    if stored and stored != four_bit.kind:
        return f"{name} is in {stored}: give policy.precision.base={stored}"
    missing = [x for x in tensors(name, four_bit.kind) if x not in found]
    if missing:
        return f"{missing[0]} is missing (bitsandbytes' {four_bit.kind})"
    state = _state(name, four_bit.kind, found)
    said = tuple(state.get("shape") or ())
    shape = place.shape_in_file(four_bit.shape)
    codes, scales, *rest = four_bit.parts
    sizes = {"": codes, _SCALES: scales // 4}
    if four_bit.is_double:
        sizes |= {_SCALES: scales, _OF_SCALES: rest[0] // 4}
    differ = [name + x for x, n in sizes.items() if np.prod(found[name + x].shape) != n]
    if said != shape or differ or not place.transposed or place.part != (0, 1):
        return f"{name} has shape {list(said)} in 4 bits, not {list(shape)}"
    group = GROUP if four_bit.is_double else None
    if (state.get("blocksize"), state.get("nested_blocksize")) != (BLOCK, group):
        return f"{name} has blocks of {state.get('blocksize')}, not {BLOCK}"
    tables = {_TABLE: CODES[four_bit.kind]}
    if four_bit.is_double:
        tables[_TABLE_OF_SCALES] = scale_table()
    for end, table in tables.items():
        theirs = np.asarray(found[name + end].open()).reshape(-1)
        if theirs.shape != table.shape or not np.allclose(theirs, table, 1e-6, 0):
            return f"{name}{end} is not bitsandbytes' table of {four_bit.kind}"
    return ""


def read(place: FileTensor, kind: str, found: Mapping[str, Stored]) -> np.ndarray:
    """Returns the bytes of a weight (``FourBit``)."""
    name = place.names[0]
    parts = [found[name + end].open() for end in ("", _SCALES)]
    if not kind.endswith(SINGLE):
        mean = np.float32(_state(name, kind, found)["nested_offset"])
        parts += [found[name + _OF_SCALES].open(), mean]
    return np.concatenate([x.reshape(-1).view(np.uint8) for x in parts])


def _state(name: str, kind: str, found: Mapping[str, Stored]) -> Mapping[str, Any]:
    name += _STATE + kind.removesuffix(SINGLE)
    return parse_json(found[name].open().tobytes())
