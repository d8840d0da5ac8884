"""Adapters in the files of Hugging Face's PEFT.

A folder has ``adapter_config.json`` and ``adapter_model.safetensors``, with the tensors
``base_model.model.MODULE.lora_A.weight`` (rank, inputs) and ``.lora_B.weight``
(outputs, rank), where MODULE is the path of a layer, or of an expert, in the files of
its model. DoRA has ``.lora_magnitude_vector`` (outputs,) besides, and an embedding
``.lora_embedding_A`` and ``.lora_embedding_B``. Modules that are trained whole are
beside them (``adapters/modules_to_save.py``).
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jshard.nn.adapted import ALPHA, LAYERS, STABILIZED, A, B
from jshard.sharding.layout.values.magnitudes import MAGNITUDE
from jshard.storage.hub.adapters.modules_to_save import (
    PREFIX,
    modules_of,
    saved_layers,
    saved_places,
)
from jshard.storage.hub.file_tensor import FileTensor
from jshard.storage.hub.online.names import parse
from jshard.storage.hub.tensor_names import Layers, tensor_names
from jshard.system.errors import UserError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_NAMES = {
    "kernel": {
        A: ".lora_A.weight",
        B: ".lora_B.weight",
        MAGNITUDE: ".lora_magnitude_vector",
    },
    "embedding": {A: ".lora_embedding_A", B: ".lora_embedding_B"},
}


def place_of(layer: str, base: Mapping[str, FileTensor]) -> FileTensor | None:
    """Returns where the files keep the weight of a layer, by the layer's path."""
    return base.get(f"{layer}.kernel") or base.get(f"{layer}.embedding")


def places(
    adapters: Iterable[str], base: Mapping[str, FileTensor]
) -> dict[str, FileTensor]:
    """Returns where the files keep adapters.

    Args:
      adapters: Names like "blocks.3.attention.q.lora_a".
      base: Where the files of the model keep its arrays.

    Raises:
      UserError: The files of the model have no layer for one of them.
    """
    found = {}
    for name in adapters:
        module, _, part = name.rpartition(".")
        stored = place_of(module, base)
        if stored is None or not stored.names or stored.part != (0, 1):
            raise UserError(
                f"the adapter {name} is of a layer that Hugging Face's files of the "
                "model do not have, so that PEFT cannot use it"
            )
        kind = "kernel" if f"{module}.kernel" in base else "embedding"
        names = (
            f"{PREFIX}{x.removesuffix('.weight')}{_NAMES[kind][part]}"
            for x in stored.names
        )
        found[name] = FileTensor(tuple(names), transposed=part != MAGNITUDE)
    return found


def module_of(tensor: str) -> str:
    """Returns the layer, or expert, in the files that a tensor with A or B is of."""
    return tensor.removeprefix(PREFIX).partition(".lora_")[0]


def write_config(
    folder: Path, about: Mapping[str, Any], base: Mapping[str, FileTensor]
) -> list[str]:
    """Writes ``adapter_config.json``.

    `about` is the metadata of a checkpoint with adapters, and `base` as for ``places``.

    Returns:
      What to tell the user.

    Raises:
      UserError: PEFT would scale the adapters otherwise.
    """
    layers = {
        stored: names
        for stored, names in adapter_layers(about).items()
        if stored.endswith(f".{A}")
    }
    entries = {stored: about["arrays"][stored] for stored in layers}
    _check_scales(entries)
    tensors = [tensor for names in layers.values() for tensor in names.values()]
    given = about["config"].get("checkpoint")
    model = given.get("restore") if isinstance(given, dict) else None
    model = model if isinstance(model, str) and model else None
    name = parse(model) if model else None
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name.repository if name else model,
        "revision": name and name.commit,
        **_sizes(entries, layers, base),
        "lora_dropout": 0.0,
        "use_rslora": any(entry.get(STABILIZED) for entry in entries.values()),
        "use_dora": any(name.endswith(f".{MAGNITUDE}") for name in about["arrays"]),
        "target_modules": _targets(tensors, base),
        "modules_to_save": _saved(about, base, tensors) or None,
        "bias": "none",
        # Matrices (inputs, outputs), as GPT-2's files have them.
        "fan_in_fan_out": not all(
            x.transposed for name, x in base.items() if name.endswith(".kernel")
        ),
        "inference_mode": True,
    }
    text = json.dumps(content, indent=2) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    return [f"adapters for {model}"] if model else []


