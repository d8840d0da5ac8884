"""What is made of a new model: dtypes and marks, and its arrays part by part."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import jshard
from jshard.sharding.layout.layer_dims import IN_LAYER
from jshard.sharding.layout.memory_kinds import HOST
from jshard.sharding.layout.specs import LOOKED_UP
from jshard.sharding.layout.values import initial_values as module
from jshard.sharding.layout.values.initial_values import fill, mark_stacked, prepare


def is_parameter(path, variable):
    return isinstance(variable, nnx.Param)


class Model(nnx.Module):
    def __init__(self, rngs):
        zeros = nnx.initializers.zeros_init()  # which compile nothing
        self.embed = nnx.Embed(8, 4, embedding_init=zeros, rngs=rngs)
        self.up = nnx.Linear(4, 4, kernel_init=zeros, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.ids = nnx.Param(jnp.zeros(4, jnp.int32))


def test_floating_parameters_get_the_dtype_of_the_policy():
    model = Model(nnx.Rngs(0))
    half = jshard.Policy(precision=jshard.Precision(param="bfloat16"))
    prepare(model, half, AbstractMesh((1, 3), ("replica", "fsdp")), (), is_parameter)
    dtypes = {
        path[-1]: variable.get_value().dtype
        for path, variable in nnx.iter_graph(model)
        if isinstance(variable, nnx.Variable)
    }
    assert dtypes["kernel"] == dtypes["embedding"] == dtypes["bias"] == jnp.bfloat16
    assert dtypes["mean"] == jnp.float32  # no parameter
    assert dtypes["ids"] == jnp.int32
    as_is = Model(nnx.Rngs(0))
    mesh = AbstractMesh((1, 3), ("replica", "fsdp"))
    prepare(as_is, jshard.Policy(), mesh, (), is_parameter)
    assert as_is.up.kernel.get_value().dtype == jnp.float32


def test_tables_of_units_are_made_by_rows_where_these_divide(monkeypatch):
    rows = []

    def constrain(table, sharding):
        rows.append((table.shape, sharding.spec))
        return table

    monkeypatch.setattr(module.jax.lax, "with_sharding_constraint", constrain)
    for shards, want in ((4, [((8, 4), PartitionSpec("fsdp"))]), (3, [])):
        model, mesh = Model(nnx.Rngs(0)), AbstractMesh((1, shards), ("replica", "fsdp"))
        prepare(model, jshard.Policy(), mesh, (), is_parameter)
        assert not model.embed.embedding.get_metadata(LOOKED_UP, False)
        prepare(model, jshard.Policy(), mesh, (nnx.Embed,), is_parameter)
        assert model.embed.embedding.get_metadata(LOOKED_UP, False)
        assert rows == want
        rows.clear()


def test_annotated_variables_keep_flax_sharding():
    model, mesh = Model(nnx.Rngs(0)), AbstractMesh((1, 3), ("replica", "fsdp"))
    assert model.up.bias is not None
    model.up.kernel.set_metadata("out_sharding", ("model", None))
    model.up.kernel.set_metadata("eager_sharding", "as it was")
    prepare(model, jshard.Policy(), mesh, (), is_parameter)
    assert model.up.kernel.get_metadata("eager_sharding") == "as it was"
    eager = model.up.bias.get_metadata("eager_sharding")
    assert eager == nnx.using_eager_sharding()


class Pair(nnx.Module):
    def __init__(self, *shapes):
        self.w, self.b = (nnx.Param(jnp.zeros(shape)) for shape in shapes)
        self.count = nnx.BatchStat(jnp.zeros(()))


class Outer(nnx.Module):
    def __init__(self, pair):
        self.pair = pair


class Other(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.zeros(4))


def marks(module_: nnx.Module) -> dict[Any, tuple]:
    return {
        path[-1]: variable.get_metadata(IN_LAYER, ())
        for path, variable in nnx.iter_graph(module_)
        if isinstance(variable, nnx.Variable)
    }


def test_what_vmap_stacked_is_marked_with_its_path_in_a_layer():
    model = Outer(Pair((2, 3, 8), (2, 3)))
    mark_stacked(model, {Pair: 1}, is_parameter)
    assert marks(model) == {"w": (("w",),), "b": (("b",),), "count": ()}
    # The module with more layer dimensions counts, and the outermost of equals.
    model = Outer(Pair((2, 3, 8), (2, 3)))
    mark_stacked(model, {Pair: 2, Outer: 1}, is_parameter)
    assert marks(model)["w"] == (("w",), ("w",))
    model = Outer(Pair((2, 3, 8), (2, 3)))
    mark_stacked(model, {Pair: 2, Outer: 2}, is_parameter)
    assert marks(model)["w"] == (("pair", "w"), ("pair", "w"))
    mark_stacked(plain := Other(), {Pair: 1}, is_parameter)
    assert marks(plain) == {"w": ()}
    # Inside of layers that are marked already.
    model = Pair((5, 2, 8), (5, 2))
    for variable in (model.w, model.b):
        variable.set_metadata(IN_LAYER, (("x",),))
    mark_stacked(model, {Pair: 1}, is_parameter)
    assert marks(model)["w"] == (("x",), ("w",))


@pytest.mark.parametrize("shapes", [((2, 8), (3,)), ((2, 8), ())], ids=str)
def test_parameters_without_the_layers_of_vmap_are_refused(shapes):
    said = (
        r"'pair\.[bw]' of shape .* does not have the 1 leading layer dimensions of Pair"
    )
    with pytest.raises(jshard.UserError, match=said):
        mark_stacked(Outer(Pair(*shapes)), {Pair: 1}, is_parameter)


def array_in(kind: str | None, *shape: int) -> Any:
    mesh = jshard.make_mesh(fsdp=2, devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"), memory_kind=kind)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def test_offloaded_arrays_are_made_in_parts_no_larger_than_the_largest():
    parts = lambda *arrays: list(module._parts(arrays))
    of_host = lambda *sizes: [array_in(HOST, 2 * n) for n in sizes]
    of_device = array_in(None, 64)
    assert parts() == []
    assert parts(of_device, of_device) == [[0, 1]]
    # Largest first: 4, then 3, to which 2 is too much, then 2 + 1 + 1.
    assert parts(*of_host(1, 4, 3, 1, 2)) == [[1], [2], [0, 3, 4]]
    assert parts(of_device, *of_host(2, 2)) == [[0], [1], [2]]
    assert parts(*of_host(2, 1, 1)) == [[0], [1, 2]]


def test_arrays_that_are_there_stay_and_the_others_are_made():
    def create(x):
        return {"a": x * jnp.ones(4), "b": x + jnp.ones(4), "c": x - jnp.ones(4)}

    there = jnp.zeros(4)
    for kind in (None, HOST):
        tree = {"a": there, "b": array_in(None, 4), "c": array_in(kind, 4)}
        got = fill(tree, create, (np.float32(3),), lambda fn: fn)
        assert got["a"] is there
        np.testing.assert_array_equal(got["b"], np.full(4, 4))
        np.testing.assert_array_equal(got["c"], np.full(4, 2))
        for name in ("b", "c"):
            assert got[name].sharding == tree[name].sharding
