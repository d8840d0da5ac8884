"""Reads adapters from the files of Hugging Face's PEFT (``storage/hub/peft.py``).

What else is trained is read with them, if it is of modules that are trained whole.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jshard.nn.adapted import ALPHA, STABILIZED, A
from jshard.sharding.layout.padding import shape_of_layer
from jshard.sharding.layout.values.magnitudes import MAGNITUDE
from jshard.sharding.settings.state import TrainState
from jshard.storage.checkpoint import metadata
from jshard.storage.hub.adapters.modules_to_save import saved_layers, saved_places
from jshard.storage.hub.adapters.targets import pattern_of
from jshard.storage.hub.file_tensor import FileTensor
from jshard.storage.hub.merged_adapters import PARTS
from jshard.storage.hub.online.names import Name, parse
from jshard.storage.hub.peft import CONFIG, TENSORS, adapter_layers, module_of, places
from jshard.storage.hub.tensor_names import Layers
from jshard.system.errors import UserError, some_of
from jshard.system.files.untrusted import read_json

# What changes the product of an adapter, and must be as if it were not there.
_UNSUPPORTED = """
    alora_invocation_tokens layer_replication lora_bias target_parameters
    trainable_token_indices use_bdlora use_qalora
    """.split()
# A table's adapter is its head's, too, in PEFT, where both are tied.
_TIES_HEADS = "ensure_weight_tying"
# PEFT keeps the weights of embeddings and heads beside their adapters.
_KEPT_BESIDE = ".base_layer.weight"
# Initial values that are taken out of the model's own weights, which PEFT changes.
_CHANGE_THE_MODEL = ("corda", "loftq", "lora_ga", "olora", "pissa")


def read_adapters(
    path: Path, state: TrainState, base: Mapping[str, FileTensor]
) -> TrainState:
    """Starts what is trained from a folder of PEFT's: adapters, and whole modules.

    The host holds all of it at once, which is small.

    The state has adapters of the same layers, rank and alpha; `base` is as for
    ``places``.

    Raises:
      UserError: The folder cannot be read, or holds other adapters; the message lists
        the first differences.
    """
    found, wanted = _load(path), _trained(state)
    stored = _places(wanted, base)
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
    wanted = _trained(state)
    _check(path, _load(path), wanted, _places(wanted, base))


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


def _trained(state: TrainState) -> dict[str, tuple[nnx.Variable, Layers]]:
    """Returns what is trained with its tensors' names, by the names of the arrays.

    It is nothing where there are no adapters.
    """
    variables = metadata.variables_by_name(state)
    about = metadata.describe(state, config={}, metrics={})
    adapters = adapter_layers(about)
    names = adapters | saved_layers(about) if adapters else {}
    return {name: (variables[name], layers) for name, layers in names.items()}


def _places(
    trained: Mapping[str, tuple[nnx.Variable, Layers]], base: Mapping[str, FileTensor]
) -> dict[str, FileTensor]:
    """Returns where a folder has what is trained, by the tensors' names."""
    found: dict[str, FileTensor] = {}
    for name, (_, layers) in trained.items():
        place = places if name.endswith(PARTS) else saved_places
        found |= place(layers.values(), base)
    return found


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
    modules = {
        module_of(name): variable
        for variable, layers in wanted.values()
        for tensor in layers.values()
        if tensor.endswith(f".{A}")
        for name in stored[tensor].names
    }
    dora = any(name.endswith(MAGNITUDE) for name in wanted)
    alone = all(name.endswith(PARTS) for name in wanted)
    problems = _config_problems(path, modules, dora=dora, alone=alone)
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


def _config_problems(
    path: Path, modules: Mapping[str, nnx.Variable], *, dora: bool, alone: bool
) -> list[str]:
    """Compares ``adapter_config.json`` with a model's adapters.

    `modules` has the A of each layer, by the layer's name in the files of the model.
    `alone` says that nothing else is trained.
    """
    file = path / CONFIG
    try:
        config = read_json(file)
        ranks, alphas = (config.get(f"{x}_pattern") or {} for x in ("rank", "alpha"))
        # As a dict, so that what differs alike in all layers is said once.
        own = {
            (key, there, here): None
            for name, a in modules.items()
            for key, there, here in (
                (
                    "lora.rank",
                    pattern_of(ranks, name, config["r"]),
                    shape_of_layer(a)[-1],
                ),
                (
                    "lora.alpha",
                    pattern_of(alphas, name, config["lora_alpha"]),
                    a.get_metadata(ALPHA),
                ),
                (
                    "lora.rslora",
                    bool(config.get("use_rslora")),
                    bool(a.get_metadata(STABILIZED, None)),
                ),
                ("lora.dora", bool(config.get("use_dora")), dora),
            )
        }
        if alone:
            whole = ",".join(config.get("modules_to_save") or ())
            own["lora.modules_to_save", whole, ""] = None
        expected = {"peft_type": "LORA", "bias": "none"}
        expected |= dict.fromkeys(_UNSUPPORTED)
        init = str(config.get("init_lora_weights", ""))
        if init.startswith(_CHANGE_THE_MODEL):
            expected["init_lora_weights"] = None
        given = {key: config.get(key) or value for key, value in expected.items()}
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError, re.error) as error:
        raise UserError(f"cannot read {file}: {error!r}") from error
    return [
        f"{key}={value!r} is not supported"
        for key, value in given.items()
        if value != expected[key]
    ] + [f"{key}={there!r} there" for key, there, here in own if there != here]
