"""train/t5.py: texts with gaps, and runs from and to Hugging Face's folders."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jshard
from filled import filled
from foreign_weights import store
from jshard.data.tokenizers.tokenizer import ByteTokenizer
from jshard.models import t5_huggingface as huggingface
from jshard.models.t5 import T5, T5Config
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config
from jshard.recipes import t5

REPOSITORY = Path(__file__).parents[2]
KEYS = {"data.sequence_length": 40, "data.noise": 0.2}


@pytest.fixture(scope="module")
def recipe():
    with open_recipe(find_recipe("t5.py")) as recipe:
        yield recipe, t5


@pytest.mark.parametrize("length", [1, 2, 3, 17, 40])
def test_gaps_and_their_spans_make_the_text_again(recipe, length):
    opened, t5 = recipe
    corrupt = t5.Corruption(make_config(opened, KEYS))
    rng = np.random.default_rng(length)
    text = rng.integers(97, 123, length).astype(np.int32)
    missing, spans = corrupt.count(length)
    example: dict[str, Any] = corrupt(text, rng)
    inputs = example["inputs"][example["mask"]]
    targets = example["targets"][example["weights"] > 0]
    assert len(inputs) == length - missing + spans
    assert len(targets) == missing + spans + 1
    filled = corrupt.filled(inputs, example["targets"], ByteTokenizer())
    if length > 1:
        letters = filled.replace("[", "").replace("]", "")
        assert letters == bytes(text.tolist()).decode()
        assert filled.count("[") == spans
    assert {len(example["inputs"]), len(example["mask"])} == {corrupt.inputs}


def test_an_epoch_has_other_gaps_and_validation_the_same(recipe, tmp_path):
    opened, _ = recipe
    (tmp_path / "text.txt").write_text("to be, or not to be: that is it. " * 20)
    keys = {**KEYS, "data.path": tmp_path / "text.txt", "data.validation_fraction": 0.2}
    config = make_config(opened, keys)
    train = opened.make_data(config, "train")
    epoch = [train[i]["inputs"].tolist() for i in range(40)]
    assert len(set(map(tuple, epoch))) > 30
    held_out = [opened.make_data(config, "validation")[0] for _ in range(2)]
    np.testing.assert_array_equal(held_out[0]["inputs"], held_out[1]["inputs"])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model.vocab_size": 3}, "needs 4 sentinels, tokens -1 to 2"),
        ({"data.first_sentinel": 500}, r"and model\.vocab_size is 384"),
        ({"model.vocab_size": 256}, "one of the sentinels, tokens 252 to 255"),
    ],
)
def test_sentinels_that_do_not_fit_are_one_line(recipe, tmp_path, keys, message):
    opened, t5 = recipe
    config = make_config(opened, KEYS | keys)
    with pytest.raises(jshard.UserError, match=message):
        t5.Corruption(config)(np.asarray([255] * 9), np.random.default_rng(0))


def command(folder: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return run.stdout


@pytest.mark.slow
def test_a_run_from_a_folder_of_hugging_face_and_back(tmp_path):
    model = vars(
        T5Config(
            vocab_size=300,
            num_layers=2,
            num_decoder_layers=1,
            num_heads=2,
            head_width=8,
            width=32,
            hidden=48,
            gated=True,
            tied=False,
        )
    )
    source = tmp_path / "source"
    source.mkdir()
    weights = store(
        filled(lambda: T5(T5Config(**model), rngs=nnx.Rngs(0))),
        huggingface.tensors(model),
    )
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text(json.dumps(huggingface.write_config(model)))
    (tmp_path / "text.txt").write_text(
        "to be, or not to be, that is the question: " * 99
    )
    printed = command(
        tmp_path,
        "jshard.train",
        "--config=t5.py",
        "--workdir=run",
        "--config.model.from=source",
        "--config.checkpoint.restore=source",
        "--config.data.path=text.txt",
        "--config.steps=2",
        "--config.eval_every=2",
        "--config.batch_size=8",
        "--config.policy.min_shard_elements=0",
        "--config.optimizer.learning_rate=1e-30",
        "--config.optimizer.weight_decay=0",
    )
    assert "unigram model" in printed
    assert "as it was written:" in printed
    export = ("jshard.export", "run", "--output=out", "--format=huggingface")
    command(tmp_path, *export)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == weights.keys()
    for name, want in weights.items():
        np.testing.assert_array_equal(exported[name], want, err_msg=name)
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert huggingface.read_config(content) == huggingface.read_config(
        json.loads((source / "config.json").read_text())
    )


@pytest.mark.slow
def test_the_recipe_learns_more_than_the_frequencies_of_targets(tmp_path):
    words = ("--config=t5.py", "--workdir=run", "--config.steps=100")
    printed = command(tmp_path, "jshard.train", *words)
    assert "as it was written:" in printed
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [row["eval_loss"] for row in map(json.loads, lines) if "eval_loss" in row]
    notes = json.loads((tmp_path / "run" / "notes.json").read_text())
    assert losses[-1] < notes["references"]["unigram model"] - 0.5
