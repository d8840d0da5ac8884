"""From transformers through a run and back: the same losses, bytes and logits."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoder_recipe import python, train
from tiny_transformers import MARKS, V, random_decoder

from exports import load_all

os.environ["HF_HUB_OFFLINE"] = "1"
torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")
pytestmark = MARKS

T = 24
SIZES = {
    "num_hidden_layers": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS = {
    "Llama": ({"tie_word_embeddings": True}, "float32", 1),
    "Qwen2": ({}, "float32", 2),
    "Gemma3Text": ({"head_dim": 16, "sliding_window": 7}, "bfloat16", 2),
    "Mixtral": ({"num_local_experts": 4}, "float32", 1),
    "Qwen3": ({"head_dim": 16}, "bfloat16", 1),
    "Phi3": ({}, "bfloat16", 2),
}


def mean_loss(model: Any, rows: np.ndarray) -> float:
    with torch.no_grad():
        logits = model(torch.tensor(rows[:, :-1])).logits.float()
    targets = torch.tensor(rows[:, 1:]).reshape(-1)
    return float(torch.nn.functional.cross_entropy(logits.reshape(-1, V), targets))


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_what_a_run_read_from_it(name, tmp_path):
    options, dtype, replica = MODELS[name]
    model = random_decoder(f"{name}Config", **SIZES, **options)
    model.to(getattr(torch, dtype)).save_pretrained(
        tmp_path / "hf", max_shard_size="30KB"
    )
    # Anew: rotary frequencies lost digits with the weights.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32
    )
    rows = np.random.default_rng(0).integers(0, V, (8, T + 1))
    (loss,) = train(tmp_path, Path("hf"), rows, f"--config.mesh.replica={replica}")
    assert abs(loss - mean_loss(model, rows)) < 1e-5

    python(
        tmp_path,
        "jshard.export",
        "run",
        "--output=out",
        "--format=huggingface",
        "--max_shard_size=30KB",
        f"--dtype={dtype}",
    )
    want, got = load_all(tmp_path / "hf"), load_all(tmp_path / "out")
    assert got.keys() == want.keys()
    for tensor, array in want.items():
        assert got[tensor].dtype == array.dtype
        assert got[tensor].tobytes() == array.tobytes(), tensor
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    problems = {key: found for key, found in loading.items() if found}
    assert not problems
    tokens = torch.tensor(rows)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (content["bos_token_id"], content["eos_token_id"]) == (1, 2)
    assert content["dtype"] == dtype
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
