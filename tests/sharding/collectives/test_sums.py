"""Gathers and sums of one array, by what each device has of it before and after."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jshard
from jshard.sharding.collectives.gather import all_gather, gather, join_parts, take_part
from jshard.sharding.collectives.microbatch import (
    StepSum,
    current_microbatch,
    microbatch,
)
from jshard.sharding.collectives.quantized import ScaledShard
from jshard.sharding.collectives.reduce import (
    all_reduce,
    all_reduce_in_unit,
    cast,
    on_rank_zero,
    pmean,
    scatter,
)
from jshard.sharding.layout.placement import Gradient, Part, Placement, Sharding, Weight

P = PartitionSpec


def on_devices(fn, *arrays: Any, **sizes: int) -> Any:
    """Runs ``fn`` on each device with its row of arrays; results by device."""
    mapped, x = mapped_over(fn, *arrays, **sizes)
    return jax.tree.map(np.asarray, jax.jit(mapped)(*x))


def mapped_over(fn, *arrays: Any, **sizes: int) -> tuple[Any, list[jax.Array]]:
    options: dict[str, Any] = {"replica": 1} | sizes
    count = int(np.prod(list(options.values())))
    mesh = jshard.make_mesh(**options, devices=jax.devices()[:count])
    spec = P(mesh.axis_names)

    def one(*rows: jax.Array) -> Any:
        return jax.tree.map(lambda x: x[None], fn(*(row[0] for row in rows)))

    mapped = jax.shard_map(
        one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return mapped, [jax.device_put(x) for x in arrays]


def rows(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


# Groups.


def group_of_two(place: Placement, full: jax.Array, group: int = 2) -> Any:
    part = take_part(full, place, group)
    return part, join_parts(part, place, group)


@pytest.mark.parametrize(("group", "size"), [(1, 8), (2, 4), (4, 2), (8, 2)])
def test_neighbours_keep_a_part_each_and_have_the_whole_together(group, size):
    """Groups are next to each other: these share the fastest links."""
    full, place = rows(4, 3, 8), Placement(Sharding(-1))
    full[:] = full[0]  # the same on all
    run = functools.partial(group_of_two, place, group=group)
    part, whole = on_devices(run, full, fsdp=4)
    np.testing.assert_array_equal(whole, full)
    for device in range(4):
        start = device % min(group, 4) * size
        np.testing.assert_array_equal(part[device], full[0][:, start : start + size])
    mapped, arrays = mapped_over(run, full, fsdp=4)
    text = jax.jit(mapped).lower(*arrays).as_text()
    groups = re.findall(r"replica_groups = dense<(\[\[.*?\]\])>", text)
    neighbours = {1: [], 2: ["[[0, 1], [2, 3]]"]}
    assert groups == neighbours.get(group, ["[[0, 1, 2, 3]]"])


def test_parts_are_kept_in_the_dtype_of_the_wire_where_that_is_smaller():
    full = jnp.ones(3)
    run = lambda place: lambda full: group_of_two(place, full)

    def kept(**dtypes: str) -> list:
        given: dict[str, Any] = {k: jnp.dtype(v) for k, v in dtypes.items()}
        place = Placement(Sharding(-1, exact=(-1, 3)), weight=Weight(**given))
        mapped, arrays = mapped_over(run(place), rows(2, 3), fsdp=2)
        part, whole = jax.eval_shape(mapped, *arrays)
        assert (part.shape, whole.shape) == ((2, 2), (2, 3))  # padded, and exact
        return [part.dtype.name, whole.dtype.name]

    assert kept() == ["float32", "float32"]
    assert kept(gather="float16") == ["float16", "float16"]
    assert kept(gather="float16", compute="float32") == ["float16", "float32"]
    assert kept(gather="int8", compute="float16") == ["float32", "float16"]
    assert kept(gather="float64", compute="float16") == ["float32", "float16"]
    whole = Placement(Sharding(None), weight=Weight(gather=jnp.dtype("float16")))
    assert take_part(full, whole, 2) is full
    assert join_parts(full, whole, 2) is full


# Gathers, and what returns.


def test_a_shard_becomes_the_parameter_and_its_gradient_the_sum():
    place = Placement(
        Sharding(-1, exact=(-1, 3)),
        gradient=Gradient(sum_at="unit", sum_over=("replica",)),
    )
    shards = np.array([[1, 2], [3, 0], [1, 2], [3, 0]], np.float32)
    grads = rows(4, 3)

    def run(shard: jax.Array, grad: jax.Array) -> Any:
        full, pullback = jax.vjp(lambda x: all_gather(x, place), shard)
        return full, *pullback(grad)

    full, grad = on_devices(run, shards, grads, replica=2, fsdp=2)
    np.testing.assert_array_equal(full, [[1, 2, 3]] * 4)
    total = grads.sum(axis=0)
    np.testing.assert_array_equal(grad, [total[:2], [total[2], 0]] * 2)


def test_what_is_frozen_has_no_gradient_and_what_is_replicated_its_own():
    def run(shard: jax.Array, place: Placement) -> Any:
        full: Any
        full, pullback = jax.vjp(lambda x: all_gather(x, place), shard)
        return full, *pullback(jnp.ones_like(full))

    frozen = functools.partial(
        run, place=Placement(Sharding(-1), gradient=Gradient(trainable=False))
    )
    full, grad = on_devices(frozen, rows(2, 2), fsdp=2)
    np.testing.assert_array_equal(full, [[0, 1, 2, 3]] * 2)
    np.testing.assert_array_equal(grad, np.zeros((2, 2)))
    own = functools.partial(
        run, place=Placement(Sharding(None), gradient=Gradient(sum_over=("fsdp",)))
    )
    full, grad = on_devices(own, rows(2, 2), fsdp=2)
    np.testing.assert_array_equal(full, rows(2, 2))
    np.testing.assert_array_equal(grad, np.ones((2, 2)))  # the step sums it


def test_zeros_stand_where_only_the_gradient_is_wanted():
    place = Placement(
        Sharding(-1),
        weight=Weight(compute=jnp.dtype("float16")),
        gradient=Gradient(only=True),
    )
    full = on_devices(lambda x: all_gather(x, place), rows(2, 2), fsdp=2)
    assert full.dtype == np.float16
    np.testing.assert_array_equal(full, np.zeros((2, 4)))


def test_a_layer_gets_what_splits_split_only_where_it_computes_with_all():
    place = Placement(Sharding(-2, over=("fsdp",)), part=Part(splits=((-1, "tensor"),)))
    gathers = {
        "part": place,
        "whole": Placement(
            Sharding(-2, over=("fsdp",)),
            part=Part(splits=place.part.splits, whole=True),
        ),
    }
    run = lambda x: gather({"part": x, "whole": x}, gathers)
    full = on_devices(run, rows(4, 1, 2), fsdp=2, tensor=2)
    left, right = [[0, 1], [4, 5]], [[2, 3], [6, 7]]
    np.testing.assert_array_equal(full["part"], [left, right] * 2)
    np.testing.assert_array_equal(full["whole"], [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 4)


def test_one_byte_values_arrive_with_their_scale():
    float8 = jnp.dtype("float8_e4m3fn")
    place = Placement(
        Sharding(-1), weight=Weight(gather=float8, compute=jnp.dtype("float32"))
    )
    run = lambda x: all_gather(ScaledShard(x, jnp.float32(2)), place)
    full = on_devices(run, 2 * rows(2, 2), fsdp=2)
    np.testing.assert_array_equal(full, [[0, 1, 2, 3]] * 2)
    four = Placement(Sharding(-1), weight=Weight(gather=float8, packed=-1))
    codes = on_devices(
        lambda x: all_gather(ScaledShard(x, jnp.ones((1,))), four), rows(2, 2), fsdp=2
    )
    # 0, 1, 2 and 3 are the codes 0, 2, 4 and 5.
    np.testing.assert_array_equal(codes, [[0 | 2 << 4, 4 | 5 << 4]] * 2)


# Sums.


@pytest.mark.parametrize("sum_dtype", [None, "float16", "float32"])
def test_a_scatter_sums_over_the_shards_in_the_dtype_asked_for(sum_dtype):
    place = Placement(
        Sharding(-1, exact=(-1, 3)),
        gradient=Gradient(
            reduce=jnp.dtype("float16"), sum=sum_dtype and jnp.dtype(sum_dtype)
        ),
    )
    grads = rows(2, 2, 3)
    run = lambda grad: scatter(grad, place)
    mapped, arrays = mapped_over(run, grads, fsdp=2)
    got = np.asarray(jax.jit(mapped)(*arrays))
    assert got.dtype == (sum_dtype or np.float16)
    total = np.pad(grads.sum(axis=0), ((0, 0), (0, 1)))
    np.testing.assert_array_equal(got, [total[:, :2], total[:, 2:]])
    text = str(jax.make_jaxpr(mapped)(*arrays))
    assert ("reduce_scatter" in text) == (sum_dtype != "float32")
    assert ("all_to_all" in text) == (sum_dtype == "float32")


def test_a_scatter_along_the_first_dimension_sums_like_any():
    place = Placement(
        Sharding(-3),
        gradient=Gradient(reduce=jnp.dtype("float16"), sum=jnp.dtype("float32")),
    )
    grads = rows(2, 4, 3, 2)
    got = on_devices(lambda grad: scatter(grad, place), grads, fsdp=2)
    total = grads.sum(axis=0)
    np.testing.assert_array_equal(got, [total[:2], total[2:]])


def test_what_is_not_sharded_is_only_cast():
    place = Placement(
        Sharding(None),
        gradient=Gradient(reduce=jnp.dtype("float16"), sum=jnp.dtype("float32")),
    )
    got = on_devices(lambda grad: scatter(grad, place), rows(2, 3), fsdp=2)
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, rows(2, 3))
    one = Placement(
        Sharding(-1, exact=(-1, 3), parts=2)
    )  # a stage's shard is padded all the same
    got = on_devices(lambda grad: scatter(grad, one), rows(1, 3), fsdp=1)
    np.testing.assert_array_equal(got, [[0, 1, 2, 0]])


def test_the_same_shards_are_summed_over_their_axes_and_no_others():
    x = rows(4, 3)
    by_unit = Placement(
        Sharding(-1), gradient=Gradient(sum_at="unit", sum_over=("replica",))
    )

    def run(x: jax.Array) -> Any:
        once = Placement(Sharding(-1), gradient=Gradient(sum_over=("replica",)))
        alone = Placement(Sharding(-1))
        wide = Placement(
            Sharding(-1),
            gradient=Gradient(sum_over=("replica",), sum=jnp.dtype("float32")),
        )
        narrow = Placement(Sharding(-1), gradient=Gradient(sum=jnp.dtype("float16")))
        half = x.astype(jnp.float16)
        return (
            all_reduce_in_unit(x, by_unit, jnp.float16),
            all_reduce_in_unit(x, once, jnp.float16),
            all_reduce(x, once),
            all_reduce(x, alone),
            all_reduce(half, wide),
            all_reduce(x, narrow),
            pmean(x),
        )

    got = on_devices(run, x, replica=2, fsdp=2)
    pairs = x.reshape(2, 2, 3).sum(axis=0)
    total = np.concatenate([pairs, pairs])
    mean = np.broadcast_to(x.mean(axis=0), x.shape)
    for found, want in zip(got, [total, x, total, x, total, x, mean], strict=True):
        np.testing.assert_array_equal(found, want)
    dtypes = [found.dtype.name for found in got]
    assert dtypes == ["float16"] * 2 + ["float32"] * 5


def test_outside_of_a_mesh_a_mean_is_the_value_itself():
    x = {"a": jnp.ones(2)}
    assert pmean(x) is x
    assert cast(x["a"], None) is x["a"]
    assert cast(x["a"], jnp.float16).dtype == jnp.float16


def test_only_the_first_device_along_an_axis_adds_a_bias():
    first = Placement(Sharding(None), part=Part(on_rank_zero="tensor"))
    whole = Placement(Sharding(None), part=Part(on_rank_zero="tensor", whole=True))
    run = lambda x: (
        on_rank_zero(x, first),
        on_rank_zero(x, whole),
        on_rank_zero(x, Placement(Sharding(None))),
        scatter(x, first),
        all_gather(x, first),
    )
    x = rows(2, 3) + 1
    got = on_devices(run, x, fsdp=1, tensor=2)
    zeros = np.stack([x[0], np.zeros(3)])
    for found, want in zip(got, [zeros, x, x, zeros, zeros], strict=True):
        np.testing.assert_array_equal(found, want)


# Micro-batches.


def test_integers_add_up_over_micro_batches_and_start_again():
    assert current_microbatch() == (0, 1)
    counter = StepSum(jnp.zeros(2, jnp.int32))
    for _ in range(2):
        for i in range(3):
            with microbatch(i, 3):
                assert current_microbatch() == (i, 3)
                total, last = counter.add(jnp.array([1.0, 2.0]))
            assert total.dtype == jnp.int32
            np.testing.assert_array_equal(total, [i + 1, 2 * i + 2])
            assert last == (i == 2)
        np.testing.assert_array_equal(counter.get_value(), [0, 0])
    assert current_microbatch() == (0, 1)
    total, last = counter.add(jnp.array([5, 5]))
    np.testing.assert_array_equal(total, [5, 5])
    assert last


def test_integers_add_up_over_devices():
    def run(x: jax.Array) -> Any:
        counter = StepSum(jnp.zeros((), jnp.int32))
        with microbatch(jnp.int32(0), 2):
            first, _ = counter.add(x)
        with microbatch(jnp.int32(1), 2):
            second, last = counter.add(x)
        return first, second, last

    first, second, last = on_devices(run, rows(2, dtype=np.int32) + 1, fsdp=2)
    assert (first == 3).all()
    assert (second == 6).all()
    assert last.all()
