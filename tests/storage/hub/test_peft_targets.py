"""Layers that have adapters, by the names and rules of PEFT."""

import re
from typing import Any

import jax
import optax
import pytest
from flax import nnx

import jshard
from jshard.models import llama_huggingface as huggingface
from jshard.models.llama import Llama, LlamaConfig
from jshard.storage.hub.adapters import reading
from jshard.storage.hub.adapters.targets import add_lora_arguments
from jshard.storage.hub.peft import module_of, places

SIZES: dict[str, Any] = {"vocab_size": 64, "sequence_length": 16, "num_layers": 3}
SIZES |= {"num_heads": 2, "num_kv_heads": 2, "width": 16, "hidden": 24, "tied": False}
BASE = huggingface.tensors(SIZES)
LINEAR = [f"self_attn.{x}_proj" for x in "qkvo"]
LINEAR += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
THEIRS = [f"model.layers.{i}.{x}" for i in range(3) for x in LINEAR]
THEIRS += ["lm_head", "model.embed_tokens"]


def peft_has(name: str, targets: Any, layers: Any = ()) -> bool:
    """The rule of PEFT 0.20's check_target_module_exists, in our words."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    if name in targets:
        return True
    if not any(name.endswith(f".{x}") for x in targets):
        return False
    if not layers:
        return True
    block = re.match(r".*?\.[^.]*\.(\d+)\.", name)
    return block is not None and int(block[1]) in layers


def adapted(targets: Any, **options: Any) -> dict[str, Any]:
    """The A of each layer that has an adapter, by the layer's name in the files."""

    def make(rngs: nnx.Rngs) -> nnx.Module:
        model = Llama(LlamaConfig(**SIZES), rngs=rngs)
        given = add_lora_arguments(BASE, targets=targets, **options)
        jshard.nn.add_lora(model, rank=4, alpha=8.0, **given, rngs=rngs)
        return model

    fsdp = jshard.FSDP(jshard.make_mesh(devices=jax.devices()[:1]))
    state = fsdp.abstract_state(make, optax.sgd(1.0), wrt=nnx.LoRAParam)
    found = {}
    for name, (variable, layers) in reading._trained(state).items():
        if name.endswith("lora_a"):
            for place in places(layers.values(), BASE).values():
                found[module_of(place.names[0])] = variable
    return found


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (["q_proj", "v_proj"], ()),
        (["self_attn.o_proj", "lm_head", "embed_tokens"], ()),
        (["model.layers.1.mlp.up_proj", "down_proj"], ()),
        (["q_proj", "embed_tokens"], (0, 2)),
        (["q_proj", "lm_head", "model.layers.1.mlp.up_proj"], (0, 2)),
        (r".*\.(q|k)_proj", ()),
        (r"model\.layers\.[12]\.mlp\..*", ()),
    ],
)
def test_layers_are_those_that_peft_chooses(targets, layers):
    given = [targets] if isinstance(targets, str) else targets
    want = {name for name in THEIRS if peft_has(name, targets, layers)}
    assert want
    assert set(adapted(given, layers_to_transform=layers)) == want


def test_all_linear_is_every_linear_layer_but_the_head_and_our_patterns_stay():
    want = {f"model.layers.{i}.{x}" for i in range(3) for x in LINEAR}
    assert set(adapted(["all-linear"])) == set(adapted(["*"])) == want
    mixed = adapted(["attention.q", "v_proj"], layers_to_transform=(1,))
    assert set(mixed) == {f"model.layers.1.self_attn.{x}_proj" for x in "qv"}


def test_ranks_and_alphas_are_those_of_the_first_pattern_that_matches():
    found = adapted(
        ["all-linear"],
        rank_pattern=["self_attn.q_proj:16", "(q|up)_proj:2"],
        alpha_pattern=["down_proj:1.5"],
    )
    ends = {x.rpartition(".")[2]: a for x, a in found.items()}
    ranks = {end: a.get_value().shape[-1] for end, a in ends.items()}
    assert {end: n for end, n in ranks.items() if n != 4} == {
        "q_proj": 16,
        "up_proj": 2,
    }
    alphas = {end: a.get_metadata("lora_alpha") for end, a in ends.items()}
    assert {end: x for end, x in alphas.items() if x != 8} == {"down_proj": 1.5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ["query"]}, "target 'query' matches no layer"),
        ({"targets": ["(q"]}, r"target '\(q' matches no layer"),
        ({"layers_to_transform": (5,)}, "there is no layer 5, but 0 to 2"),
        ({"targets": ["head"], "layers_to_transform": (1,)}, "no layer is left that"),
        ({"rank_pattern": ["q_proj"]}, "lora.rank_pattern: 'q_proj' is not NAME:NUM"),
        ({"rank_pattern": ["q_proj:0"]}, "'q_proj:0' is not NAME:NUMBER, above 0"),
        (
            {"alpha_pattern": ["q:8"]},
            "'q' is the end of no layer's .* lm_head, q_proj, ",
        ),
        ({"rank_pattern": ["1.mlp.up_proj:8"]}, "layers of blocks.up, which are one"),
    ],
)
def test_what_cannot_be_is_an_error_of_one_line(options, message):
    with pytest.raises(jshard.UserError, match=message) as error:
        adapted(**{"targets": ["*"]} | options)
    assert "\n" not in str(error.value)


def test_all_linear_of_experts_is_refused():
    base = huggingface.tensors(SIZES | {"num_experts": 2})
    with pytest.raises(jshard.UserError, match="all-linear depends on PEFT's version"):
        add_lora_arguments(base, targets=["all-linear"])
