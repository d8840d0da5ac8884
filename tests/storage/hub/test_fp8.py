"""Weights in FP8 by blocks of 128 x 128, as in files of DeepSeek-V3 and Qwen 3."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from jshard.models import llama_huggingface
from jshard.models.llama import Llama, LlamaConfig
from jshard.sharding.layout.variables import variables
from jshard.storage.hub.huggingface_folder import read_config
from jshard.storage.hub.quantised.fp8 import BLOCK, Decoded
from jshard.storage.hub.quantised.methods import problem_of_config
from jshard.storage.hub.safetensors_read import load_safetensors
from jshard.storage.hub.safetensors_write import SINGLE, write_tensors

SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "width": 160,
    "hidden": 300,
    "qk_norm": True,
    "sequence_length": 32,
}
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}


def quantised(weight: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of a matrix."""
    blocks = tuple(-(-size // BLOCK) for size in weight.shape)
    codes, scales = np.zeros(weight.shape, jnp.float8_e4m3fn), np.zeros(blocks, dtype)
    for i, j in np.ndindex(*blocks):
        part = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
        scales[i, j] = np.abs(weight[part]).max() / 448
        codes[part] = (weight[part] / np.float32(scales[i, j])).astype(codes.dtype)
    return codes, scales


def decoded(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """One number at a time, as ``weight_dequant`` of DeepSeek's reference code."""
    values = np.zeros(codes.shape, np.float32)
    for i, j in np.ndindex(*codes.shape):
        scale = np.float32(scales[i // BLOCK, j // BLOCK])
        values[i, j] = np.float32(codes[i, j]) * scale
    return values


def test_slices_are_those_of_numbers_decoded_one_at_a_time():
    weight = np.random.default_rng(0).standard_normal((200, 130)).astype(np.float32)
    codes, scales = quantised(weight, np.float32)
    assert scales.shape == (2, 2)
    got, want = Decoded(codes, scales), decoded(codes, scales)
    assert np.max(np.abs(want - weight)) < 0.2
    for rows, columns in (np.s_[:, :], np.s_[100:150, 120:130], np.s_[128:, :5]):
        np.testing.assert_array_equal(got[rows, columns], want[rows, columns])
        swapped = got.transpose([1, 0])
        assert swapped.shape == (130, 200)
        np.testing.assert_array_equal(swapped[columns, rows], want[rows, columns].T)


class Made(NamedTuple):
    """The content of a Qwen 3 in FP8; ``matrices`` are what it decodes to."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    matrices: dict[str, np.ndarray]

    def write(self, folder: Path, *without: str) -> None:
        (folder / "config.json").write_text(json.dumps(self.config))
        kept = {k: v for k, v in self.tensors.items() if not k.endswith(without)}
        write_tensors(folder / SINGLE, kept, "pt")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(np.float32, id="f32", marks=pytest.mark.slow),
        pytest.param(jnp.bfloat16, id="bf16"),
    ],
)
def made(request) -> Made:
    """Scales are in either dtype."""
    config = LlamaConfig(**SIZES)
    content = llama_huggingface.write_config(vars(config))
    content["quantization_config"] = QUANTIZATION
    abstract = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    shapes = {
        ".".join(map(str, k)): v.get_value().shape for k, v in variables(abstract)
    }
    rng, tensors, matrices = np.random.default_rng(0), {}, {}
    for name, place in llama_huggingface.tensors(vars(config)).items():
        stack, _, rest = name.partition(".")
        layered = stack == "blocks"
        shape = shapes[f"{stack}.{rest.partition('.')[2] if layered else rest}"]
        shape = place.shape_in_file(shape[layered:])
        array = rng.standard_normal(shape).astype(np.float32)
        (whole,) = place.names
        if array.ndim == 2 and layered:
            codes, scales = quantised(array, request.param)
            tensors |= {whole: codes, f"{whole}_scale_inv": scales}
            of_each = np.kron(scales, np.ones((BLOCK, BLOCK), np.float32))
            matrices[whole] = codes.astype(np.float32) * of_each[: shape[0], : shape[1]]
        else:
            tensors[whole] = array
    return Made(content, tensors, matrices)


def load(folder: Path) -> dict[str, Any]:
    keys = llama_huggingface.read_config(read_config(folder))
    config = LlamaConfig(**keys)
    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(min_shard_elements=0))
    state = fsdp.abstract_state(lambda rngs: Llama(config, rngs=rngs), optax.identity())
    return load_safetensors(folder, state, llama_huggingface.tensors(keys))


def test_a_folder_loads_onto_shards_as_its_numbers_are_decoded(made, tmp_path):
    made.write(tmp_path)
    loaded = load(tmp_path)
    assert len(made.matrices) == 2 * 7
    names = {"attention.k": "self_attn.k_proj", "down": "mlp.down_proj"}
    for ours, theirs in names.items():
        got = np.asarray(loaded[f"params.blocks.{ours}.kernel"])
        for layer in range(2):
            want = made.matrices[f"model.layers.{layer}.{theirs}.weight"]
            np.testing.assert_array_equal(got[layer], want.T)


def test_scales_that_are_missing_or_of_other_blocks_are_one_line(made, tmp_path):
    scale = "model.layers.1.mlp.gate_proj.weight_scale_inv"
    made.write(tmp_path, scale)
    with pytest.raises(jshard.UserError, match=f"is in FP8 and {scale} is missing"):
        load(tmp_path)
    other = {**made.tensors, scale: np.ones((1, 1), np.float32)}
    made._replace(tensors=other).write(tmp_path)
    with pytest.raises(jshard.UserError, match="in other blocks than 128 x 128: mo"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (QUANTIZATION | {"scale_fmt": "ue8m0"}, ""),
        ({"quant_method": "fp8"}, ""),
        ({"quant_method": "mxfp4"}, ""),
        ({"weight_block_size": [64, 64]}, "fp8 with weight_block_size=[64, 64]"),
        ({"weight_block_size": None}, "fp8 with weight_block_size=None"),
        ({"activation_scheme": "static"}, "fp8 with activation_scheme='static'"),
        ({"expert_dtype": "fp4"}, "fp8 with expert_dtype='fp4'"),
        ({"quant_method": "awq"}, "awq"),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized"},
            "compressed-tensors, float-quantized",
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes in 8 b"),
        ({"quant_method": None}, "quantization_config"),
    ],
)
def test_what_a_config_says_is_read_or_named(config, problem):
    found = problem_of_config(QUANTIZATION | config)
    assert found.startswith(problem)
    assert bool(found) == bool(problem)
