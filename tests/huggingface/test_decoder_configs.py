"""config.json of the decoders, read and written without transformers."""

import json
from typing import Any

import pytest
from decoder_recipe import RECIPE

import jshard
from jshard.models import gpt_huggingface, llama_huggingface
from jshard.models.llama import LlamaConfig
from jshard.recipe.load import open_recipe
from jshard.recipe.make_config import make_config, read_keys

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
PHI3 = {"architectures": ["Phi3ForCausalLM"]}
SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def read(**changes: Any) -> dict[str, Any]:
    return llama_huggingface.read_config(LLAMA | changes)


def test_both_spellings_of_rotary_positions_mean_the_same():
    length = {"original_max_position_embeddings": 32}
    old = read(rope_theta=5e5, rope_scaling={"type": "llama3", **SCALED, **length})
    parameters = {"rope_theta": 5e5, "rope_type": "llama3", **SCALED, **length}
    assert read(rope_parameters=parameters) == old
    assert (old["rope_theta"], old["rope_factor"], old["rope_length"]) == (5e5, 8, 32)
    written = llama_huggingface.write_config(old)
    assert written["rope_parameters"] == parameters
    assert written["rope_theta"] == 5e5
    assert written["rope_scaling"] == {"rope_type": "llama3", **SCALED, **length}


def test_gemma_3_has_a_theta_for_each_kind_of_layer():
    gemma = {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 27}
    model = read(**gemma, sliding_window=512)
    assert (model["rope_theta"], model["sliding_theta"]) == (1e6, 1e4)
    assert (model["pattern"], model["window"], model["tied"]) == ("sssssf", 512, True)
    config = LlamaConfig(**model)
    full = [i for i, sliding in enumerate(config.sliding_layers) if not sliding]
    assert full == [5, 11, 17, 23]
    written = llama_huggingface.write_config(model)
    assert written["rope_parameters"]["full_attention"]["rope_theta"] == 1e6
    assert written["rope_local_base_freq"] == 1e4
    assert written["layer_types"].count("full_attention") == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM is not supported"),
        ({"architectures": None}, "architecture none is not supported; those are Llam"),
        ({"hidden_size": None}, "hidden_size=null of LlamaForCausalLM is not suppor"),
        ({"hidden_act": "relu"}, "hidden_act='relu' of .* it must be 'silu' or 'gelu"),
        ({"mlp_bias": True}, "mlp_bias=true of LlamaForCausalLM is not supported"),
        ({"rope_theta": "x"}, "rope_theta='x' of LlamaForCausalLM .* a number above 0"),
        ({"new_norm": 1}, "new_norm=1 of LlamaFor.* jshard does not know this key"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "alpha": 1}},
            "rope_scaling.alpha=1 of LlamaForCausalLM .* does not know this key",
        ),
        ({"\x1b[2J": 1}, r"'\\x1b\[2J'=1 of LlamaFor.* does not know this key"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} of"),
        (
            {"rope_scaling": {"type": "dynamic"}},
            "rope_scaling.type='dynamic' of .* it must be 'default' or 'linear' or",
        ),
        (
            {
                **PHI3,
                "rope_scaling": {"type": "longrope"},
            },
            "rope_scaling.type='longrope' of .*: it must be 'default'$",
        ),
        ({"partial_rotary_factor": 0.75}, "partial_rotary_factor=0.75 of LlamaFor"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor=0.5 of",
        ),
        ({"rope_scaling": {"type": "linear"}}, "Llama.* needs the key 'rope_scaling.f"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 2},
            "decoder_sparse_step=2 of Qwen3MoeForCausalLM is not supported",
        ),
    ],
)
def test_what_is_not_there_is_a_users_error(changes, message):
    with pytest.raises(jshard.UserError, match=message):
        read(**changes)


def test_null_soft_caps_are_none_and_gemma_3_has_none_of_attention():
    gemma2 = {"architectures": ["Gemma2ForCausalLM"]}
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    model = read(**gemma2)
    assert (model["attention_soft_cap"], model["logit_soft_cap"]) == (50, 30)
    model = read(**gemma2, **caps)
    assert (model["attention_soft_cap"], model["logit_soft_cap"]) == (0, 0)
    assert llama_huggingface.write_config(model).items() >= caps.items()
    model = read(architectures=["Gemma3ForCausalLM"], attn_logit_softcapping=5.0)
    assert model["attention_soft_cap"] == 0


def test_an_absent_key_has_the_familys_default_and_null_its_own_meaning():
    def heads(name: str, **changes: Any) -> int:
        sizes = {"num_attention_heads": 64, "hidden_size": 1024}
        return read(architectures=[name], **sizes, **changes)["num_kv_heads"]

    assert heads("Qwen2ForCausalLM") == 32
    assert heads("Qwen2ForCausalLM", num_key_value_heads=None) == 64
    assert heads("LlamaForCausalLM") == 64
    assert heads("MixtralForCausalLM") == 8
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert read(**mistral)["window"] == 4096
    assert read(**mistral, sliding_window=None)["pattern"] == "f"
    assert not read(**mistral, attention_bias=True)["qkv_bias"]
    yarn = {"rope_type": "yarn", "factor": 2.0}
    assert read(rope_scaling=yarn)["rope_length"] == 2048


def test_rope_scaling_wins_over_rope_parameters():
    linear = {"rope_type": "linear", "factor": 2.0}
    parameters = {"rope_type": "llama3", "rope_theta": 7.0, **SCALED}
    model = read(rope_scaling=linear, rope_parameters=parameters, rope_theta=9.0)
    assert (model["rope_scaling"], model["rope_theta"]) == ("linear", 9.0)


def test_a_model_that_no_architecture_has_cannot_be_written():
    model = read() | {"post_norms": True}
    with pytest.raises(
        jshard.UserError, match=r"LlamaForCausalLM cannot have model\.p"
    ):
        llama_huggingface.write_config(model)


def test_another_gelu_of_gpt_2_is_a_users_error():
    json = {"architectures": ["GPT2LMHeadModel"], "activation_function": "gelu"}
    with pytest.raises(jshard.UserError, match="activation_function='gelu' of GPT2"):
        gpt_huggingface.read_config(json)
    with pytest.raises(jshard.UserError, match="LlamaForCausalLM is not supported"):
        gpt_huggingface.read_config(LLAMA)


def test_the_command_line_sets_keys_that_only_the_folder_has(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "decoder.py").write_text(RECIPE)
    words = {"model.from": str(tmp_path), "model.sequence_length": "24"}
    with open_recipe(tmp_path / "decoder.py") as recipe:
        assert "sequence_length" not in recipe.get_config().model
        config = make_config(recipe, read_keys(recipe, words))
    assert config.model.sequence_length == 24
    assert config.model.width == LLAMA["hidden_size"]
