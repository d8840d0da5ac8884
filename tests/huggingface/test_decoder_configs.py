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
            {"architectures": ["GptOssForCausalLM"], "swiglu_limit": 5.0},
            "swiglu_limit=5.0 of GptOssForCausalLM is not supported",
        ),
        (
            {"architectures": ["GptOssForCausalLM"]},
            "GptOssForCausalLM needs the key 'rope_scaling'",
        ),
        (
            {"architectures": ["Olmo3ForCausalLM"], "rope_theta": 1e4},
            "rope_theta=10000.0 of Olmo3.* set rope_parameters.sliding_attention.rope",
        ),
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


SLIDING = ["sliding_attention"]
# As on the Hub, less what every file has; gpt-oss's and DeepSeek's quantization aside.
OF_2026: dict[str, dict[str, Any]] = {
    "Olmo3ForCausalLM": {
        "layer_types": [*SLIDING * 3, "full_attention"] * 2,
        "max_position_embeddings": 65536,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "rope_theta": 500000,
        "sliding_window": 4096,
    },
    "GptOssForCausalLM": {
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "initial_context_length": 4096,
        "layer_types": [*SLIDING, "full_attention"] * 4,
        "num_experts_per_tok": 4,
        "num_local_experts": 32,
        "output_router_logits": False,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
    },
    "Glm4MoeForCausalLM": {
        "attention_bias": True,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "use_qk_norm": False,
    },
    "DeepseekV3ForCausalLM": {
        "attention_bias": False,
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
    },
}


@pytest.mark.parametrize("name", OF_2026)
def test_a_config_of_2026_is_read_and_written(name):
    sizes = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8}
    theirs = LLAMA | sizes | OF_2026[name] | {"architectures": [name]}
    model = llama_huggingface.read_config(theirs)
    config, written = LlamaConfig(**model), llama_huggingface.write_config(model)
    assert written["architectures"] == [name]
    assert llama_huggingface.read_config(written) == model
    if name == "Olmo3ForCausalLM":
        assert (model["pattern"], model["sliding_theta"]) == ("sssf", 5e5)
        assert config.rope.amplitude() == 1.2079441541679836
    if name == "GptOssForCausalLM":
        assert (model["pattern"], model["expert_limit"]) == ("sf", 7)
        assert not config.rope.truncate
    if name == "Glm4MoeForCausalLM":
        assert (config.R, config.H, model["qkv_bias"], model["out_bias"]) == (
            64,
            128,
            True,
            False,
        )
    if name == "DeepseekV3ForCausalLM":
        assert (config.H, config.R, config.rope.amplitude()) == (192, 64, 1)
        assert config.rope.temperature() == pytest.approx(1.3689, rel=1e-4)
        first = llama_huggingface.tensors(model)["blocks.0.experts.router.correction"]
        assert first.names == ("model.layers.3.mlp.gate.e_score_correction_bias",)


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
