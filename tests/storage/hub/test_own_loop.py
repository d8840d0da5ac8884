"""A folder of Hugging Face's in a loop of one's own."""

import json
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

import jshard
from jshard.models import llama_huggingface as huggingface
from jshard.models.llama import Llama, LlamaConfig
from jshard.recipe.source import init_from
from tiny_llama import make_llama

pytest.importorskip("tokenizers")


def test_a_state_starts_from_a_folder_with_adapters_as_they_are_made(tmp_path):
    folder = make_llama(tmp_path)
    content = json.loads((folder / "config.json").read_text())
    keys: dict[str, Any] = huggingface.read_config(content)

    def make(rngs: nnx.Rngs) -> nnx.Module:
        model = Llama(LlamaConfig(**keys), rngs=rngs)
        jshard.nn.add_lora(model, rank=2, alpha=4.0, targets=("down",), rngs=rngs)
        return model

    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(min_shard_elements=0))
    options: dict[str, Any] = {
        "tensors": huggingface.tensors(keys),
        "wrt": nnx.LoRAParam,
    }
    state = init_from(folder, fsdp, make, optax.adamw(1e-3), **options)
    files = load_file(folder / "model.safetensors")
    frozen: Any = fsdp.fetch(state.frozen)
    for i in range(2):
        want = files[f"model.layers.{i}.mlp.down_proj.weight"].T
        got = frozen["blocks"]["down"]["kernel"].get_value()[i]
        np.testing.assert_array_equal(got, want)
    params: Any = fsdp.fetch(state.params)
    adapter = params["blocks"]["down"]
    assert np.any(adapter["lora_a"].get_value())
    assert not np.any(adapter["lora_b"].get_value())

    keys = keys | {"width": 16, "head_width": 8}
    options["tensors"] = huggingface.tensors(keys)
    with pytest.raises(jshard.UserError, match=str(folder)):
        init_from(folder, fsdp, make, optax.adamw(1e-3), **options)
