"""gpt-oss's experts in MXFP4 against transformers, which decodes them on CPUs."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from tiny_transformers import MARKS, V, logits_of, random_decoder

from filled import filled
from foreign_weights import load, read_tensors
from jshard.models import llama_huggingface
from jshard.models.llama import Llama, LlamaConfig
from jshard.storage.hub.quantised.mxfp4 import Decoded
from jshard.storage.hub.safetensors_write import SINGLE, write_tensors

pytestmark = MARKS

SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4}


def test_logits_of_mxfp4_are_those_of_transformers(transformers, tmp_path):
    torch = pytest.importorskip("torch")
    random_decoder("GptOssConfig", **SIZES, head_dim=16).save_pretrained(tmp_path)
    rng, plain, packed = np.random.default_rng(0), {}, {}
    for name, array in read_tensors(tmp_path).items():
        plain[name] = packed[name] = array
        if name.endswith(("gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = array.shape
            shape = experts, outputs, inputs // 32
            codes = rng.integers(0, 256, (*shape, 16)).astype(np.uint8)
            scales = rng.integers(122, 126, shape).astype(np.uint8)
            plain[name] = Decoded(codes, scales)[:, :, :].astype(np.float32)
            del packed[name]
            packed |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    write_tensors(tmp_path / SINGLE, packed, "pt")
    config = json.loads((tmp_path / "config.json").read_text())
    keys = llama_huggingface.read_config(config)
    config["quantization_config"] = {"quant_method": "mxfp4", "dequantize": True}
    (tmp_path / "config.json").write_text(json.dumps(config))

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = rng.integers(0, V, (2, 12))
    want = logits_of(theirs.float(), tokens)
    model = filled(lambda: Llama(LlamaConfig(**keys), rngs=nnx.Rngs(0)))
    load(model, plain, llama_huggingface.tensors(keys))
    with jax.default_matmul_precision("highest"):
        got = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
    assert np.max(np.abs(got - want)) <= 1e-5 * np.max(np.abs(want))
