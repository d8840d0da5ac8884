"""Which of several weights in a folder are the model's, as transformers 5 decides."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import optax
import pytest

import jshard
from jshard.models import (
    bert_huggingface,
    gpt_huggingface,
    llama_huggingface,
    t5_huggingface,
)
from jshard.models.gpt import GPT, GPTConfig
from jshard.recipe.model_map import read_architecture
from jshard.storage.hub.parameters import find_parameters
from jshard.storage.hub.safetensors_file import find_tensors, weight_files
from jshard.storage.hub.safetensors_write import INDEX, SINGLE, write_tensors
from jshard.storage.hub.tied_heads import other_head
from jshard.system.errors import UserError

MODEL: dict[str, Any] = {
    "vocab_size": 8, "sequence_length": 4, "num_layers": 1, "num_heads": 1, "width": 2,
}  # fmt: skip
TABLE = np.arange(16, dtype=np.float32).reshape(8, 2)


def write(folder: Path, tensors: dict[str, np.ndarray], name: str = SINGLE) -> None:
    folder.mkdir(exist_ok=True)
    write_tensors(folder / name, tensors, "pt")


def test_a_model_saved_over_one_in_several_files_is_the_one_that_is_read(tmp_path):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "base.safetensors"}}))
    write(tmp_path, {"a": np.zeros(2)}, "base.safetensors")
    assert find_tensors(tmp_path)["a"].open().tolist() == [0, 0]
    write(tmp_path, {"a": np.ones(2)})
    with pytest.warns(UserWarning, match=rf"{SINGLE}, which is read, and .* not$"):
        assert find_tensors(tmp_path)["a"].open().tolist() == [1, 1]
    # An index of the single file says nothing else.
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": SINGLE}}))
    assert weight_files(tmp_path) == [SINGLE]


@pytest.mark.parametrize(
    ("module", "embedding", "head"),
    [
        (llama_huggingface, "model.embed_tokens.weight", "lm_head.weight"),
        (gpt_huggingface, "wte.weight", "lm_head.weight"),
        (t5_huggingface, "shared.weight", "lm_head.weight"),
        (
            bert_huggingface,
            "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.weight",
        ),
    ],
    ids=lambda x: x.__name__.split(".")[-1] if isinstance(x, ModuleType) else "",
)
def test_a_head_beside_a_tied_embedding_is_compared_with_it(
    tmp_path, module, embedding, head
):
    sizes: dict[str, Any] = {
        "llama_huggingface": {"tied": True, "num_kv_heads": 1},
        "gpt_huggingface": {"tied": True},
        "t5_huggingface": {"num_decoder_layers": 1, "gated": False, "tied": True},
        "bert_huggingface": {},
    }[module.__name__.split(".")[-1]]
    tensors = module.tensors({**MODEL, **sizes})
    write(tmp_path, {embedding: TABLE})
    assert other_head(tmp_path, tensors) == ""
    write(tmp_path, {embedding: TABLE, head: TABLE.astype(np.float16)})
    assert other_head(tmp_path, tensors) == ""
    last = TABLE.copy()
    last[-1, -1] += 1
    for other in (last, TABLE[:-1]):
        write(tmp_path, {embedding: TABLE, head: other})
        assert other_head(tmp_path, tensors) == head


def test_the_bias_of_berts_decoder_is_compared_too(tmp_path):
    tensors = bert_huggingface.tensors(MODEL)
    bias = {"cls.predictions.bias": np.ones(8)}
    write(tmp_path, bias | {"cls.predictions.decoder.bias": np.ones(8)})
    assert other_head(tmp_path, tensors) == ""
    write(tmp_path, bias | {"cls.predictions.decoder.bias": np.zeros(8)})
    assert other_head(tmp_path, tensors) == "cls.predictions.decoder.bias"


def test_a_config_that_ties_another_head_is_untied_or_the_tensor_is_named(tmp_path):
    write_config = gpt_huggingface.write_config(MODEL | {"tied": True})
    (tmp_path / "config.json").write_text(json.dumps(write_config))
    places = gpt_huggingface.tensors(MODEL | {"tied": True})
    config = GPTConfig(**MODEL)
    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(min_shard_elements=0))
    state = fsdp.abstract_state(lambda rngs: GPT(config, rngs=rngs), optax.identity())
    shapes = {"wte": (8, 2), "wpe": (4, 2), "h.0.attn.c_attn": (2, 6)}
    shapes |= {"h.0.attn.c_proj": (2, 2), "h.0.mlp.c_fc": (2, 8)}
    shapes |= {"h.0.mlp.c_proj": (8, 2), **dict.fromkeys(["ln_f", "h.0.ln_1"], (2,))}
    shapes["h.0.ln_2"] = (2,)
    weights = {f"{name}.weight": np.ones(x, np.float32) for name, x in shapes.items()}
    weights |= {
        f"{name}.bias": np.ones(x[-1:], np.float32)
        for name, x in shapes.items()
        if name[0] != "w"
    }
    write(tmp_path, {**weights, "lm_head.weight": weights["wte.weight"]})
    assert read_architecture(tmp_path, gpt_huggingface)["tied"]
    find_parameters(tmp_path, state, tensors=places)
    write(tmp_path, {**weights, "lm_head.weight": np.zeros((8, 2), np.float32)})
    with pytest.warns(UserWarning, match=r"lm_head\.weight has other values: it is no"):
        assert not read_architecture(tmp_path, gpt_huggingface)["tied"]
    with pytest.raises(UserError, match=r"lm_head\.weight is not the embedding, to wh"):
        find_parameters(tmp_path, state, tensors=places)
