"""FP8 folders of DeepSeek-V3 and Qwen 3 against transformers, which decodes them."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_transformers import MARKS, V, logits_of, random_decoder

from foreign_weights import read_tensors
from jshard.inference.trained.trained_model import open_model
from jshard.storage.hub.quantised.fp8 import BLOCK
from jshard.storage.hub.safetensors_write import SINGLE, write_tensors

pytestmark = MARKS

# transformers wants dimensions that blocks divide.
SIZES = {"hidden_size": 128, "intermediate_size": 256}
CASES: dict[str, dict[str, Any]] = {
    "Qwen3Config": {"head_dim": 64},
    "Qwen3MoeConfig": {"head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 128},
    "DeepseekV3Config": {"n_routed_experts": 8, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 128, "num_key_value_heads": 4, "n_group": 4}
    | {"topk_group": 2, "kv_lora_rank": 128, "q_lora_rank": 128, "v_head_dim": 64}
    | {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "first_k_dense_replace": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(transformers5, name, tmp_path):
    torch = pytest.importorskip("torch")
    random_decoder(name, **SIZES | CASES[name]).save_pretrained(tmp_path)
    tensors: dict[str, np.ndarray] = {}
    for weight, array in read_tensors(tmp_path).items():
        blocks = array.shape[0] // BLOCK, array.shape[-1] // BLOCK
        if not weight.endswith("proj.weight") or 0 in blocks:
            tensors[weight] = array
            continue
        shape = blocks[0], BLOCK, blocks[1], BLOCK
        values = array.reshape(shape)
        scales = np.max(np.abs(values), axis=(1, 3)) / np.float32(448)
        codes = values / scales[:, None, :, None]
        tensors[weight] = codes.astype(jnp.float8_e4m3fn).reshape(array.shape)
        tensors[f"{weight}_scale_inv"] = scales
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    write_tensors(tmp_path / SINGLE, tensors, "pt")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    theirs = transformers5.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = np.random.default_rng(0).integers(0, V, (2, 12))
    want = logits_of(theirs.float(), tokens)
    with open_model(tmp_path) as opened, jax.default_matmul_precision("highest"):
        model = opened.load_whole(jax.devices()[0])
        got = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
    assert sum(name.endswith("_scale_inv") for name in tensors) >= 6
    assert np.max(np.abs(got - want)) <= 1e-5 * np.max(np.abs(want))
