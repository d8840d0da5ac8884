"""PEFT's files without torch: adapters reach the state of any mesh."""

import json
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import save_file

import jshard
from jshard.storage.checkpoint import metadata
from jshard.storage.hub import peft
from jshard.storage.hub.adapters import reading
from jshard.storage.hub.file_tensor import FileTensor
from jshard.storage.hub.online.names import parse

BASE = {
    f"blocks.{i}.q.kernel": FileTensor((f"l.{i}.q.weight",), transposed=True)
    for i in range(2)
}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.q = nnx.Linear(32, 40, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.q(x)[..., :32]


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = jshard.Stack(Block, 2, rngs=rngs)


def test_rank_stabilized_adapters_of_experts_are_not_written(tmp_path):
    def about(*shape: int) -> dict[str, Any]:
        entry = {"shape": shape, "dtype": "float32", "lora_alpha": 4}
        entry |= {"lora_rank_stabilized": True, "layer_dims": 1}
        names = (f"params.blocks.up.lora_{x}" for x in "ab")
        arrays = dict.fromkeys(names, entry)
        return {"arrays": arrays, "stacks": ["blocks"], "config": {}}

    base = {f"blocks.{i}.up.kernel": FileTensor((f"l.{i}.up.weight",)) for i in (0, 1)}
    peft.write_config(tmp_path, about(2, 32, 4), base)
    assert json.loads((tmp_path / peft.CONFIG).read_text())["use_rslora"]
    with pytest.raises(
        jshard.UserError, match=r"up.lora_a is of experts, and lora\.rs"
    ):
        peft.write_config(tmp_path, about(2, 8, 32, 4), base)


@pytest.mark.parametrize("transposed", [True, False])
def test_the_config_says_which_dimension_of_matrices_is_first(transposed, tmp_path):
    """As GPT-2's files have them, inputs are; PyTorch's Linear has outputs first."""
    entry = {"shape": (4, 2), "dtype": "float32", "lora_alpha": 4, "layer_dims": 0}
    arrays = {f"params.{x}.lora_{y}": entry for x in "qk" for y in "ab"}
    about = {"arrays": arrays, "stacks": [], "config": {}}
    base = {
        f"{x}.kernel": FileTensor((f"{x}.weight",), transposed=transposed) for x in "qk"
    }
    base["embed.embedding"] = FileTensor(("embed.weight",))  # never is
    peft.write_config(tmp_path, about, base)
    written = json.loads((tmp_path / peft.CONFIG).read_text())
    assert written["fan_in_fan_out"] is not transposed
    assert (written["r"], written["lora_alpha"]) == (2, 4)
    assert written["target_modules"] == ["k", "q"]
    assert not written["use_rslora"]
    assert not written["use_dora"]


def test_adapters_with_other_settings_than_the_runs_are_one_line(tmp_path):
    own = {"lora_alpha": 6, "lora_rank_stabilized": True}
    modules = {f"l.{i}.q": nnx.LoRAParam(np.zeros((32, 4)), **own) for i in range(2)}
    right = {"peft_type": "LORA", "bias": "none", "r": 4, "lora_alpha": 6}
    right |= {"use_rslora": True, "use_dora": True}

    def problems(**changed: Any) -> list[str]:
        (tmp_path / peft.CONFIG).write_text(json.dumps(right | changed))
        return reading._config_problems(tmp_path, modules, dora=True, alone=True)

    assert problems() == []
    for changed, problem in {
        "r": "lora.rank=2 there",
        "lora_alpha": "lora.alpha=2 there",
    }.items():
        assert problems(**{changed: 2}) == [problem]
    for changed, problem in {
        "use_rslora": "lora.rslora=False there",
        "use_dora": "lora.dora=False there",
    }.items():
        assert problems(**{changed: None}) == [problem]
    assert problems(bias="all") == ["bias='all' is not supported"]
    assert problems(rank_pattern={"q": 8}) == ["lora.rank=8 there"]
    assert problems(r=8, rank_pattern={"0.q": 4, "q": 4}) == []
    assert problems(alpha_pattern={"1.q": 3}) == ["lora.alpha=3 there"]
    assert problems(alpha_pattern={"r.q": 3}) == []  # the end of no layer's name
    saved = ["lm_head", "embed_tokens"]
    assert problems(modules_to_save=saved) == [
        "lora.modules_to_save='lm_head,embed_tokens' there"
    ]


def test_ranks_alphas_and_layers_that_differ_travel_both_ways(tmp_path):
    options: dict[str, Any] = {"ranks": {"blocks.q": 2}, "alphas": {"blocks.q": 3}}

    def make(rngs: nnx.Rngs) -> nnx.Module:
        model = Model(rngs)
        given = {"rank": 8, "alpha": 16.0, "layers": {"blocks.q": (1,)}}
        jshard.nn.add_lora(model, **given, **options, rngs=rngs)
        return model

    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(min_shard_elements=0))
    state = fsdp.init(make, optax.sgd(1.0), wrt=nnx.LoRAParam)
    about = metadata.describe(state, config={}, metrics={})
    names = ["blocks.1.q.lora_a", "blocks.1.q.lora_b"]
    assert peft.adapter_names(about) == names
    peft.write_config(tmp_path, about, BASE)
    config = json.loads((tmp_path / peft.CONFIG).read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 3)
    assert config["target_modules"] == ["l.1.q"]

    patterns = {"rank_pattern": {"q": 2}, "alpha_pattern": {r"l\.1\.q": 3}}
    config |= {"r": 8, "lora_alpha": 16, **patterns}
    (tmp_path / peft.CONFIG).write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    shapes = {"lora_A": (2, 32), "lora_B": (40, 2)}
    tensors = {
        f"base_model.model.l.1.q.{x}.weight": rng.normal(size=n).astype(np.float32)
        for x, n in shapes.items()
    }
    save_file(tensors, tmp_path / peft.TENSORS)
    found: Any = fsdp.fetch(reading.read_adapters(tmp_path, state, BASE).params)
    for own, want in zip(("lora_a", "lora_b"), tensors.values(), strict=True):
        got = found["blocks"]["q"][own].get_value()
        np.testing.assert_array_equal(got, np.stack([np.zeros_like(want.T), want.T]))
    extra = {x.replace("l.1", "l.0"): y for x, y in tensors.items()}
    save_file(tensors | extra, tmp_path / peft.TENSORS)
    with pytest.raises(jshard.UserError, match=r"the model has no .*l\.0\.q\.lora_A"):
        reading.check_adapters(tmp_path, state, BASE)


