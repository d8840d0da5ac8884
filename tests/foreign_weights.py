"""Tiny models of transformers, random, in a folder; and their weights in ours."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jshard.checkpoint.file_tensor import FileTensor
from jshard.layout.layers import layer_dims


def randomize(model: Any) -> Any:
    """Makes every parameter of a torch model random: norms and biases, too."""
    torch = pytest.importorskip("torch")

    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * 0.2
            parameter.copy_(noise + 1 if "norm" in name else noise)
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
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name, value = ".".join(map(str, path)), variable.get_value()
        if layer_dims(variable):
            stack, rest = name.split(".", 1)
            layers = [arrays.pop(f"{stack}.{i}.{rest}") for i in range(len(value))]
            array = np.stack(layers)
        else:
            array = arrays.pop(name)
        assert array.shape == value.shape, name
        variable.set_value(jnp.asarray(array, value.dtype))
    assert not arrays
    return model


def store(
    model: nnx.Module, tensors: Mapping[str, FileTensor]
) -> dict[str, np.ndarray]:
    """The tensors of a model's files."""
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
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


def _array(files: Mapping[str, np.ndarray], tensor: FileTensor) -> np.ndarray:
    parts = [files[name] for name in tensor.names]
    array = parts[0] if len(parts) == 1 else np.stack(parts)
    return array.swapaxes(-1, -2) if tensor.transposed else array
