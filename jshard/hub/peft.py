"""Adapters in the files of Hugging Face's PEFT.

A folder has ``adapter_config.json`` and ``adapter_model.safetensors``, with the tensors
``base_model.model.MODULE.lora_A.weight`` (rank, inputs) and ``.lora_B.weight``
(outputs, rank), where MODULE is the path of a layer in the files of its model.
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
from jshard.hub.online.names import parse
from jshard.hub.tensor_names import Layers, tensor_names
from jshard.nn.lora import ALPHA

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SIDES = {"lora_a": "lora_A", "lora_b": "lora_B"}
# What changes the product of an adapter, and must be as if it were not there.
_UNSUPPORTED = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "use_rslora",
)
# Initial values that are taken out of the model's own weights, which PEFT changes.
_CHANGE_THE_MODEL = ("corda", "loftq", "lora_ga", "olora", "pissa")


def file_names(
    adapters: Iterable[str], base: Mapping[str, FileTensor]
) -> dict[str, str]:
    """Returns the names of adapters in the files.

    Args:
      adapters: Names like "blocks.3.attention.q.lora_a".
      base: Where the files of the model keep its arrays.

    Raises:
      UserError: The files of the model have no layer for one of them.
    """
    found = {}
    for name in adapters:
        module, _, side = name.rpartition(".")
        stored = base.get(f"{module}.kernel")
        if stored is None or len(stored.names) != 1:
            raise UserError(
                f"the adapter {name} is of a layer that Hugging Face's files of the "
                "model do not have, so that PEFT cannot use it"
            )
        layer = stored.names[0].removesuffix(".weight")
        found[name] = f"{_PREFIX}{layer}.{_SIDES[side]}.weight"
    return found


def write_config(
    folder: Path, about: Mapping[str, Any], base: Mapping[str, FileTensor]
) -> list[str]:
    """Writes ``adapter_config.json``.

    Args:
      folder: The folder with the tensors.
      about: The metadata of a checkpoint with adapters.
      base: As for ``file_names``.

    Returns:
      What to tell the user.
    """
    names = tensor_names(about)
    stored = [name for name in names if name.endswith(".lora_a")]
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
        "target_modules": _targets(tensors, base),
        "bias": "none",
        "fan_in_fan_out": not all(stored.transposed for _, stored in _linears(base)),
        "inference_mode": True,
    }
    text = json.dumps(content, indent=2) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    return [f"adapters for {model}"] if model else []


def _targets(adapters: Iterable[str], base: Mapping[str, FileTensor]) -> list[str]:
    """Returns the layers that have adapters, as PEFT names them.

    It takes the ends of paths; these are paths where an end would name others, too.
    """
    tensors = file_names(adapters, base).values()
    adapted = {name.removeprefix(_PREFIX).rsplit(".", 2)[0] for name in tensors}
    ends = {layer.rpartition(".")[2] for layer in adapted}
    same = {name for name, _ in _linears(base) if name.rpartition(".")[2] in ends}
    return sorted(ends if same == adapted else adapted)


def _linears(base: Mapping[str, FileTensor]) -> list[tuple[str, FileTensor]]:
    """Returns the paths of a model's layers in its files."""
    return [
        (stored.names[0].removesuffix(".weight"), stored)
        for name, stored in base.items()
        if name.endswith(".kernel") and len(stored.names) == 1
    ]


def read_adapters(
    path: Path, state: TrainState, base: Mapping[str, FileTensor]
) -> TrainState:
    """Starts the adapters of a state from a folder of PEFT's.

    The host holds all adapters at once, which are small.

    Args:
      path: The folder.
      state: A state with adapters of the same layers, rank and alpha.
      base: As for ``file_names``.

    Raises:
      UserError: The folder cannot be read, or holds other adapters; the message lists
        the first differences.
    """
    found, wanted = _load(path), _adapters(state)
    names = file_names(_tensor_names(wanted), base)
    _check(path, found, wanted, names)

    def read(variable: Any, layers: Layers) -> jax.Array:
        array = variable.get_value()
        values = np.empty(array.shape, array.dtype)
        for index, name in layers.items():
            values[index] = found[names[name]].T
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
    _check(path, _load(path), wanted, file_names(_tensor_names(wanted), base))


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
    names: Mapping[str, str],
) -> None:
    """Raises UserError unless a folder's adapters are exactly those of a model."""
    if not wanted:
        raise UserError(
            f"{path} holds adapters, and the model has none: give lora.rank"
        )
    a = next(x for name, (x, _) in wanted.items() if name.endswith("lora_a"))
    rank = np.shape(a.get_value())[-1]
    problems = _config_problems(path, rank, a.get_metadata(ALPHA))
    expected = {
        names[tensor]: np.shape(variable.get_value())[len(index) :][::-1]
        for variable, layers in wanted.values()
        for index, tensor in layers.items()
    }
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


def _config_problems(path: Path, rank: int, alpha: float) -> list[str]:
    """Compares ``adapter_config.json`` with a model's adapters."""
    file = path / CONFIG
    try:
        config = read_json(file)
        own: dict[str, tuple[Any, float]] = {"lora.rank": (config["r"], rank)}
        own["lora.alpha"] = (config["lora_alpha"], alpha)
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
