"""Every key of config.json is read as transformers reads it, or refused by name."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from drawn_configs import FAMILIES, INERT
from drawn_logits import check_same
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_transformers import MARKS

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit"),
]

# What transformers reads null as, and we read, too.
NULLS = {
    "Llama": {"num_key_value_heads", "head_dim", "rope_scaling", "rope_parameters"},
    "Mistral": {"sliding_window", "head_dim", "rope_scaling"},
    "Qwen2": {"num_key_value_heads", "sliding_window", "layer_types"},
    "Qwen3": {"num_key_value_heads", "sliding_window", "layer_types"},
    "Gemma2": {"attn_logit_softcapping", "final_logit_softcapping", "layer_types"},
    "Gemma3": {"attn_logit_softcapping", "final_logit_softcapping", "layer_types"},
    "Phi3": {"num_key_value_heads", "sliding_window", "rope_scaling"},
    "GptOss": {"layer_types", "rope_parameters"},
    "DeepseekV3": {"q_lora_rank", "rope_scaling", "rope_parameters"},
    "Glm4Moe": {"rope_scaling", "rope_parameters"},
    "Olmo2": {"num_key_value_heads", "rope_scaling", "rope_parameters"},
    "Olmo3": {"num_key_value_heads", "layer_types", "rope_scaling"},
    "Mixtral": {"sliding_window", "head_dim", "rope_scaling", "rope_parameters"},
    "Qwen3Moe": {"sliding_window", "mlp_only_layers", "rope_scaling"},
    "GPT2": {"n_inner"},
    "Bert": {"pad_token_id"},
    "T5": {"num_decoder_layers", "tie_word_embeddings"},
    "ViT": {"pooler_output_size", "id2label"},
    "RegNet": {"id2label"},
    "ResNet": {"id2label", "out_features", "out_indices"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_null_of_each_key_is_what_transformers_takes_it_for(
    transformers5, family, tmp_path
):
    drawn = FAMILIES[family]
    found = {
        key: check_same(family, {key: None}, tmp_path / key)
        for key in {**drawn.base, **drawn.values}
    }
    same = {key for key, result in found.items() if result == "same"}
    assert same >= NULLS[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_value_alone_is_what_transformers_takes_it_for(
    transformers5, family, tmp_path
):
    results = set()
    for key, values in FAMILIES[family].values.items():
        for i, value in enumerate(values):
            results.add(check_same(family, {key: value}, tmp_path / f"{key}{i}"))
    assert "same" in results


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_together_are_what_transformers_takes_them_for(transformers5, family):
    values = {
        key: some if key in INERT else [None, *some]
        for key, some in FAMILIES[family].values.items()
    }
    of_key = {key: st.sampled_from(some) for key, some in values.items()}
    keys = st.lists(st.sampled_from(sorted(values)), max_size=5, unique=True)

    def chosen(keys: list[str]) -> Any:
        return st.fixed_dictionaries({key: of_key[key] for key in keys})

    @settings(max_examples=10, deadline=None)
    @given(
        keys.flatmap(lambda keys: st.fixed_dictionaries({k: of_key[k] for k in keys}))
    )
    def check(changes: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            check_same(family, changes, Path(folder) / "model")

    check()
