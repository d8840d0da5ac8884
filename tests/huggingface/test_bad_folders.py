"""Folders that cannot be read are told in one line, before anything is written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mapped import RECIPE, write_folder, write_tensor_files

from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config
from jshard.system.errors import UserError
from tiny_runs import RECIPE as UNMAPPED
from tiny_runs import expect_one_line


def change(file: str, **changes: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | changes))

    return apply


def remove(pattern: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        for file in folder.glob(pattern):
            file.unlink()

    return apply


def truncate(folder: Path) -> None:
    file = folder / "model-00002-of-00004.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def other_tensors(folder: Path) -> None:
    remove("*.safetensors*")(folder)
    tensors = write_folder(folder / "inner")
    shutil.rmtree(folder / "inner")
    for i in range(2):
        del tensors[f"layers.{i}.up.bias"]
    tensors["lm_head.bias"] = np.zeros(16, np.float32)
    tensors["norm.weight"] = np.zeros(9, np.float32)
    write_tensor_files(folder, tensors, 10**6)


def gptq(folder: Path) -> None:
    remove("*.safetensors*")(folder)
    tensors = {"layers.0.up.qweight": np.zeros((3, 8), np.int32)}
    write_tensor_files(folder, tensors, 10**6)


def pickled(folder: Path) -> None:
    remove("*.safetensors*")(folder)
    (folder / "pytorch_model.bin").touch()


BAD = {
    "no config": (remove("config.json"), "hf has no config.json: a Hugging Face"),
    "damaged config": (
        lambda folder: (folder / "config.json").write_text("{"),
        "config.json: it is not JSON",
    ),
    "unknown architecture": (
        change("config.json", architectures=["XForCausalLM"]),
        "XForCausalLM is not supported; TinyForCausalLM is",
    ),
    "incomplete config": (
        lambda folder: (folder / "config.json").write_text(
            '{"architectures": ["TinyForCausalLM"]}'
        ),
        "config.json is not complete: KeyError('num_layers')",
    ),
    "quantised config": (
        change("config.json", quantization_config={"quant_method": "gptq"}),
        "is quantised (gptq in config.json): give the folder of the unquantised model, "
        "or one in bitsandbytes' nf4 or fp4, in MXFP4 (gpt-oss), or in FP8 by blocks",
    ),
    "quantised tensors": (gptq, "is quantised (GPTQ or AWQ: layers.0.up.qweight)"),
    "a missing shard": (
        remove("model-00002*"),
        "model-00002-of-00004.safetensors: it does not exist",
    ),
    "a truncated shard": (truncate, "cannot read {hf}/model-00002-of-00004.safeten"),
    "no shards": (remove("*.safetensors*"), "there is no {hf}/model.safetensors and"),
    "pickles": (pickled, "holds pytorch_model.bin"),
    "other tensors": (
        other_tensors,
        "{hf} is of another model: layers.0.up.bias is missing; layers.1.up.bias is "
        "missing; lm_head.bias is not in the model; norm.weight has shape [9], not [8]",
    ),
}


@pytest.mark.quick(
    *("no config", "damaged config", "unknown architecture", "incomplete config"),
    *("quantised config", "a truncated shard", "pickles", "other tensors"),
)
@pytest.mark.parametrize("case", list(BAD))
def test_a_folder_that_cannot_be_read(case, train_here, tmp_path):
    hf = tmp_path / "hf"
    write_folder(hf)
    damage, said = BAD[case]
    damage(hf)
    words = [f"--config.{key}={hf}" for key in ("model.from", "checkpoint.restore")]
    words += ["--config=tiny.py", "--workdir=run"]
    run = train_here(tmp_path, *words, recipe=RECIPE)
    expect_one_line(run, 2, said.replace("{hf}", str(hf)))
    assert not (tmp_path / "run").exists()


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


# By default test_config_types.py has all values of all keys, below the command line.
@pytest.mark.quick(
    *("vocab_size", "rope_theta-x", "rms_norm_eps-{}", "tie_word_embeddings-[1]")
)
@pytest.mark.parametrize(
    "value", ["x", [], [1], {}, {"a": 1}, 10**400], ids=lambda x: str(x)[:9]
)
@pytest.mark.parametrize("key", list(LLAMA)[1:])
def test_a_value_of_another_type_is_one_line(key, value, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {key: value}))
    with (
        open_recipe(find_recipe("llama.py:3-8b")) as recipe,
        pytest.raises(UserError, match=r"config\.json|model\.") as refused,
    ):
        make_config(recipe, {"model.from": str(tmp_path)})
    assert "\n" not in str(refused.value)


def test_a_model_that_differs_from_the_folders(train_here, tmp_path):
    write_folder(tmp_path / "hf", sizes={"layers": 3, "width": 8, "experts": 2})
    run = train_here(
        tmp_path, "--config=tiny.py", "--config.checkpoint.restore=hf", recipe=RECIPE
    )
    expect_one_line(
        run,
        2,
        "hf/config.json is of another model: layers is 3 there and 2 here; eps is "
        "1e-06 there and 1e-05 here: --config.model.from=hf takes the model from there",
    )
    # What the command line says wins, as far as the tensors let it.
    words = ["--config.model.from=hf", "--config.checkpoint.restore=hf"]
    run = train_here(
        tmp_path, "--config=tiny.py", *words, "--config.model.width=16", recipe=RECIPE
    )
    expect_one_line(run, 2, "layers.0.experts.0.weight has shape [8, 24], not [16, 48]")
    assert "and 7 more" in run.stderr


@pytest.mark.quick("model.from")
@pytest.mark.parametrize("key", ["model.from", "checkpoint.restore"])
def test_a_recipe_without_a_map(key, train_here, tmp_path):
    write_folder(tmp_path / "hf")
    words = ("--config=tiny.py", f"--config.{key}=hf")
    run = train_here(tmp_path, *words, recipe=UNMAPPED)
    expect_one_line(run, 2, "recipe tiny has no map of Hugging Face's names")


def test_a_map_that_is_none(train_here, tmp_path):
    for change, said in (
        (
            ("huggingface = types.SimpleNamespace(", "huggingface = dict("),
            "read_config(",
        ),
        (("def tensors(model):", "def tensors():"), "tensors(model)"),
    ):
        run = train_here(tmp_path, "--config=tiny.py", recipe=RECIPE.replace(*change))
        expect_one_line(run, 2, "huggingface in recipe")
        assert said in run.stderr