def adapter_layers(about: Mapping[str, Any]) -> dict[str, Layers]:
    """Returns the names of adapters' tensors, without layers that have no adapter."""
    found = {}
    for stored, names in tensor_names(about).items():
        layer, _, part = stored.rpartition(".")
        if part in (A, B, MAGNITUDE):
            only = about["arrays"].get(f"{layer}.{A}", {}).get(LAYERS)
            found[stored] = {
                index: name
                for index, name in names.items()
                if only is None or index[0] in only
            }
    return found


def adapter_names(about: Mapping[str, Any]) -> list[str]:
    """Returns the names of the adapters' tensors."""
    return [x for names in adapter_layers(about).values() for x in names.values()]


def _sizes(
    entries: Mapping[str, Mapping[str, Any]],
    layers: Mapping[str, Layers],
    base: Mapping[str, FileTensor],
) -> dict[str, Any]:
    """Returns the commonest rank and alpha, and by layer those that differ."""
    found: dict[str, dict[str, Any]] = {"r": {}, "lora_alpha": {}}
    for stored, names in layers.items():
        for name in names.values():
            place = place_of(name.rpartition(".")[0], base)
            for theirs in place.names if place else ():
                module = theirs.removesuffix(".weight")
                found["r"][module] = entries[stored]["shape"][-1]
                found["lora_alpha"][module] = entries[stored][ALPHA]
    content: dict[str, Any] = {}
    for key, values in found.items():
        ((common, _),) = Counter(values.values()).most_common(1)
        pattern = "rank_pattern" if key == "r" else "alpha_pattern"
        content |= {key: common, pattern: {}}
        for module, value in values.items():
            end = module.rpartition(".")[2]
            same = {values[x] for x in values if x.rpartition(".")[2] == end}
            if value != common:
                name = end if len(same) == 1 else re.escape(module)
                content[pattern][name] = value
    of_experts = [x for x, entry in entries.items() if _is_of_experts(entry)]
    if of_experts and (content["rank_pattern"] or content["alpha_pattern"]):
        raise UserError(
            f"the adapter {of_experts[0]} is of experts, and ranks or alphas differ: "
            "PEFT's patterns have no names for experts; merge (--format=huggingface)"
        )
    return content


def _is_of_experts(entry: Mapping[str, Any]) -> bool:
    return len(entry["shape"]) - entry["layer_dims"] > 2


def _check_scales(entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuses experts' adapters that are scaled by the root of their rank.

    PEFT makes one of gate and up, of twice the rank and alpha, which keeps their ratio
    alone.
    """
    for name, entry in entries.items():
        if _is_of_experts(entry) and entry.get(STABILIZED):
            raise UserError(
                f"the adapter {name} is of experts, and lora.rslora=True: PEFT, which "
                "joins two such adapters to one of twice the rank, would scale them "
                "otherwise; merge them (--format=huggingface)"
            )


def _targets(adapters: Iterable[str], base: Mapping[str, FileTensor]) -> list[str]:
    """Returns the layers that have adapters, as PEFT names them.

    It takes the ends of paths; these are paths where an end would name others, too.
    """
    adapted = _adapted(adapters, base)
    ends = {layer.rpartition(".")[2] for layer in adapted}
    all_layers = {
        one.removesuffix(".weight")
        for name, stored in base.items()
        if name.endswith((".kernel", ".embedding"))
        for one in stored.names
    }
    same = {layer for layer in all_layers if layer.rpartition(".")[2] in ends}
    return sorted(ends if same == adapted else adapted)


def _adapted(adapters: Iterable[str], base: Mapping[str, FileTensor]) -> set[str]:
    """Returns the modules of the files that have adapters."""
    layers = (place_of(name.rpartition(".")[0], base) for name in adapters)
    found = [name for layer in layers if layer for name in layer.names]
    return {name.removesuffix(".weight") for name in found}


def _saved(
    about: Mapping[str, Any], base: Mapping[str, FileTensor], adapters: Iterable[str]
) -> list[str]:
    """Returns the modules that were trained whole, as PEFT names them.

    It takes any ends of paths, "norm" for "input_layernorm", too; these are paths where
    an end would name others.

    Raises:
      UserError: One has an adapter besides, which PEFT would leave out.
    """
    names = [x for layers in saved_layers(about).values() for x in layers.values()]
    places = saved_places(names, base).values()
    saved = {modules_of(x.names[0].removeprefix(PREFIX))[-1] for x in places}
    if both := sorted(saved & _adapted(adapters, base)):
        raise UserError(
            f"{both[0]} was trained beneath its adapter, and PEFT's modules_to_save "
            "have none: merge them (--format=huggingface)"
        )
    every = {m for x in base.values() for name in x.names for m in modules_of(name)}
    ends = tuple(x.rpartition(".")[2] for x in saved)
    same = {module for module in every if module.endswith(ends)} if ends else set()
    return sorted(set(ends) if same == saved else saved)
