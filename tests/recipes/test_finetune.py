"""train/finetune.py: adapters by default, the model itself with rank 0."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jshard
from filled import filled
from foreign_weights import store
from jshard.export import export
from jshard.inference.trained.trained_model import open_model
from jshard.models import llama_huggingface as huggingface
from jshard.models.llama import Llama, LlamaConfig
from jshard.recipe.build import make_job, make_mesh
from jshard.recipe.configured import configure
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config
from jshard.storage.checkpoint import metadata
from jshard.storage.checkpoint.restore import find_step
from jshard.training.trainer import Trainer, fit_since
from tiny_runs import read_metrics

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
}
SIZES |= {"width": 32, "hidden": 48}
MODEL = LlamaConfig(**SIZES, sequence_length=64)
KEYS = {
    "steps": 4,
    "batch_size": 8,
    "log_every": 1,
    "eval_every": 0,
    "checkpoint.every": 4,
    "data.sequence_length": 16,
    "lora.rank": 2,
    "policy.precision.compute": "float32",
    "policy.min_shard_elements": 0,
    "sample.length": 0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Hugging Face folder with a tiny random Llama."""
    path, model = tmp_path_factory.mktemp("hf"), vars(MODEL)
    made = filled(lambda: Llama(MODEL, rngs=nnx.Rngs(0)), spread=0.02)
    weights = store(made, huggingface.tensors(model))
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(huggingface.write_config(model)))
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("to be, or not to be, that is the question: " * 100)
    return file


def config_of(recipe: Any, **keys: Any) -> Any:
    return make_config(recipe, KEYS | keys)


def train(workdir: Path, folder: Path, text: Path, **keys: Any) -> Path:
    keys = {
        "model.from": folder,
        "checkpoint.restore": folder,
        "data.path": text,
        "optimizer.learning_rate": 0.03,  # so that four steps show
    } | keys
    with open_recipe(find_recipe("finetune.py")) as recipe:
        given = config_of(recipe, **keys)
        trainer = Trainer(recipe, config=given, workdir=workdir)
        fit_since(trainer, keeps_state=False)
    return workdir


@pytest.fixture(scope="module")
def adapted(folder, text, tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("adapted") / "run", folder, text)


def losses(workdir: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(workdir) if "loss" in line]


@pytest.mark.slow  # by default, run/test_adapter_runs
def test_adapters_are_trained_saved_and_merged(adapted, folder, tmp_path, capsys):
    about = metadata.read(find_step(adapted))
    params = {n for n in about["arrays"] if n.startswith("params.")}
    layers = [f"attention.{x}" for x in ("q", "k", "v", "out")] + ["gate", "up", "down"]
    assert params == {f"params.blocks.{x}.lora_{y}" for x in layers for y in "ab"}
    assert not [name for name in about["arrays"] if name.startswith("frozen")]
    sums = about["frozen_from"]["bit_sums"].values()
    assert {text.split()[0] for text in sums} == {"bfloat16"}
    assert losses(adapted)[-1] < losses(adapted)[0]

    export(adapted, tmp_path / "own")
    said = capsys.readouterr().out
    assert f"without the frozen parameters, which are in {folder}: " in said
    export(adapted, tmp_path / "merged", format="huggingface", dtype="float32")
    got, base = (
        load_file(path / "model.safetensors") for path in (tmp_path / "merged", folder)
    )
    assert got.keys() == base.keys()
    changed = {name for name in got if not np.array_equal(got[name], base[name])}
    assert changed == {name for name in base if "_proj" in name}


@pytest.mark.slow
def test_a_base_in_4_bits_is_read_so_and_only_its_adapters_are_exported(
    folder, text, tmp_path
):
    keys = {"policy.precision.base": "nf4"}
    run = train(tmp_path / "run", folder, text, **keys)
    sums = metadata.read(find_step(run))["frozen_from"]["bit_sums"]
    in_bits = {name for name, text in sums.items() if text.startswith("uint8")}
    layers = [f"attention.{x}" for x in ("q", "k", "v", "out")] + ["gate", "up", "down"]
    assert in_bits == {f"frozen.blocks.{x}.kernel" for x in layers}
    assert losses(run)[-1] < losses(run)[0]
    train(run, folder, text, **keys, steps=6)  # reads the base again
    assert len(losses(run)) == 6
    export(run, tmp_path / "adapters", format="peft")
    assert len(load_file(tmp_path / "adapters" / "adapter_model.safetensors")) == 28
    with open_model(run) as trained:  # as jshard.generate does
        fsdp, state = trained.load(jax.devices()[:2])
    (kernel,) = {
        x.get_value().dtype.name
        for path, x in nnx.to_flat_state(state.frozen)
        if path[-2:] == ("down", "kernel")
    }
    assert kernel == "uint8"
    logits = fsdp.model(state)(np.arange(8)[None])
    assert np.all(np.isfinite(logits))


