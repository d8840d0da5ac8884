"""Tiny models of transformers, random, in a folder; and their weights in ours."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jshard
from jshard.sharding.layout.layer_dims import layer_dims
from jshard.storage.hub.file_tensor import FileTensor
from parity import make_mesh


def randomize(model: Any) -> Any:
    """Makes every parameter of a torch model random: norms and biases, too."""
    torch = pytest.importorskip("torch")

    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * 0.2
            parameter.copy_(noise + 1 if "norm" in name else noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    return model.eval()


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a Hugging Face folder, by name."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def load(
    model: nnx.Module,
    files: Mapping[str, np.ndarray],
    tensors: Mapping[str, FileTensor],
) -> nnx.Module:
    """Puts all of the files' tensors into a model, each exactly once."""
    arrays = {name: _array(files, tensor) for name, tensor in tensors.items()}
    used = [name for tensor in tensors.values() for name in tensor.names]
    assert sorted(used) == sorted(files)
    kinds = nnx.Any(nnx.Param, nnx.BatchStat)
    for path, variable in nnx.to_flat_state(nnx.state(model, kinds)):
        name, value = ".".join(map(str, path)), variable.get_value()
        if layer_dims(variable):
            names = _layer_names(name, len(value), arrays)
            array = np.stack([arrays.pop(layer) for layer in names])
        else:
            array = arrays.pop(name)
        assert array.shape == value.shape, name
        variable.set_value(jax.device_put(np.asarray(array, value.dtype)))
    assert not arrays
    return model


def store(
    model: nnx.Module, tensors: Mapping[str, FileTensor]
) -> dict[str, np.ndarray]:
    """The tensors of a model's files."""
    params = nnx.to_flat_state(nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat)))
    arrays = {".".join(map(str, path)): v.get_value() for path, v in params}
    files = {}
    for name, tensor in tensors.items():
        stack, *rest = name.split(".")
        if rest[0].isdigit():
            array = arrays[".".join([stack, *rest[1:]])][int(rest[0])]
        else:
            array = arrays[name]
        array = np.asarray(array)
        array = array.swapaxes(-1, -2) if tensor.transposed else array
        parts = [array] if len(tensor.names) == 1 else list(array)
        files |= dict(zip(tensor.names, parts, strict=True))
    return {name: np.ascontiguousarray(array) for name, array in files.items()}


def check_logits(
    model: Any, logits: Callable[[Any, Any], Any], batch: Any, want: np.ndarray
) -> None:
    """Checks what a model computes of a batch, on one device and over meshes.

    Args:
      model: over whole arrays.
      logits: a function of the model and the batch.
      batch: arrays.
      want: the result of another implementation.
    """

    def check(got: Any) -> None:
        worst = np.max(np.abs(np.asarray(got) - want))
        assert worst <= 1e-5 * np.max(np.abs(want))

    assert np.std(want) > 0.1
    with jax.default_matmul_precision("highest"):
        check(nnx.jit(logits)(model, batch))
        for replica in (1, 2):
            fsdp = jshard.FSDP(
                make_mesh(replica, 8 // replica), jshard.Policy(min_shard_elements=0)
            )
            state = fsdp.from_model(model, optax.identity())
            predict = fsdp.predict_step(logits)
            check(fsdp.fetch(predict(state, fsdp.shard_batch(batch))))


def write_again(model: Any, huggingface: Any, source: Path, target: Path) -> None:
    """Writes a folder for a model, and checks it against the one that it was read from.

    Args:
      model: over whole arrays.
      huggingface: its map.
      source: the folder that it was read from.
      target: the folder to write.
    """
    theirs = json.loads((source / "config.json").read_text())
    config = huggingface.write_config(vars(model.config))
    config["pad_token_id"] = theirs.get("pad_token_id")  # as an export has it
    (target / "config.json").write_text(json.dumps(config))
    files = store(model, huggingface.tensors(vars(model.config)))
    save_file(files, target / "model.safetensors", {"format": "pt"})
    originals = read_tensors(source)
    assert originals.keys() == files.keys()
    for name, original in originals.items():
        assert original.tobytes() == files[name].tobytes()
    assert huggingface.read_config(config) == huggingface.read_config(theirs)


def _layer_names(name: str, layers: int, arrays: Mapping[str, Any]) -> list[str]:
    """Returns the names of a stacked array's layers; the stack may be nested."""
    parts = name.split(".")
    for n in range(1, len(parts)):
        first, last = ".".join(parts[:n]), ".".join(parts[n:])
        names = [f"{first}.{i}.{last}" for i in range(layers)]
        if names[0] in arrays:
            return names
    raise AssertionError(name)


def _array(files: Mapping[str, np.ndarray], tensor: FileTensor) -> np.ndarray:
    parts = [tensor.from_file(files[name]) for name in tensor.names]
    return parts[0] if len(parts) == 1 else np.stack(parts)
