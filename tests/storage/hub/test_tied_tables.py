"""Adapters of a table that is the head, too: merged, the head is one of its own."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jshard
from filled import filled
from jshard.export import export
from jshard.models import gpt_huggingface, llama_huggingface
from jshard.models.gpt import GPT, GPTConfig
from jshard.models.llama import Llama, LlamaConfig
from jshard.storage.hub import peft
from jshard.storage.hub.adapters import reading

RECIPES = Path(jshard.__file__).parent / "recipes"
SIZES = {"vocab_size": 40, "sequence_length": 8, "num_layers": 1, "num_heads": 2}
KINDS: dict[str, Any] = {
    "llama": (
        Llama,
        LlamaConfig,
        llama_huggingface,
        SIZES | {"width": 16, "num_kv_heads": 2, "hidden": 24, "tied": True},
    ),
    "gpt": (GPT, GPTConfig, gpt_huggingface, SIZES | {"width": 16, "tied": True}),
}
TOKENS = np.arange(16).reshape(2, 8)


def adapted(kind: str, targets: tuple[str, ...]) -> Any:
    model, config, _, keys = KINDS[kind]

    def make() -> Any:
        made = filled(lambda: model(config(**keys), rngs=nnx.Rngs(0)))
        jshard.nn.add_lora(made, rank=2, alpha=4.0, targets=targets, rngs=nnx.Rngs(0))
        return made

    return filled(make)


def written(folder: Path, kind: str) -> Any:
    """The model of a folder of Hugging Face's, and its keys."""
    model, config, names, _ = KINDS[kind]
    keys = names.read_config(json.loads((folder / "config.json").read_text()))
    tensors, found = load_file(folder / "model.safetensors"), names.tensors(keys)
    assert {x for place in found.values() for x in place.names} == {*tensors}
    made = filled(lambda: model(config(**keys), rngs=nnx.Rngs(0)))
    for path, variable in nnx.to_flat_state(nnx.state(made, nnx.Param)):
        stacked = path[0] == "blocks"
        name = ".".join(map(str, ("blocks.0", *path[1:]) if stacked else path))
        value = found[name].from_file(tensors[found[name].names[0]])
        variable.set_value(jnp.asarray(value[None] if stacked else value))
    return made, keys


@pytest.mark.quick("gpt-False")
@pytest.mark.parametrize(
    ("kind", "left_out"), [("llama", True), ("llama", False), ("gpt", False)]
)
def test_a_merged_table_leaves_its_head_as_it_was(kind, left_out, tmp_path):
    _, _, names, keys = KINDS[kind]
    model = adapted(kind, ("embed", "*"))
    fsdp, config = jshard.FSDP(jshard.make_mesh()), {"model": keys}
    state = fsdp.from_model(model, optax.sgd(1.0), wrt=nnx.LoRAParam)
    more: dict[str, Any] = {}
    if left_out:
        base = tmp_path / "base"
        base.mkdir()
        content = names.write_config(keys)
        (base / "config.json").write_text(json.dumps(content))
        of_base = {}
        for name, place in names.tensors(keys).items():
            value: Any = nnx.state(model)
            parts = name.replace("blocks.0", "blocks").split(".")
            for part in parts:
                value = value[part]
            value = np.asarray(value.get_value())
            value = value[0] if parts[0] == "blocks" else value
            value = np.ascontiguousarray(value.transpose(place.axes(value.ndim)))
            of_base[place.names[0]] = value
        save_file(of_base, base / "model.safetensors")
        more["frozen_from"] = base
    with jshard.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(state, config=config, **more)
    recipe = str(RECIPES / ("finetune.py" if kind == "llama" else "gpt.py"))
    export(tmp_path / "run", tmp_path / "out", format="huggingface", recipe=recipe)
    merged, found = written(tmp_path / "out", kind)
    assert not found["tied"]
    want = jax.jit(lambda: model(TOKENS))()
    np.testing.assert_allclose(merged(TOKENS), want, rtol=1e-4, atol=1e-4)


def exported(adapters, form, tmp_path):
    """The state of a llama with adapters, and the folder to which it was exported."""
    state = jshard.FSDP(jshard.make_mesh()).from_model(
        adapted("llama", adapters), optax.sgd(1.0), wrt=nnx.LoRAParam
    )
    with jshard.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(state, config={"model": KINDS["llama"][3]})
    recipe = str(RECIPES / "finetune.py")
    export(tmp_path / "run", tmp_path / "out", format=form, recipe=recipe)
    return state, tmp_path / "out"


def test_a_head_stays_tied_to_a_table_without_an_adapter(tmp_path):
    _, out = exported(("*",), "huggingface", tmp_path)
    assert written(out, "llama")[1]["tied"]


def test_adapters_that_peft_ties_to_heads_are_refused(tmp_path):
    state, out = exported(("embed",), "peft", tmp_path)
    places = llama_huggingface.tensors(KINDS["llama"][3])
    reading.check_adapters(out, state, places)
    file = out / peft.CONFIG
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"ensure_weight_tying": True}))
    with pytest.raises(jshard.UserError, match="ensure_weight_tying=True is not supp"):
        reading.check_adapters(out, state, places)
