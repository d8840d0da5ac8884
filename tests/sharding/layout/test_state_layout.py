"""The placements, specs and memory kinds of a whole state, without compiling a step."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from jshard.sharding.layout.memory_kinds import HOST
from jshard.sharding.layout.padding import PADDING
from jshard.sharding.layout.state_layout import Layout, padded

SGD = optax.sgd(0.1, momentum=0.9)
KERNEL, BIAS, COUNT = ("up", "kernel"), ("up", "bias"), ("count",)
trained = nnx.All(nnx.Param, lambda path, _: "bias" in path or "kernel" in path)


class Model(nnx.Module):
    splits_sequences = True

    def __init__(self, rngs):
        self.up = jshard.Unit(nnx.Linear(8, 16, rngs=rngs))
        self.count = nnx.Param(jnp.zeros(8, jnp.int32))


class Layers(nnx.Module):
    def __init__(self, rngs):
        layer = lambda rngs: nnx.Linear(8, 8, rngs=rngs)
        self.blocks = jshard.Stack(layer, 2, rngs=rngs)


class Odd(nnx.Module):
    def __init__(self, rngs):
        self.up = jshard.Unit(nnx.Linear(1, 9, use_bias=False, rngs=rngs))


def layout_of(policy, make: Any = Model, wrt: Any = trained, **mesh: Any):
    fsdp = jshard.FSDP(jshard.make_mesh(**mesh), policy)
    state = fsdp.abstract_state(make, SGD, wrt)
    return Layout.of(state, policy, fsdp.mesh), state


def test_sums_are_over_the_axes_that_do_not_shard():
    policy = jshard.Policy(min_shard_elements=17)
    layout, _ = layout_of(policy, replica=2, fsdp=2, context=2)
    kernel, bias = layout.places[KERNEL], layout.places[BIAS]
    assert kernel.sharding.dim == -2
    assert (kernel.gradient.sum_over, kernel.gradient.sum_at) == (("replica",), "unit")
    # A replicated parameter's gradient is summed over all, once per step.
    assert bias.sharding.dim is None
    assert bias.gradient.sum_over == ("replica", "fsdp", "context")
    assert bias.gradient.sum_at == "step"


@pytest.mark.parametrize(
    ("knobs", "mesh", "when"),
    [
        ({}, {}, "unit"),
        ({"accumulate": 2}, {}, "step"),
        ({"defer_scatter": True}, {}, "step"),
        ({"accumulate": 2}, {"pipe": 2}, "step"),
    ],
    ids=str,
)
def test_what_a_step_adds_up_is_summed_at_its_end(knobs, mesh, when):
    policy = jshard.Policy(min_shard_elements=0, **knobs)
    layout, _ = layout_of(policy, Layers, nnx.Param, **mesh)
    assert {place.gradient.sum_at for place in layout.places.values()} == {when}
    # Of a pipeline that is so whatever the policy.
    policy = dataclasses.replace(policy, accumulate=1, defer_scatter=False)
    mesh = jshard.make_mesh(**mesh)
    state = jshard.FSDP(jshard.make_mesh(), policy).abstract_state(Layers, SGD)
    places = Layout.of(state, policy, mesh).places.values()
    assert {place.gradient.sum_at for place in places} == {
        "step" if "pipe" in mesh.shape else "unit"
    }


def test_only_what_is_trained_and_has_a_derivative_has_a_gradient():
    half = jshard.Precision(gather="bfloat16", compute="float16", reduce="float32")
    policy = jshard.Policy(min_shard_elements=0, precision=half)
    kernels = nnx.All(nnx.Param, lambda path, _: "kernel" in path)
    layout, state = layout_of(policy, wrt=kernels)
    trainable = {
        path: place.gradient.trainable for path, place in layout.places.items()
    }
    assert trainable == {KERNEL: True, BIAS: False, COUNT: False}
    wires = {
        path: (place.weight.gather, place.weight.compute, place.gradient.reduce)
        for path, place in layout.places.items()
    }
    assert wires[KERNEL] == wires[BIAS] == ("bfloat16", "float16", "float32")
    assert wires[COUNT] == (None, "int32", None)  # as they are
    integers = dataclasses.replace(state, params=state.frozen, frozen=state.params)
    places = Layout.of(integers, policy, layout.mesh).places
    assert not places[COUNT].gradient.trainable
    assert places[BIAS].gradient.trainable
    places = layout_of(jshard.Policy(min_shard_elements=0))[0].places
    assert (places[KERNEL].weight.gather, places[KERNEL].weight.compute) == (
        None,
        "float32",
    )


def test_adapters_are_not_gathered_in_one_byte():
    def make(rngs):
        model = Model(rngs)
        jshard.nn.add_lora(model, targets=("up",), rank=2, alpha=2, rngs=rngs)
        return model

    small = jshard.Precision(gather="int8", compute="bfloat16")
    policy = jshard.Policy(min_shard_elements=0, precision=small)
    layout, _ = layout_of(policy, make, nnx.LoRAParam)
    gathers = {
        place.weight.gather
        for place in layout.places.values()
        if place.gradient.trainable
    }
    assert gathers == {jnp.dtype("bfloat16")}
    assert {place.weight.gather for place in layout.places.values()} > gathers


@pytest.mark.parametrize("offload", [None, "optimizer", "all"])
def test_what_is_sharded_is_offloaded_and_nothing_else(offload):
    policy = jshard.Policy(min_shard_elements=17, offload=offload, ema_decay=0.9)
    layout, state = layout_of(policy)
    found = layout.shardings
    in_host = lambda tree: [x.memory_kind == HOST for x in jax.tree.leaves(tree)]
    bias, kernel = False, offload is not None
    assert in_host(found.opt_state) == in_host(found.ema) == [bias, kernel]
    assert in_host(found.params) == [bias, offload == "all"]
    assert not any(in_host((found.step, found.model_state, found.frozen)))
    hosted = {path for path, place in layout.places.items() if place.sharding.hosted}
    assert hosted == ({KERNEL} if offload == "all" else set())
    abstract = jax.tree.leaves(layout.abstract(state))
    assert [x.sharding for x in abstract] == jax.tree.leaves(found)
    biases = nnx.All(nnx.Param, lambda path, _: "bias" in path)
    frozen = layout_of(policy, wrt=biases)[0].shardings.frozen
    assert any(in_host(frozen)) == (offload == "all")


def test_a_state_in_the_wrong_memory_is_refused():
    layouts, states = {}, {}
    for offload in (None, "all"):
        policy = jshard.Policy(min_shard_elements=0, offload=offload)
        layouts[offload], abstract = layout_of(policy)
        zeros = lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)
        states[offload] = jax.tree.map(zeros, abstract)
        layouts[offload].check_memory(states[offload])
    for offload, other, memory in ((None, "all", "host"), ("all", None, "device")):
        said = f"policy.offload is {offload!r}, but .* arrays in {memory} memory"
        with pytest.raises(jshard.UserError, match=said):
            layouts[offload].check_memory(states[other])


def test_weights_that_a_step_gathers_once_have_no_shards_in_it():
    layout, _ = layout_of(jshard.Policy(min_shard_elements=0))
    assert not layout.gathered_once(KERNEL)
    assert layout.gathered() == layout
    assert layout.whole().places[KERNEL].part.whole
    assert not layout.places[KERNEL].part.whole
    layout, _ = layout_of(jshard.Policy(min_shard_elements=0, defer_scatter=True))
    assert layout.gathered_once(KERNEL)
    assert {place.sharding.dim for place in layout.gathered().places.values()} == {None}


@pytest.mark.parametrize(
    ("reshard", "once"), [(True, False), (False, True), (2, False), (1, False)]
)
def test_layers_of_stages_are_gathered_once_where_they_are_kept(reshard, once):
    policy = jshard.Policy(min_shard_elements=0, reshard_after_forward=reshard)
    layout, _ = layout_of(policy)
    stages = SimpleNamespace(path=("up",), has=lambda path: path[0] == "up")
    layout = dataclasses.replace(layout, stages=stages)
    assert layout.gathered_once(KERNEL) == once
    assert not layout.gathered_once(COUNT)


def test_a_state_padded_for_another_mesh_is_refused():
    policy = jshard.Policy(min_shard_elements=0)
    layout, state = layout_of(policy, Odd)
    place = layout.places[KERNEL]
    assert (place.sharding.dim, place.sharding.exact) == (-1, (-1, 9))
    with pytest.raises(
        jshard.UserError, match=r"'up\.kernel' of the state is not sharded"
    ):
        Layout.of(state, policy, jshard.make_mesh(replica=2))


def test_a_new_state_is_padded_once():
    policy = jshard.Policy(min_shard_elements=0)
    layout, state = layout_of(policy, Odd)
    exact = nnx.map_state(
        lambda _, v: v.copy(jnp.ones((1, 9)), **{PADDING: None}), state.params
    )
    new = dataclasses.replace(state, params=exact)
    again = new
    for _ in range(2):
        again = padded(again, policy, layout.mesh, {})
        (variable,) = jax.tree.leaves(
            again.params, is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
        np.testing.assert_array_equal(variable.get_value(), [[1] * 9 + [0] * 7])
        assert variable.get_metadata(PADDING).size == 16
