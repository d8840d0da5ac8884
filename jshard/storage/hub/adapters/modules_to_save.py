"""Modules that are trained whole beside adapters: PEFT's ``modules_to_save``.

Its files have them under the model's own names, as ``base_model.model.lm_head.weight``.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jshard.storage.hub.file_tensor import FileTensor
from jshard.storage.hub.merged_adapters import PARTS
from jshard.storage.hub.tensor_names import Layers, tensor_names
from jshard.system.errors import UserError, some_of

PREFIX = "base_model.model."


def modules_of(tensor: str) -> list[str]:
    """Returns the modules of the files that a tensor is in, the innermost last."""
    path = tensor.split(".")
    return [".".join(path[:i]) for i in range(1, len(path))]


def trained_whole(names: Sequence[str], base: Mapping[str, FileTensor]) -> set[str]:
    """Returns the parameters of modules, as "blocks.norm.scale" of all layers.

    Args:
      names: Ends of modules' paths in the files, as PEFT has them.
      base: Where the files keep the arrays of the model.

    Raises:
      UserError: A name matches nothing, some layers of a Stack alone, or what PEFT
        has no tensor for.
    """
    modules = {
        name: [m for x in base[name].names for m in modules_of(x)] for name in base
    }
    for end in names:
        if not any(m.endswith(end) for found in modules.values() for m in found):
            last = {
                found[-1].rpartition(".")[2]: 0 for found in modules.values() if found
            }
            raise UserError(
                f"lora.modules_to_save: {end!r} is the end of no module's name in the "
                f"files; there are {some_of(list(last), limit=12)}"
            )
    chosen: dict[str, set[bool]] = {}
    for name, found in modules.items():
        is_chosen = any(m.endswith(end) for m in found for end in names)
        chosen.setdefault(_of_stack(name), set()).add(is_chosen)
    for ours, found in chosen.items():
        if len(found) > 1:
            raise UserError(
                f"lora.modules_to_save differs among the layers of {ours}, which are "
                "one array: name all of them"
            )
    whole = {ours for ours, (is_chosen,) in chosen.items() if is_chosen}
    saved_places((name for name in base if _of_stack(name) in whole), base)
    return whole


def _of_stack(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", "", name, count=1)


def saved_layers(about: Mapping[str, Any]) -> dict[str, Layers]:
    """Returns the names of the trained parameters of a checkpoint, but for adapters."""
    return {
        stored: names
        for stored, names in tensor_names(about).items()
        if stored.startswith("params.") and not stored.endswith(PARTS)
    }


def saved_places(
    names: Iterable[str], base: Mapping[str, FileTensor]
) -> dict[str, FileTensor]:
    """Returns where PEFT's files keep parameters, by names like "blocks.3.norm.scale".

    Raises:
      UserError: They have no place for one.
    """
    found = {}
    for name in names:
        place = base.get(name)
        if place is None or len(place.names) != 1 or place.part != (0, 1):
            raise UserError(
                f"{name} is trained beside adapters, and PEFT could not have it: "
                "Hugging Face's files have no tensor for it alone"
            )
        found[name] = place._replace(names=(PREFIX + place.names[0],), older=())
    return found
