"""Modules that are trained whole beside adapters, and PEFT's files of them."""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jshard
from jshard.export import export
from jshard.models import llama_huggingface as huggingface
from jshard.recipe.build import make_job, make_mesh
from jshard.recipe.configured import configure
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config
from jshard.storage.checkpoint import metadata
from jshard.storage.hub import peft
from jshard.storage.hub.adapters import reading
from jshard.storage.hub.adapters.modules_to_save import trained_whole

SIZES: dict[str, Any] = {"vocab_size": 64, "num_layers": 2, "num_heads": 2}
SIZES |= {"num_kv_heads": 2, "width": 16, "hidden": 24, "sequence_length": 16}
BASE = huggingface.tensors(SIZES)
KEYS = {f"model.{key}": value for key, value in SIZES.items()}
KEYS |= {"lora.rank": 2, "policy.min_shard_elements": 0}
NORMS = {"blocks.norm1.scale", "blocks.norm2.scale", "norm.scale"}


def job_of(recipe: str = "finetune.py", **keys: Any) -> Any:
    """The job of a packaged recipe with keys of adapters, with an abstract state."""
    with open_recipe(find_recipe(recipe)) as opened:
        given = KEYS | {f"lora.{key}": value for key, value in keys.items()}
        configured = configure(opened, make_config(opened, given))
        mesh = make_mesh(configured.settings.mesh, jax.devices()[:2])
        job = make_job(configured, mesh)
        job.abstract_state()
        return job


def test_names_are_ends_of_modules_as_in_peft():
    of = functools.partial(trained_whole, base=BASE)
    assert of(["lm_head", "embed_tokens"]) == {"head.kernel", "embed.embedding"}
    assert of(["model.norm"]) == {"norm.scale"}
    assert of(["norm"]) == NORMS  # input_layernorm, too: PEFT asks for no point
    assert of(["mlp"]) == {f"blocks.{x}.kernel" for x in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["score"], "'score' is the end of no module's name .* there are embed_tokens"),
        (["layers.1.mlp.up_proj"], "the layers of blocks.up.kernel, which are one"),
    ],
)
def test_names_that_cannot_be_are_an_error_of_one_line(names, message):
    with pytest.raises(jshard.UserError, match=message) as error:
        trained_whole(names, BASE)
    assert "\n" not in str(error.value)


def test_experts_and_tied_tables_are_an_error_of_one_line():
    experts = huggingface.tensors(SIZES | {"num_experts": 2})
    with pytest.raises(jshard.UserError, match="files have no tensor for it alone"):
        trained_whole(["experts"], experts)
    with open_recipe(find_recipe("finetune.py")) as recipe:
        keys = {"model.tied": True, "lora.modules_to_save": ["embed_tokens"]}
        config = make_config(recipe, KEYS | keys)
        assert recipe.trainable is not None
        with pytest.raises(jshard.UserError, match="PEFT would train a copy: name n"):
            recipe.trainable(config)


def test_a_reference_is_not_the_model_that_is_trained():
    with pytest.raises(jshard.UserError, match=r"^lora.modules_to_save: the reference"):
        job_of("preference.py", modules_to_save=["lm_head"])


def test_they_are_trained_in_float32_and_written_and_read_as_peft_does(tmp_path):
    keys: dict[str, Any] = {"modules_to_save": ["lm_head", "up_proj"]}
    keys["targets"] = ["q_proj", "up_proj"]  # of which PEFT adapts the first alone
    job = job_of(**keys)
    state = job.initial_state()
    dtypes = {
        name: x.dtype.name
        for name, x in metadata.arrays_by_name(state).items()
        if name.startswith(("params.", "frozen."))
    }
    trained = {name for name in dtypes if name.startswith("params.")}
    whole = {"params.head.kernel", "params.blocks.up.kernel"}
    adapters = {f"params.blocks.attention.q.lora_{x}" for x in "ab"}
    assert trained == whole | adapters
    assert {dtypes[name] for name in trained} == {"float32"}
    assert {x for name, x in dtypes.items() if name not in trained} == {"bfloat16"}

    with jshard.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(state, config={"model": SIZES}, frozen_from=tmp_path)
    recipe = str(find_recipe("finetune.py"))
    export(tmp_path / "run", tmp_path / "peft", format="peft", recipe=recipe)
    written = json.loads((tmp_path / "peft" / peft.CONFIG).read_text())
    assert written["modules_to_save"] == ["lm_head", "up_proj"]
    assert written["target_modules"] == ["q_proj"]
    tensors = load_file(tmp_path / "peft" / peft.TENSORS)
    assert {x for x in tensors if "lora_" not in x} == {
        "base_model.model.lm_head.weight",
        *(f"base_model.model.model.layers.{i}.mlp.up_proj.weight" for i in (0, 1)),
    }

    other = dataclasses.replace(
        state, params=jax.tree.map(jnp.zeros_like, state.params)
    )
    read = reading.read_adapters(tmp_path / "peft", other, BASE)
    got, want = (job.fsdp.fetch(x.params) for x in (read, state))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    alone = job_of(targets=["q_proj"]).abstract_state()
    with pytest.raises(jshard.UserError, match="save='lm_head,up_proj' there"):
        reading.check_adapters(tmp_path / "peft", alone, BASE)


def test_one_that_has_an_adapter_besides_is_not_written(tmp_path):
    def entry(*shape: int) -> dict[str, Any]:
        own = {"shape": shape, "dtype": "float32", "layer_dims": 0, "random": False}
        return own | {"lora_alpha": 2}

    arrays = {"params.head.kernel": entry(16, 64)}
    arrays |= {f"params.head.lora_{x}": entry(*n) for x, n in
               {"a": (16, 2), "b": (2, 64)}.items()}  # fmt: skip
    about = {"arrays": arrays, "stacks": [], "config": {}}
    with pytest.raises(jshard.UserError, match="lm_head was trained beneath its ad"):
        peft.write_config(tmp_path, about, BASE)
