"""Experts in MXFP4, as gpt-oss's files have them."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from jshard.models import llama_huggingface
from jshard.models.llama import Llama, LlamaConfig
from jshard.sharding.layout.variables import variables
from jshard.storage.hub.huggingface_folder import read_config
from jshard.storage.hub.quantised.mxfp4 import GROUP, Decoded
from jshard.storage.hub.safetensors_read import load_safetensors
from jshard.storage.hub.safetensors_write import SINGLE, write_tensors

E, D, P = 4, 32, 64
_OF_CODES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def random_codes(outputs: int, inputs: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(outputs)
    groups = inputs // GROUP
    codes = rng.integers(0, 256, (E, outputs, groups, GROUP // 2)).astype(np.uint8)
    return codes, rng.integers(118, 124, (E, outputs, groups)).astype(np.uint8)


def decoded(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """One number at a time."""
    experts, outputs, groups = scales.shape
    values = np.zeros((experts, groups * GROUP, outputs), np.float32)
    for e, p, g in np.ndindex(*scales.shape):
        for i in range(GROUP):
            byte = int(codes[e, p, g, i // 2])
            code = byte >> 4 if i % 2 else byte & 15
            value = _OF_CODES[code & 7] * (-1) ** (code >> 3)
            values[e, g * GROUP + i, p] = value * 2.0 ** (int(scales[e, p, g]) - 127)
    return values


def test_slices_are_those_of_numbers_decoded_one_at_a_time():
    codes, scales = random_codes(P, 2 * D)
    want, got = decoded(codes, scales), Decoded(codes, scales)
    assert got.shape == want.shape
    for index in (np.s_[:, :, :], np.s_[1:3, 5:40, 7:9], np.s_[3:, :32, 60:]):
        np.testing.assert_array_equal(got[index].astype(np.float32), want[index])


def write_folder(folder: Path) -> dict[str, Any]:
    """A gpt-oss of one layer; returns what its experts are."""
    config = LlamaConfig(
        vocab_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        width=D,
        hidden=P // 2,
        qkv_bias=True,
        out_bias=True,
        pattern="s",
        window=4,
        sinks=True,
        num_experts=E,
        expert_bias=True,
        expert_limit=7.0,
        activation="quick_gelu",
        rope_scaling="yarn",
        rope_factor=2.0,
    )
    json_ = llama_huggingface.write_config(vars(config))
    json_["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(json_))
    model = filled(lambda: Llama(config, rngs=nnx.Rngs(0)))
    arrays = {".".join(map(str, path)): v.get_value() for path, v in variables(model)}
    tensors, experts = {}, {}
    for name, place in llama_huggingface.tensors(vars(config)).items():
        array = np.asarray(arrays[name.replace("blocks.0.", "blocks.")])
        array = array[0] if name.startswith("blocks.") else array
        if name.endswith(("gate_up.kernel", "experts.down.kernel")):
            codes, scales = random_codes(array.shape[2], array.shape[1])
            experts[name.replace("blocks.0.", "params.blocks.")] = decoded(
                codes, scales
            )
            whole = place.names[0]
            tensors |= {f"{whole}_blocks": codes, f"{whole}_scales": scales}
        else:
            array = array.T if place.transposed else array
            tensors[place.names[0]] = np.ascontiguousarray(array)
    write_tensors(folder / SINGLE, tensors, "pt")
    return experts


def abstract(folder: Path) -> tuple[Any, Any]:
    keys = llama_huggingface.read_config(read_config(folder))
    config = LlamaConfig(**keys, param_dtype=jnp.bfloat16)
    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(min_shard_elements=0))
    state = fsdp.abstract_state(lambda rngs: Llama(config, rngs=rngs), optax.identity())
    return state, llama_huggingface.tensors(keys)


def test_a_folder_of_gpt_oss_loads_directly(tmp_path):
    want = write_folder(tmp_path)
    state, tensors = abstract(tmp_path)
    loaded = load_safetensors(tmp_path, state, tensors)
    assert len(want) == 2
    for name, array in want.items():
        got = np.asarray(loaded[name], np.float32)
        np.testing.assert_array_equal(got[0], array)


def test_other_shapes_than_the_models_are_a_users_error(tmp_path):
    write_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_local_experts"] = 8
    (tmp_path / "config.json").write_text(json.dumps(config))
    state, tensors = abstract(tmp_path)
    with pytest.raises(
        jshard.UserError, match=r"gate_up_proj.* has shape \[4, 32, 64\]"
    ):
        load_safetensors(tmp_path, state, tensors)