def test_what_differs_is_written_by_the_ends_of_names_where_they_tell(tmp_path):
    def entry(rank: int, alpha: int) -> dict[str, Any]:
        return {"shape": (4, rank), "lora_alpha": alpha, "layer_dims": 0} | {
            "dtype": "float32"
        }

    sizes = {"q": (2, 4), "k": (2, 4), "x.up": (8, 4), "x.out": (2, 1), "y.out": (2, 4)}
    arrays = {f"params.{x}.lora_{y}": entry(*n) for x, n in sizes.items() for y in "ab"}
    base = {f"{x}.kernel": FileTensor((f"{x}.weight",)) for x in sizes}
    peft.write_config(tmp_path, {"arrays": arrays, "stacks": [], "config": {}}, base)
    written = json.loads((tmp_path / peft.CONFIG).read_text())
    assert (written["r"], written["rank_pattern"]) == (2, {"up": 8})
    assert written["alpha_pattern"] == {r"x\.out": 1}


def test_adapters_of_another_base_on_the_hub_are_one_line(tmp_path):
    def check(said: str | None, base: str) -> None:
        content = json.dumps({"base_model_name_or_path": said})
        (tmp_path / peft.CONFIG).write_text(content)
        reading.check_base(tmp_path, parse(base))

    for said in (None, "", "org/base", "Org/Base", str(tmp_path)):
        check(said, "org/base@main")
    check("org/other", str(tmp_path))  # a folder, which may be that model
    message = r"adapters for org/other, and checkpoint\.restore is org/base: give org"
    with pytest.raises(jshard.UserError, match=message):
        check("org/other", "org/base@main")


@pytest.mark.quick("3")
@pytest.mark.parametrize("devices", [1, 3, 8])  # three pad all of them
def test_adapters_are_read_on_any_mesh(devices, tmp_path):
    def make(rngs: nnx.Rngs) -> nnx.Module:
        model = Model(rngs)
        jshard.nn.add_lora(model, rank=4, alpha=6, dora=True, rngs=rngs)
        return model

    rng, tensors = np.random.default_rng(0), {}
    shapes: dict[str, Any] = {"lora_A.weight": (4, 32), "lora_B.weight": (40, 4)}
    shapes["lora_magnitude_vector"] = (40,)
    for i in range(2):
        for name, shape in shapes.items():
            value = rng.standard_normal(shape).astype(np.float32)
            tensors[f"base_model.model.l.{i}.q.{name}"] = value
    save_file(tensors, tmp_path / peft.TENSORS)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "use_dora": True}
    (tmp_path / peft.CONFIG).write_text(json.dumps(config | {"bias": "none"}))

    mesh = jshard.make_mesh(devices=jax.devices()[:devices])
    fsdp = jshard.FSDP(mesh, jshard.Policy(min_shard_elements=0))
    state = fsdp.init(make, optax.sgd(1.0), wrt=nnx.LoRAParam)
    state = reading.read_adapters(tmp_path, state, BASE)
    found: Any = fsdp.fetch(state.params)["blocks"]["q"]
    ours = ("lora_a", "lora_b", "lora_m")
    for (i, (name, _)), own in zip(
        [(i, x) for i in range(2) for x in shapes.items()], ours * 2, strict=True
    ):
        want = tensors[f"base_model.model.l.{i}.q.{name}"].T
        np.testing.assert_array_equal(found[own].get_value()[i], want)
