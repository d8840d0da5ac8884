"""Adapters in the files of Hugging Face's PEFT.

A folder has ``adapter_config.json`` and ``adapter_model.safetensors``, with the tensors
``base_model.model.MODULE.lora_A.weight`` (rank, inputs) and ``.lora_B.weight``
(outputs, rank), where MODULE is the path of a layer, or of an expert, in the files of
its model. DoRA has ``.lora_magnitude_vector`` (outputs,) besides, and an embedding
``.lora_embedding_A`` and ``.lora_embedding_B``.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jshard.checkpoint import metadata
from jshard.checkpoint.untrusted import read_json
from jshard.errors import UserError, some_of
from jshard.fsdp.state import TrainState
from jshard.hub.file_tensor import FileTensor
from jshard.hub.online.names import Name, parse
from jshard.hub.tensor_names import Layers, tensor_names
from jshard.layout.padding import shape_of_layer
from jshard.nn.adapted import ALPHA, MAGNITUDE, STABILIZED, A, B

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NAMES = {
    "kernel": {
        A: ".lora_A.weight",
        B: ".lora_B.weight",
        MAGNITUDE: ".lora_magnitude_vector",
    },
    "embedding": {A: ".lora_embedding_A", B: ".lora_embedding_B"},
}
# What changes the product of an adapter, and must be as if it were not there.
_UNSUPPORTED = """
    alora_invocation_tokens alpha_pattern layer_replication lora_bias modules_to_save
    rank_pattern target_parameters trainable_token_indices use_bdlora use_qalora
    """.split()
# A table's adapter is its head's, too, in PEFT, where both are tied.
_TIES_HEADS = "ensure_weight_tying"
# PEFT keeps the weights of embeddings and heads beside their adapters.
_KEPT_BESIDE = ".base_layer.weight"
# Initial values that are taken out of the model's own weights, which PEFT changes.
_CHANGE_THE_MODEL = ("corda", "loftq", "lora_ga", "olora", "pissa")


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
            f"{_PREFIX}{x.removesuffix('.weight')}{_NAMES[kind][part]}"
            for x in stored.names
        )
        found[name] = FileTensor(tuple(names), transposed=part != MAGNITUDE)
    return found


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
    names = tensor_names(about)
    stored = [name for name in names if name.endswith(".lora_a")]
    _check_scales({name: about["arrays"][name] for name in stored})
    tensors = [tensor for name in stored for tensor in names[name].values()]
    entry = about["arrays"][stored[0]]
    given = about["config"].get("checkpoint")
    model = given.get("restore") if isinstance(given, dict) else None
    model = model if isinstance(model, str) and model else None
    name = parse(model) if model else None
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name.repository if name else model,
        "revision": name and name.commit,
        "r": entry["shape"][-1],
        "lora_alpha": entry[ALPHA],
        "lora_dropout": 0.0,
        "use_rslora": bool(entry.get(STABILIZED)),
        "use_dora": any(name.endswith(f".{MAGNITUDE}") for name in names),
        "target_modules": _targets(tensors, base),
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


def _check_scales(entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuses experts' adapters that are scaled by the root of their rank.

    PEFT makes one of gate and up, of twice the rank and alpha, which keeps their ratio
    alone.
    """
    for name, entry in entries.items():
        of_experts = len(entry["shape"]) - entry["layer_dims"] > 2
        if of_experts and entry.get(STABILIZED):
            raise UserError(
                f"the adapter {name} is of experts, and lora.rslora=True: PEFT, which "
                "joins two such adapters to one of twice the rank, would scale them "
                "otherwise; merge them (--format=huggingface)"
            )


def _targets(adapters: Iterable[str], base: Mapping[str, FileTensor]) -> list[str]:
    """Returns the layers that have adapters, as PEFT names them.

    It takes the ends of paths; these are paths where an end would name others, too.
    """
    layers = (place_of(name.rpartition(".")[0], base) for name in adapters)
    found = [name for layer in layers if layer for name in layer.names]
    adapted = {name.removesuffix(".weight") for name in found}
    ends = {layer.rpartition(".")[2] for layer in adapted}
    all_layers = {
        one.removesuffix(".weight")
        for name, stored in base.items()
        if name.endswith((".kernel", ".embedding"))
        for one in stored.names
    }
    same = {layer for layer in all_layers if layer.rpartition(".")[2] in ends}
    return sorted(ends if same == adapted else adapted)


def read_adapters(
    path: Path, state: TrainState, base: Mapping[str, FileTensor]
) -> TrainState:
    """Starts the adapters of a state from a folder of PEFT's.

    The host holds all adapters at once, which are small.

    The state has adapters of the same layers, rank and alpha; `base` is as for
    ``places``.

    Raises:
      UserError: The folder cannot be read, or holds other adapters; the message lists
        the first differences.
    """
    found, wanted = _load(path), _adapters(state)
    stored = places(_tensor_names(wanted), base)
    _check(path, found, wanted, stored)

    def read(variable: Any, layers: Layers) -> jax.Array:
        array = variable.get_value()
        values = np.zeros(array.shape, array.dtype)  # with its padding
        exact = tuple(slice(size) for size in shape_of_layer(variable))
        for index, name in layers.items():
            place = stored[name]
            parts = [place.from_file(found[x]) for x in place.names]
            one = parts[0] if len(parts) == 1 else np.stack(parts)
            values[(*index, *exact)] = one
        return jax.make_array_from_callback(
            array.shape, array.sharding, lambda index: values[index]
        )

    arrays = {name: read(*leaf) for name, leaf in wanted.items()}
    return metadata.replace_arrays(state, arrays)


