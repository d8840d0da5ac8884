"""A value of a wrong type in any config.json is one error that names its key."""

import json
from typing import Any

import pytest
from drawn_configs import FAMILIES, config_json
from drawn_logits import read

import jshard

WRONG = ["x", "", -1, 0, 1.5, 2**40, 10**40, float("nan"), float("inf"), True, False]
WRONG += [None, [], ["x"], [-1], [[1]], {}, {"x": 1}, {"rope_type": ["x"]}]


@pytest.mark.quick("Llama", "GptOss", "Gemma3", "DeepseekV3", "T5", "Bert")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_value_is_an_error_that_names_its_key(family):
    drawn = FAMILIES[family]
    keys = {**drawn.base, **drawn.values, "architectures": 0, "num_labels": 0}
    refused = 0
    for key in [*keys, "id2label", "quantization_config", "per_layer_config"]:
        for value in WRONG:
            try:
                keys = read(family, config_json(family, {key: value}))
            except jshard.UserError as error:
                lines = str(error).splitlines()
                assert len(lines) == 1, lines
                refused += key in lines[0] or "architecture" in lines[0]
                continue
            json.dumps(keys, allow_nan=False)  # numbers, and of our own types
    assert refused > len(drawn.base) * len(WRONG) / 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_size_is_never_what_is_not_a_number(family):
    for key, value in FAMILIES[family].base.items():
        if type(value) is not int:
            continue
        for wrong in ("x", -1, 1.5, True, [], {}):
            content: dict[str, Any] = config_json(family, {key: wrong})
            if key in ("pad_token_id", "bos_token_id", "eos_token_id"):
                read(family, content)
                continue
            with pytest.raises(jshard.UserError, match=key):
                read(family, content)


@pytest.mark.parametrize("family", ["Gemma2", "Gemma3"])
def test_the_activation_of_a_gemma_is_that_of_its_config(family):
    for theirs, ours in {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}.items():
        config = config_json(family, {"hidden_activation": theirs})
        assert read(family, config)["activation"] == ours
    assert read(family, config_json(family, {}))["activation"] == "gelu_tanh"
