"""A batch is split over devices, and each process has its part of the examples."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import jshard
from jshard.sharding.layout import batch as module
from jshard.sharding.layout.batch import (
    abstract_batch,
    batch_specs,
    check_batch,
    check_fields,
    divisor_of_examples,
    nearest,
    rows_of_process,
    split_batch,
)

P = PartitionSpec


def mesh_of(**sizes: int) -> Any:
    sizes = {"replica": 1} | sizes
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def across(processes: list[int], **sizes: int) -> Any:
    """A mesh of devices of these processes, in order."""
    devices = np.empty(len(processes), object)
    devices[:] = [SimpleNamespace(process_index=process) for process in processes]
    return SimpleNamespace(
        axis_names=tuple(sizes),
        shape=sizes,
        size=len(processes),
        devices=devices.reshape(*sizes.values()),
        local_devices=[x for x in devices if x.process_index == jax.process_index()],
    )


@pytest.mark.parametrize(
    ("sizes", "processes", "want"),
    [
        # Each has other examples; their order is the mesh's, not the processes'.
        ({"replica": 1, "fsdp": 4}, [0, 0, 1, 1], [(0, 2), (1, 2)]),
        ({"replica": 2, "fsdp": 2}, [1, 1, 0, 0], [(1, 2), (0, 2)]),
        # Two processes share each sequence.
        (
            {"replica": 1, "fsdp": 2, "context": 2},
            [0, 1, 2, 3],
            [(0, 2), (0, 2), (1, 2), (1, 2)],
        ),
        ({"replica": 1, "fsdp": 1, "tensor": 2}, [0, 1], [(0, 1), (0, 1)]),
    ],
    ids=str,
)
def test_a_process_has_its_part_of_the_examples(sizes, processes, want, monkeypatch):
    for process, part in enumerate(want):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert rows_of_process(across(processes, **sizes)) == part


def test_whole_sequences_are_split_over_all_processes(monkeypatch):
    mesh = across([0, 1, 2, 3], replica=1, fsdp=2, context=2)
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    assert rows_of_process(mesh, whole=True) == (2, 4)
    assert rows_of_process(mesh) == (1, 2)


def test_a_process_with_some_of_anothers_examples_is_refused():
    mesh = across([0, 0, 0, 1, 1, 1], replica=1, fsdp=3, context=2)
    with pytest.raises(jshard.UserError, match=r"context=2 neither .* the 3 devices"):
        rows_of_process(mesh)


def test_the_nearest_numbers_of_examples_are_named():
    assert nearest(13, 8) == "8 or 16"
    assert nearest(16, 8) == "16 or 24"
    assert nearest(5, 8) == "8"
    assert nearest(0, 8) == "8"


def test_examples_divide_by_devices_and_by_micro_batches():
    assert divisor_of_examples(mesh_of(replica=2, fsdp=2), 3) == 12
    assert divisor_of_examples(mesh_of(fsdp=2, context=4), 1) == 2
    # All stages of a pipeline have a micro-batch's examples.
    assert divisor_of_examples(mesh_of(fsdp=2, pipe=4), 1) == 8
    assert divisor_of_examples(mesh_of(fsdp=2, pipe=4), 4) == 8
    assert divisor_of_examples(mesh_of(fsdp=2, pipe=4), 6) == 24


def refused(batch, mesh, **knobs) -> str:
    with pytest.raises(jshard.UserError) as error:
        check_batch(batch, mesh, **knobs)
    return str(error.value)


def test_arrays_of_different_lengths_are_refused_and_four_lengths_told():
    lengths = {str(n): np.zeros(n) for n in (4, 8, 12, 16)}
    told = "examples; got 12, 16, 4, 8"
    assert refused(lengths, mesh_of(fsdp=4)).endswith(told)
    message = refused(lengths | {"9": np.zeros(9)}, mesh_of(fsdp=4))
    assert message.endswith(f"{told} and 1 more")
    assert refused({}, mesh_of(fsdp=4)).endswith("got no arrays")


def test_a_batch_that_does_not_divide_is_refused_with_what_would():
    four = mesh_of(fsdp=4)
    check_batch({"x": np.zeros((8, 3)), "seed": np.zeros(())}, four)
    check_batch(np.zeros(8), four, accumulate=2)
    check_batch(np.zeros(2), four, parts=2)
    assert refused(np.zeros(6), four) == (
        "batch of 6 examples is not divisible by 4 devices; use 4 or 8"
    )
    assert refused(np.zeros(4), four, accumulate=2) == (
        "batch of 4 examples is not divisible by 4 devices x 2 micro-batches "
        "(policy.accumulate); use 8"
    )
    assert "of 6 examples" in refused(np.zeros(3), four, parts=2)
    assert "of 0 examples" in refused(np.zeros(0), four)
    assert refused([np.zeros(4), np.zeros(8)], four).endswith("examples; got 4, 8")
    assert refused(np.zeros(()), four).endswith("got no arrays")


def test_sequences_divide_by_the_axes_that_split_them():
    mesh = mesh_of(fsdp=2, context=2, tensor=2)
    check_batch(np.zeros((2, 8, 3)), mesh)
    check_batch(np.zeros(2), mesh)  # which has no sequences
    assert "by 2 groups of context=2 x tensor=2 devices; use 2 or 4" in refused(
        np.zeros((3, 8)), mesh
    )
    with pytest.raises(jshard.UserError) as error:
        batch_specs({"x": np.zeros((2, 6))}, mesh)
    assert str(error.value) == (
        "batch: the sequence 'x' [2, 6] has a length that is not divisible by the "
        "mesh's context=2 x tensor=2"
    )
    # Whole ones need not divide; their examples are split over all devices.
    check_batch(np.zeros((8, 6)), mesh, whole=True)
    assert "of 4 examples is not divisible by 8 devices; use 8" in refused(
        np.zeros((4, 8)), mesh, whole=True
    )


def test_arrays_keys_and_scalars_reach_the_devices():
    mesh = jshard.make_mesh(fsdp=4, context=2)
    keys = jax.random.split(jax.random.key(0), 8)
    batch = {
        "x": np.arange(8 * 6).reshape(8, 6),
        "y": np.arange(8),
        "keys": keys,
        "key": jax.random.key(7),
        "scale": np.float32(3),
    }
    got = split_batch(batch, mesh)
    for name in ("x", "y", "scale"):
        np.testing.assert_array_equal(got[name], batch[name])
    for name in ("keys", "key"):
        want = jax.random.key_data(batch[name])
        np.testing.assert_array_equal(jax.random.key_data(got[name]), want)
    shards = {name: x.sharding.shard_shape(x.shape) for name, x in got.items()}
    assert shards == {"x": (2, 3), "y": (2,), "keys": (2,), "key": (), "scale": ()}
    whole = split_batch(batch, mesh, whole=True)
    assert whole["x"].sharding.shard_shape((8, 6)) == (1, 6)
    np.testing.assert_array_equal(whole["x"], batch["x"])


def test_an_abstract_batch_is_that_of_all_processes(monkeypatch):
    mesh = jshard.make_mesh(fsdp=8)
    x, seed = np.zeros((8, 3), np.float32), np.int32(0)
    got = split_batch({"x": x, "seed": seed}, mesh)
    alone = abstract_batch({"x": x, "seed": seed}, mesh)
    types = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), (got, alone))
    assert types[0] == types[1]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(module, "rows_of_process", lambda mesh: (1, 2))
    one = jax.ShapeDtypeStruct((16, 3), np.float32)
    both = abstract_batch({"x": x, "seed": seed, "global": one}, mesh)
    shapes = jax.tree.map(lambda x: x.shape, both)
    assert shapes == {"x": (16, 3), "seed": (), "global": (16, 3)}
    assert both["global"].sharding == NamedSharding(mesh, P(("replica", "fsdp")))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"name": np.array(["a"] * 8)}, "batch field 'name' has the dtype <U1"),
        ({"o": {"p": np.array([None] * 8)}}, "batch field 'o.p' has the dtype object"),
        ({"t": np.zeros(8, "datetime64[s]")}, "batch field 't' has the dtype datetime"),
        ({"y": [0.5] * 8}, "batch field 'y' is a list of 8 numbers"),
        (["a"] * 8, "batch has the dtype <U1"),
        ({"names": ["a", "bc"]}, "batch field 'names' has the dtype <U2"),
    ],
)
def test_fields_that_are_no_arrays_of_numbers_are_refused_by_name(batch, message):
    with pytest.raises(jshard.UserError) as error:
        split_batch(batch, across([0] * 4, fsdp=4))
    assert message in str(error.value)


def test_numbers_of_any_dtype_keys_and_scalars_are_fields():
    narrow = [np.zeros(8, dtype) for dtype in (bool, np.uint8, np.float16)]
    keys = jax.random.split(jax.random.key(0), 8)
    scalars = {"beta": 0.5, "pair": (1, 2)}
    batch = {"x": narrow, "keys": keys, "b": jnp.zeros(8, jnp.bfloat16), **scalars}
    check_fields(batch | {"none": None, "eight": np.zeros(8, jnp.float8_e4m3fn)})
