"""What a model holds is found, replaced, and moved between the host and shards."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import jshard
from jshard.sharding.layout.padding import (
    PADDING,
    Padding,
    exact,
    exact_values,
    pad,
    padding_now,
    shape_of_layer,
)
from jshard.sharding.layout.values.transfer import (
    as_read,
    fetch,
    fetch_exact,
    put,
    put_parts,
)
from jshard.sharding.layout.variables import (
    expose_arrays,
    of_class,
    own_dtypes,
    reachable,
    replace,
    variables,
)

P = PartitionSpec


class Plain:
    """No pytree."""

    def __init__(self, inner):
        self.inner = inner


class Holder(nnx.Module):
    w: Any
    kept: Any
    alias: Any
    many: Any
    again: Any

    def __init__(self, **values):
        for name, value in values.items():
            setattr(self, name, value)


def test_reachable_is_all_but_what_is_inside_of_variables_and_stops():
    param = nnx.Param(jnp.zeros(2))
    inner = Holder(w=param)
    model = Holder(layers=nnx.List([inner]), pair=nnx.data((inner, {"x": 3})), name="a")
    found = reachable(model)
    assert found[0] is model
    assert sum(x is param for x in found) == 1
    assert sum(x is inner for x in found) == 1
    assert 3 in [x for x in found if isinstance(x, int)]
    assert not any(x is param.get_value() for x in found)
    stopped = reachable(model, stop=lambda x: x is inner)
    assert any(x is inner for x in stopped)
    assert not any(x is param for x in stopped)
    assert any(x is param for x in reachable(inner, stop=lambda x: x is inner))
    assert [path for path, _ in variables(model)] == [("layers", 0, "w")]


def test_another_object_stands_wherever_the_old_one_did():
    old, new = nnx.Param(jnp.zeros(2)), nnx.Param(jnp.ones(2))
    kept = nnx.Param(jnp.full(2, 2.0))
    inner = Holder(w=old, kept=kept)
    model = Holder(inner=inner, alias=old, many=nnx.List([old, kept]))
    other = Holder(again=old)
    replace(model, {id(old): new, 0: other})
    assert inner.w is new
    assert model.alias is new
    assert list(model.many) == [new, kept]
    assert inner.kept is kept
    assert other.again is new
    assert old.get_value()[0] == 0


def test_an_object_of_another_class_has_the_same_attributes():
    class Other(Holder):
        pass

    param = nnx.Param(jnp.zeros(2))
    made = of_class(Holder(w=param), Other)
    assert type(made) is Other
    assert made.w is param


def test_arrays_outside_of_variables_are_shown_to_flax():
    class Bare(nnx.Module):
        def __init__(self):
            self.names = ["a", "b"]
            self.w = nnx.Param(jnp.zeros(2))

    model = Bare()
    object.__setattr__(model, "names", [jnp.ones(3), "b"])
    vars(model)["table"] = jnp.ones(2)
    expose_arrays(model)
    leaves = jax.tree.leaves(nnx.split(model)[1])
    assert sorted(x.shape for x in leaves) == [(2,), (2,), (3,)]


def test_the_innermost_module_with_a_dtype_says_it():
    class Model(nnx.Module):
        def __init__(self, rngs):
            zeros = nnx.initializers.zeros_init()
            half = {"dtype": jnp.float16, "kernel_init": zeros}
            self.half = jshard.Unit(nnx.Linear(8, 8, rngs=rngs, **half))
            self.usual = jshard.Unit(nnx.Linear(8, 8, rngs=rngs))

    mesh = jshard.make_mesh()
    asks = jshard.Policy(precision=jshard.Precision(compute="bfloat16"))
    state = jshard.FSDP(mesh, asks).abstract_state(Model, optax.sgd(0.1))
    half = jnp.dtype("float16")
    found = {
        (path[0], path[-1]): dtype for path, dtype in own_dtypes(state, asks).items()
    }
    assert found == {("half", "kernel"): half, ("half", "bias"): half}
    assert own_dtypes(state, jshard.Policy()) == {}


@pytest.fixture
def two():
    return jshard.make_mesh(fsdp=2, devices=jax.devices()[:2])


def like(mesh, spec, *shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def test_full_values_are_put_onto_shards_and_fetched(two):
    value = np.arange(8.0).reshape(4, 2)
    got = put(value, like(two, P("fsdp"), 4, 2))
    assert got.dtype == jnp.float32
    assert got.sharding.shard_shape(got.shape) == (2, 2)
    np.testing.assert_array_equal(fetch(got), value)
    keys = jax.random.split(jax.random.key(0), 2)
    abstract = jax.ShapeDtypeStruct(
        keys.shape, keys.dtype, sharding=NamedSharding(two, P("fsdp"))
    )
    put_keys = put(keys, abstract)
    assert put_keys.dtype == keys.dtype
    np.testing.assert_array_equal(fetch(put_keys), jax.random.key_data(keys))
    assert fetch(3) == 3


def test_what_this_process_has_is_fetched_without_the_others(two, monkeypatch):
    value = np.arange(8.0)
    monkeypatch.delattr(multihost_utils, "process_allgather")
    np.testing.assert_array_equal(fetch(put(value, like(two, P("fsdp"), 8))), value)


def test_parts_that_lack_some_of_a_shard_are_padded_with_zeros(two):
    value = np.arange(1.0, 7).reshape(3, 2)
    got = put_parts(lambda index: value[index], like(two, P("fsdp"), 4, 2))
    np.testing.assert_array_equal(got, [[1, 2], [3, 4], [5, 6], [0, 0]])


def padded_variable(two, value, **metadata):
    padding = Padding((3, 2), -2, 4, ("fsdp",))
    return nnx.Param(value, **{PADDING: padding}, **metadata)


def test_padding_is_added_and_taken_off_once(two):
    value = np.arange(1.0, 7, dtype=np.float32).reshape(3, 2)
    plain = nnx.Param(jnp.asarray(value))
    narrow = padded_variable(two, jnp.asarray(value))
    assert padding_now(narrow) is None
    assert shape_of_layer(narrow) == (3, 2)
    wide = pad({"w": narrow, "plain": plain, "n": 3}, two)
    assert wide["plain"] is plain
    assert wide["n"] == 3
    wide = wide["w"]
    assert padding_now(wide) == narrow.get_metadata(PADDING)
    assert shape_of_layer(wide) == (3, 2)
    np.testing.assert_array_equal(wide.get_value()[:3], value)
    assert not wide.get_value()[3:].any()
    assert wide.get_value().sharding.shard_shape((4, 2)) == (2, 2)
    assert pad(wide, two).get_value() is wide.get_value()
    for back in (exact(wide, None), exact_values(wide)):
        np.testing.assert_array_equal(back.get_value(), value)
    assert exact_values(wide).get_metadata(PADDING, None) is None
    assert exact(narrow, None) is narrow
    # Layers in front, which an optimizer's metadata may not count.
    layers = pad(padded_variable(two, jnp.asarray([value] * 2)), two)
    assert layers.get_value().shape == (2, 4, 2)
    assert shape_of_layer(nnx.Param(jnp.zeros((5, 3)), in_layer=((),))) == (3,)
    odd = padded_variable(two, jnp.zeros(2))
    assert padding_now(odd) is None


@pytest.mark.core
def test_what_models_read_is_whole_and_exact(two):
    value = np.arange(1.0, 7, dtype=np.float32).reshape(3, 2)
    wide = pad(padded_variable(two, jnp.asarray(value)), two)
    plain = nnx.Param(jnp.zeros(3))
    read = as_read({"w": wide, "plain": plain}, two)
    assert read["plain"] is plain
    np.testing.assert_array_equal(read["w"].get_value(), value)
    assert read["w"].get_value().sharding.is_fully_replicated
    np.testing.assert_array_equal(fetch_exact(wide).get_value(), value)
    assert isinstance(fetch_exact(jnp.ones(2)), np.ndarray)
    there = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    abstract = as_read(jax.tree.map(there, wide), two).get_value()
    assert abstract.shape == (3, 2)
    assert abstract.sharding == NamedSharding(two, P())