@pytest.mark.slow
def test_adapters_of_a_run_start_another(adapted, folder, text, tmp_path, capsys):
    export(adapted, tmp_path / "peft", format="peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)
    assert config["r"] == 2
    keys = {"checkpoint.adapters": tmp_path / "peft"}
    again = train(tmp_path / "run", folder, text, **keys)
    assert f"{folder} and {tmp_path / 'peft'}" in capsys.readouterr().out
    assert losses(again)[0] < losses(adapted)[0]
    with pytest.raises(jshard.UserError, match=r"lora\.rank=2 there"):
        train(tmp_path / "other", folder, text, **keys, **{"lora.rank": 3})
    with pytest.raises(jshard.UserError, match=r"the model has none: give lora\.rank"):
        train(tmp_path / "other", folder, text, **keys, **{"lora.rank": 0})


@pytest.mark.slow  # by default, hub/test_peft_files
def test_adapters_as_peft_says_them_are_trained_merged_and_start_another(
    folder, text, tmp_path
):
    keys = {
        "lora.targets": ["q_proj", "down_proj"],
        "lora.rank_pattern": ["down_proj:4"],
        "lora.alpha_pattern": ["q_proj:8"],
        "lora.layers_to_transform": [1],
    }
    run = train(tmp_path / "run", folder, text, **keys)
    assert losses(run)[-1] < losses(run)[0]
    export(run, tmp_path / "peft", format="peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert {config["r"], *config["rank_pattern"].values()} == {2, 4}
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert {name.split(".")[4] for name in tensors} == {"1"}
    assert len(tensors) == 4
    export(run, tmp_path / "merged", format="huggingface", dtype="float32")
    got, base = (
        load_file(path / "model.safetensors") for path in (tmp_path / "merged", folder)
    )
    changed = {name for name in got if not np.array_equal(got[name], base[name])}
    layer = "model.layers.1"
    assert changed == {
        f"{layer}.self_attn.q_proj.weight", f"{layer}.mlp.down_proj.weight"
    }  # fmt: skip
    again = keys | {"checkpoint.adapters": tmp_path / "peft"}
    assert losses(train(tmp_path / "next", folder, text, **again))[0] < losses(run)[0]
    other = again | {"lora.layers_to_transform": [0]}
    with pytest.raises(jshard.UserError, match=r"layers\.0\..* is missing"):
        train(tmp_path / "other", folder, text, **other)


def test_rank_0_trains_the_model_in_float32():
    with open_recipe(find_recipe("finetune.py")) as recipe:
        small = {f"model.{key}": value for key, value in SIZES.items()}
        for rank, rate in ((0, 1e-5), (2, 2e-4)):
            config = config_of(recipe, **small, **{"lora.rank": rank})
            assert recipe.learning_rate is not None
            schedule = recipe.learning_rate(config)
            assert max(float(schedule(step)) for step in range(5)) == pytest.approx(
                rate
            )
            configured = configure(recipe, config)
            mesh = make_mesh(configured.settings.mesh)
            state = make_job(configured, mesh).abstract_state()
            dtypes = {str(x.dtype) for _, x in nnx.to_flat_state(state.params)}
            assert dtypes == {"float32"}
            assert bool(nnx.to_flat_state(state.frozen)) == bool(rank)


def test_adapters_have_no_corrections_of_routers():
    experts = {"num_experts": 4, "sigmoid_router": True, "correction_rate": 0.1}
    keys = {f"model.{key}": value for key, value in (SIZES | experts).items()}
    with open_recipe(find_recipe("finetune.py")) as recipe:
        configured = configure(recipe, config_of(recipe, **keys))
        mesh = make_mesh(configured.settings.mesh)
        with pytest.raises(jshard.UserError, match=r"model\.correction_rate changes"):
            make_job(configured, mesh).abstract_state()


def test_targets_that_are_not_there_are_a_users_error(folder, text, tmp_path):
    with pytest.raises(jshard.UserError, match="target 'query' matches no layer"):
        train(tmp_path / "run", folder, text, **{"lora.targets": ["query"]})


def test_neftune_changes_the_logits_in_training_alone():
    small = {f"model.{key}": value for key, value in SIZES.items()}
    small |= {"model.num_layers": 1, "model.neftune_alpha": 5.0, "lora.rank": 0}
    with open_recipe(find_recipe("finetune.py")) as recipe:
        model = recipe.make_model(config_of(recipe, **small), nnx.Rngs(0))
    call = nnx.jit(lambda model: model(np.arange(8)[None]))
    one, two = call(model), call(model)
    model.eval()
    plain, again = call(model), call(model)
    np.testing.assert_array_equal(plain, again)
    assert not any(np.allclose(x, y) for x, y in ((plain, one), (one, two)))
    read = huggingface.read_config(huggingface.write_config(vars(MODEL)))
    assert "neftune_alpha" not in read  # which a folder does not decide
