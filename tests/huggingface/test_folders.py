"""Folders like Hugging Face's, in and out: any layout of arrays, bytes unchanged."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mapped import RECIPE, shapes, write_folder, write_tensor_files

from checkpoints import read_parameters
from exports import load_all
from filled import filled
from jshard.export import export
from jshard.recipe.build import make_job, make_mesh
from jshard.recipe.configured import configure
from jshard.recipe.load import open_recipe
from jshard.recipe.make_config import make_config
from jshard.recipe.model_map import find_map
from jshard.storage.checkpoint.checkpointer import Checkpointer
from jshard.storage.hub.parameters import find_parameters
from jshard.system.errors import UserError


def imported(folder: Path, recipe_file: Path, **given: Any):
    """The state that a run starts with, and its config."""
    overrides = {"model.from": folder, **given}
    with open_recipe(recipe_file) as recipe:
        config = make_config(recipe, overrides)
        configured = configure(recipe, config)
        job = make_job(configured, make_mesh(configured.settings.mesh))
        places = find_map(config, recipe.huggingface, recipe.name, folder)
        source = find_parameters(folder, job.abstract_state(), tensors=places)
        model = filled(lambda: job.make_model(nnx.Rngs(1)))
        state = job.fsdp.from_model(model, job.optimizer)
        return read_parameters(source, state), config


def test_a_layer_that_predicts_further_tokens_is_passed_over(tmp_path):
    (tmp_path / "tiny.py").write_text(RECIPE)
    folder = tmp_path / "hf"
    tensors = write_folder(folder)
    tensors["layers.2.up.weight"] = np.zeros((4, 8), np.float32)

    def read() -> None:
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        write_tensor_files(folder, tensors, 10**6)
        imported(folder, tmp_path / "tiny.py")

    with pytest.raises(UserError, match=r"layers\.2\.up\.weight is not in the model"):
        read()
    tensors["layers.2.eh_proj.weight"] = np.zeros((4, 8), np.float32)  # as DeepSeek's
    read()


@pytest.mark.quick("2")
@pytest.mark.parametrize("replica", [1, 2])
def test_every_tensor_arrives_where_the_map_says(replica, tmp_path):
    (tmp_path / "tiny.py").write_text(RECIPE)
    want = write_folder(tmp_path / "hf", sizes={"layers": 3, "width": 16, "experts": 4})
    state, config = imported(
        tmp_path / "hf", tmp_path / "tiny.py", **{"mesh.replica": replica}
    )
    assert (config.model.layers, config.model.width) == (3, 16)
    assert config.model.eps == 1e-6
    params: Any = state.params
    for i in range(3):
        np.testing.assert_array_equal(
            params["blocks"]["linear"]["kernel"].get_value()[i],
            want[f"layers.{i}.up.weight"].T,
        )
        for e in range(4):
            np.testing.assert_array_equal(
                params["blocks"]["experts"].get_value()[i, e],
                want[f"layers.{i}.experts.{e}.weight"].T,
            )
    np.testing.assert_array_equal(
        params["head"]["kernel"].get_value(), want["lm_head.weight"].T
    )
    np.testing.assert_array_equal(
        params["embed"]["embedding"].get_value(), want["embed.weight"]
    )


@pytest.mark.quick("bfloat16-float32-2000")
@pytest.mark.parametrize("shard_bytes", [10**9, 2000])
@pytest.mark.parametrize(
    ("stored", "param"),
    [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")],
)
def test_a_round_trip_keeps_every_byte(stored, param, shard_bytes, tmp_path):
    (tmp_path / "tiny.py").write_text(RECIPE)
    want = write_folder(tmp_path / "hf", stored, shard_bytes)
    state, config = imported(
        tmp_path / "hf", tmp_path / "tiny.py", **{"policy.precision.param": param}
    )
    with Checkpointer(tmp_path / "run" / "checkpoints") as checkpointer:
        checkpointer.save(state, config={"recipe": "tiny"} | config.to_dict())
    export(
        tmp_path / "run",
        tmp_path / "out",
        format="huggingface",
        recipe=str(tmp_path / "tiny.py"),
        dtype=stored if stored != param else None,
        shard_bytes=shard_bytes,
    )
    got = load_all(tmp_path / "out")
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].dtype == array.dtype
        assert got[name].tobytes() == array.tobytes()
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["dtype"] == content["torch_dtype"] == stored
    assert content["hidden_size"] == 8
    assert content["eos_token_id"] == 7
    several = shard_bytes == 2000
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == several
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names >= {"config.json", "tokenizer.json", "generation_config.json"}
    assert "description.json" not in names
    # And in again.
    again, _ = imported(tmp_path / "out", tmp_path / "tiny.py")
    for a, b in zip(
        jax.tree.leaves(again.params), jax.tree.leaves(state.params), strict=True
    ):
        np.testing.assert_array_equal(a, b.astype(jnp.float32))


def test_the_shapes_are_those_of_the_recipe(tmp_path):
    assert set(shapes()) == set(write_folder(tmp_path / "hf"))
