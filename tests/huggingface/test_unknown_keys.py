"""Keys of config.json that no map knows, and names of older releases."""

import json
import re
from typing import Any

import numpy as np
import pytest
from decoder_recipe import RECIPE
from safetensors.numpy import save_file

import jshard
from jshard.models import (
    bert_huggingface,
    gpt_huggingface,
    llama_huggingface,
    t5_huggingface,
)
from jshard.recipe.load import open_recipe
from jshard.recipe.make_config import make_config
from jshard.storage.hub.safetensors_file import find_tensors

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
HEADS = {"num_key_value_heads": 2}
LLAMA = {"architectures": ["LlamaForCausalLM"], **SIZES}


def read(**changes: Any) -> dict[str, Any]:
    return llama_huggingface.read_config(LLAMA | changes)


def test_what_is_off_or_bookkeeping_changes_nothing(capsys):
    plain = read()
    known = {"is_llama_config": True, "use_mrope": False, "rope_interleaved": False}
    assert read(**known, **{"transformers.js_config": {"dtype": "q4"}}) == plain
    assert capsys.readouterr().err == ""
    off = {"new_norm": False, "new_rope": None, "new_list": [], "new_name": ""}
    scaling = {"type": "linear", "factor": 2.0, "new_part": None}
    assert read(**off, rope_scaling=scaling)["rope_factor"] == 2
    told = capsys.readouterr().err
    assert "are off (false, null or empty): new_list, new_name, new_norm, new_r" in told
    assert "(false, null or empty): rope_scaling.new_part\n" in told
    for key, value in (("new_norm", True), ("new_norm", 0), ("use_mrope", True)):
        with pytest.raises(jshard.UserError, match=f"{key}=.* is not supported"):
            read(**{key: value})


def test_the_command_line_says_which_unknown_keys_change_nothing(tmp_path):
    scaling = {"type": "linear", "factor": 2.0, "alpha": 1}
    changes = {"new_norm": 1, "new_rope": "x", "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    (tmp_path / "tiny.py").write_text(RECIPE)
    known: list[str] = []
    with open_recipe(tmp_path / "tiny.py") as recipe:
        for key in ("rope_scaling.alpha", "new_norm", "new_rope"):
            given = {"model.from": str(tmp_path), "model.ignore": ",".join(known)}
            known.append(key)
            said = re.escape(f" set --config.model.ignore={','.join(known)}, or ")
            advice = f"does not know this key;.*{said}"
            with pytest.raises(jshard.UserError, match=advice):
                make_config(recipe, given)
        given["model.ignore"] = f"{', '.join(known)},rms_norm_eps"
        config = make_config(recipe, given)
        assert config.model.rope_factor == 2
        assert config.model.norm_eps == 1e-6  # a key that is known is read
        assert recipe.make_model is not None


@pytest.mark.parametrize(
    ("mapped", "said", "written"),
    [
        (llama_huggingface, {"architectures": ["LLaMAForCausalLM"]}, "Llama"),
        (llama_huggingface, {"model_type": "qwen3", **HEADS}, "Qwen3"),
        (llama_huggingface, {"architectures": ["MistralModel"], **HEADS}, "Mistral"),
        (gpt_huggingface, {"model_type": "gpt2"}, "GPT2"),
        (t5_huggingface, {"architectures": ["T5WithLMHeadModel"]}, "T5"),
        (bert_huggingface, {"model_type": "bert", "architectures": []}, "Bert"),
    ],
)
def test_architectures_may_be_missing_or_of_older_releases(mapped, said, written):
    sizes = SIZES if mapped in (llama_huggingface, bert_huggingface) else {}
    model = mapped.read_config({**sizes, **said})
    assert mapped.write_config(model)["architectures"][0].startswith(written)
    with pytest.raises(jshard.UserError, match="architecture none is not supported"):
        mapped.read_config(sizes)


def test_tensors_may_lack_the_prefix_of_the_model():
    places = llama_huggingface.tensors(read())
    for ours, theirs in (
        ("embed.embedding", "embed_tokens.weight"),
        ("norm.scale", "norm.weight"),
        ("blocks.1.attention.q.kernel", "layers.1.self_attn.q_proj.weight"),
    ):
        for name in (f"model.{theirs}", theirs):
            assert places[ours].named_as_in({name}).names == (name,)


def test_weights_that_are_pointers_of_git_lfs_are_one_line(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(2, np.float32)}, file)
    assert "a" in find_tensors(tmp_path)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(jshard.UserError, match="run git lfs pull in its folder"):
        find_tensors(tmp_path)
