"""Adapters by the names that Hugging Face's PEFT gives layers, as ours.

``q_proj`` is every layer whose path in the files ends so, a regular expression has to
match a whole path, and ``all-linear`` is every linear layer but the head.
"""

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from jshard.storage.hub.adapters.modules_to_save import trained_whole
from jshard.storage.hub.file_tensor import FileTensor
from jshard.system.errors import UserError, some_of

T = TypeVar("T")

ALL_LINEAR = "all-linear"


class Layer(NamedTuple):
    """A module of the files, and what it is of a model."""

    theirs: str  # "model.layers.3.self_attn.q_proj"
    ours: str  # "blocks.attention.q", which is all layers of a Stack
    layer: int | None  # 3 in that Stack; None outside Stacks

    @property
    def number(self) -> int | None:
        """The number of its block in the files, which may be in another Stack."""
        found = re.search(r"(?:^|\.)(\d+)\.", self.theirs)
        return int(found[1]) if found and self.layer is not None else None


def layers_of(base: Mapping[str, FileTensor]) -> list[Layer]:
    """Lists the layers that PEFT has a name for: experts, of several names, have none.

    `base` says where the files keep the arrays of a model.
    """
    found = []
    for name, place in base.items():
        path, _, kind = name.rpartition(".")
        if kind in ("kernel", "embedding") and len(place.names) == 1:
            ours, indices = re.subn(r"\.\d+(?=\.)", "", path, count=1)
            index = re.search(r"\.(\d+)\.", path) if indices else None
            theirs = place.names[0].removesuffix(".weight")
            if place.part == (0, 1):
                found.append(Layer(theirs, ours, int(index[1]) if index else None))
    return found


def pattern_of(patterns: Mapping[str, T], name: str, default: T) -> T:
    """Returns what the first pattern that matches the end of a name stands for."""
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", name):
            return value
    return default


def add_lora_arguments(
    base: Mapping[str, FileTensor],
    *,
    targets: Sequence[str],
    rank_pattern: Sequence[str] = (),
    alpha_pattern: Sequence[str] = (),
    layers_to_transform: Sequence[int] = (),
    modules_to_save: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns arguments of ``jshard.nn.add_lora`` for what a user of PEFT writes.

    Args:
      base: Where the files keep the arrays of the model.
      targets: Patterns of our paths, as ``add_lora`` has them, or where none of those
        matches, names or regular expressions of layers in the files.
      rank_pattern: "NAME:RANK", where NAME is one or the end of one; the first counts.
      alpha_pattern: The same of alphas.
      layers_to_transform: The numbers of the blocks that have adapters; () is all.
      modules_to_save: Ends of modules' names in the files, which have no adapters.

    Raises:
      UserError: Something cannot be read, is not there, or differs within a Stack.
    """
    layers = layers_of(base)
    found: list[str] = []
    only: dict[str, set[int]] = {}
    for target in targets:
        ours, indices = _target(target, layers, base)
        found += ours
        for path, some in indices.items():
            only.setdefault(path, set()).update(some)
    every = _indices(layers)
    only = {path: some for path, some in only.items() if some != every[path]}
    if numbers := {layer.number for layer in layers if layer.number is not None}:
        if unknown := set(layers_to_transform) - numbers:
            raise UserError(
                f"lora.layers_to_transform: there is no layer {min(unknown)}, but "
                f"{min(numbers)} to {max(numbers)}"
            )
    if layers_to_transform:
        chosen = _indices(x for x in layers if x.number in layers_to_transform)
        only = {
            path: chosen.get(path, set()) & only.get(path, some)
            for path, some in every.items()
        }
        for layer in layers:  # whole names hold in every block, as in PEFT
            if layer.theirs in targets and layer.layer is not None:
                only[layer.ours].add(layer.layer)
            elif layer.theirs in targets:
                del only[layer.ours]
    whole = trained_whole(modules_to_save, base) if modules_to_save else ()
    only |= {name.rpartition(".")[0]: set() for name in whole}
    return {
        "targets": tuple(dict.fromkeys(found)),
        "layers": {path: tuple(sorted(some)) for path, some in only.items()},
        "ranks": _by_path("lora.rank_pattern", rank_pattern, int, layers),
        "alphas": _by_path("lora.alpha_pattern", alpha_pattern, float, layers),
    }


def _target(
    target: str, layers: list[Layer], base: Mapping[str, FileTensor]
) -> tuple[list[str], dict[str, set[int]]]:
    """Returns a target as patterns of our paths, and indices of layers in Stacks."""
    if target == ALL_LINEAR:
        if experts := [name for name in base if ".experts." in name]:
            raise UserError(
                f"lora.targets={ALL_LINEAR} depends on PEFT's version for a model with "
                f"experts ({experts[0]}): name the layers"
            )
        return ["*"], {}
    paths = [layer.ours for layer in layers]
    if fnmatch.filter(paths, target) or fnmatch.filter(paths, f"*.{target}"):
        return [target], {}
    matched = [x for x in layers if f".{x.theirs}".endswith(f".{target}")]
    matched = matched or [x for x in layers if _fullmatch(target, x.theirs)]
    if not matched:
        return [target], {}  # add_lora says what there is
    return list(dict.fromkeys(x.ours for x in matched)), _indices(matched)


def _fullmatch(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:
        return False


def _indices(layers: Iterable[Layer]) -> dict[str, set[int]]:
    """Returns the indices of layers in Stacks, by our paths."""
    found: dict[str, set[int]] = {}
    for layer in layers:
        some = found.setdefault(layer.ours, set())
        if layer.layer is not None:
            some.add(layer.layer)
    return found


def _by_path(
    key: str, given: Sequence[str], kind: Callable[[str], Any], layers: list[Layer]
) -> dict[str, Any]:
    """Returns the values of a pattern by our paths, where it matches."""
    patterns: dict[str, Any] = {}
    for text in given:
        pattern, _, value = text.rpartition(":")
        try:
            re.compile(pattern)
            patterns[pattern] = kind(value)
        except (re.error, ValueError):
            raise UserError(f"{key}: {text!r} is not NAME:NUMBER") from None
        if not pattern or not 0 < patterns[pattern] < math.inf:
            raise UserError(f"{key}: {text!r} is not NAME:NUMBER, above 0")
        if not any(pattern_of({pattern: True}, x.theirs, False) for x in layers):
            names = dict.fromkeys(x.theirs.rpartition(".")[2] for x in layers)
            raise UserError(
                f"{key}: {pattern!r} is the end of no layer's name in the files; there "
                f"are {some_of(list(names), limit=12)}"
            )
    values: dict[str, set[Any]] = {}
    for layer in layers:
        value = pattern_of(patterns, layer.theirs, None)
        values.setdefault(layer.ours, set()).add(value)
    for path, found in values.items():
        if len(found) > 1:
            raise UserError(
                f"{key} differs among the layers of {path}, which are one array: give "
                "all of them one"
            )
    return {path: x for path, (x,) in values.items() if x is not None}