def check_adapters(
    path: Path, state: TrainState, base: Mapping[str, FileTensor]
) -> None:
    """Raises what ``read_adapters`` would raise; the state may be abstract."""
    wanted = _adapters(state)
    _check(path, _load(path), wanted, places(_tensor_names(wanted), base))


def check_base(path: Path, base: Name | None) -> None:
    """Raises UserError if a folder's adapters are for another model on the Hub.

    `base` is the name of the run's model, if it has one; those of folders may change.
    ``check_adapters`` has checked the folder.
    """
    said = read_json(path / CONFIG).get("base_model_name_or_path")
    theirs = parse(said) if isinstance(said, str) and said else None
    if base is None or theirs is None:
        return
    if theirs.repository.lower() != base.repository.lower():
        raise UserError(
            f"{path} holds adapters for {theirs.repository}, and checkpoint.restore is "
            f"{base.repository}: give {theirs.repository}, or if both are the same "
            f"model, change base_model_name_or_path in {CONFIG}"
        )


def _adapters(state: TrainState) -> dict[str, tuple[nnx.Variable, Layers]]:
    """Returns each adapter with its tensors' names, by the name of its array."""
    variables = metadata.variables_by_name(state)
    names = tensor_names(metadata.describe(state, config={}, metrics={}))
    return {
        name: (variable, names[name])
        for name, variable in variables.items()
        if isinstance(variable, nnx.LoRAParam) and name in names
    }


def _tensor_names(adapters: Mapping[str, tuple[nnx.Variable, Layers]]) -> list[str]:
    return [name for _, layers in adapters.values() for name in layers.values()]


def _load(path: Path) -> dict[str, np.ndarray]:
    file = path / TENSORS
    if not file.exists():
        raise UserError(f"there is no {file}")
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {file}: {error}") from error


def _check(
    path: Path,
    found: Mapping[str, np.ndarray],
    wanted: Mapping[str, tuple[nnx.Variable, Layers]],
    stored: Mapping[str, FileTensor],
) -> None:
    """Raises UserError unless a folder's adapters are exactly those of a model."""
    if not wanted:
        raise UserError(
            f"{path} holds adapters, and the model has none: give lora.rank"
        )
    a = next(x for name, (x, _) in wanted.items() if name.endswith(A))
    dora = any(name.endswith(MAGNITUDE) for name in wanted)
    problems = _config_problems(path, a, dora=dora)
    found = {name: x for name, x in found.items() if not name.endswith(_KEPT_BESIDE)}
    expected = {
        name: place.shape_in_file(shape_of_layer(variable))
        for variable, layers in wanted.values()
        for tensor in layers.values()
        for place in [stored[tensor]]
        for name in place.names
    }
    if any(".lora_embedding_" in name for name in expected):
        if read_json(path / CONFIG).get(_TIES_HEADS):
            problems.append(f"{_TIES_HEADS}=True is not supported")
    problems += [f"{name} is missing" for name in expected if name not in found]
    problems += [f"the model has no {name}" for name in found if name not in expected]
    problems += [
        f"{name} has shape {found[name].shape}, not {shape}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    if problems:
        raise UserError(
            f"{path} is of other adapters than the run's: {some_of(problems, '; ', 4)}"
        )


def _config_problems(path: Path, a: nnx.Variable, *, dora: bool) -> list[str]:
    """Compares ``adapter_config.json`` with a model's adapters."""
    file = path / CONFIG
    try:
        config = read_json(file)
        own: dict[str, tuple[Any, Any]] = {
            "lora.rank": (config["r"], shape_of_layer(a)[-1]),
            "lora.alpha": (config["lora_alpha"], a.get_metadata(ALPHA)),
            "lora.rslora": (
                bool(config.get("use_rslora")),
                bool(a.get_metadata(STABILIZED, None)),
            ),
            "lora.dora": (bool(config.get("use_dora")), dora),
        }
        expected = {"peft_type": "LORA", "bias": "none"}
        expected |= dict.fromkeys(_UNSUPPORTED)
        init = str(config.get("init_lora_weights", ""))
        if init.startswith(_CHANGE_THE_MODEL):
            expected["init_lora_weights"] = None
        given = {key: config.get(key) or value for key, value in expected.items()}
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"cannot read {file}: {error!r}") from error
    return [
        f"{key}={value!r} is not supported"
        for key, value in given.items()
        if value != expected[key]
    ] + [f"{key}={there} there" for key, (there, here) in own.items() if there != here]
