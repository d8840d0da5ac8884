"""Meshes and batches: what is refused, and how clearly."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

import jshard


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, (1, 8)),
        ({"replica": 2}, (2, 4)),
        ({"fsdp": 1, "replica": 8}, (8, 1)),
        ({"fsdp": 2}, (1, 2)),
    ],
)
def test_mesh_arranges_devices_as_replicas_of_shards(sizes, shape):
    mesh = jshard.make_mesh(**sizes)
    assert mesh.axis_names == ("replica", "fsdp")
    assert mesh.devices.shape == shape
    assert [d.id for d in mesh.devices.flat] == list(range(np.prod(shape)))


@dataclasses.dataclass(frozen=True)
class Device:
    """As much of a device as a mesh is made by."""

    id: int
    process_index: int


def devices_of(*processes: int) -> list[Any]:
    return list(itertools.starmap(Device, enumerate(processes)))


@pytest.mark.parametrize(
    ("processes", "hosts", "fsdp", "rows"),
    [
        ((0, 0, 1, 1), None, -1, [[0, 1], [2, 3]]),
        ((0, 0, 1, 1), (0, 0), -1, [[0, 1, 2, 3]]),
        ((0, 1, 2, 3), (0, 0, 1, 1), -1, [[0, 1], [2, 3]]),
        ((0, 1, 2, 3), (0, 1, 0, 1), -1, [[0, 2], [1, 3]]),
        ((0, 0, 1, 1), None, 1, [[0], [1], [2], [3]]),
        ((0, 0, 0, 0), None, 2, [[0, 1], [2, 3]]),
    ],
)
def test_replicas_of_hosts_shard_within_a_host(processes, hosts, fsdp, rows):
    """Also where a host runs several processes, and their numbers are mixed."""
    mesh = jshard.make_mesh(
        replica="hosts", fsdp=fsdp, devices=devices_of(*processes), hosts=hosts
    )
    assert mesh.axis_names == ("replica", "fsdp")
    assert [[device.id for device in row] for row in mesh.devices] == rows


@pytest.mark.parametrize(
    ("processes", "sizes", "message"),
    [
        ((0, 0, 1), {}, "number of devices on each host, not 2 in host 0, 1 in host 1"),
        ((0, 0, 1, 1), {"fsdp": 4}, "fsdp=4 does not divide the 2 devices of a host"),
        ((0, 0, 1, 1), {"fsdp": 0}, "fsdp=0 does not divide"),
        ((0, 1), {"replica": "racks"}, "replica='racks' must be a number, or hosts"),
        ((0, 1), {"replica": 1, "fsdp": 1}, "leaves process 1 without a device"),
    ],
)
def test_meshes_that_hosts_cannot_be_are_refused(processes, sizes, message):
    sizes = {"replica": "hosts", **sizes}
    with pytest.raises(jshard.UserError, match=message):
        jshard.make_mesh(devices=devices_of(*processes), **sizes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"fsdp": 16}, "needs 16 devices but there are 8"),
        pytest.param(
            {"replica": 3},
            "replica=3 does not divide the 8 devices",
            marks=pytest.mark.core,
        ),
        ({"replica": 0}, "must be positive"),
        ({"fsdp": 0}, "must be positive"),
    ],
)
def test_impossible_meshes_are_refused_in_one_line(sizes, message):
    with pytest.raises(jshard.UserError, match=message) as error:
        jshard.make_mesh(**sizes)
    assert "\n" not in str(error.value)


def test_a_mesh_without_the_axes_is_refused():
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    with pytest.raises(jshard.UserError, match=r"make one with jshard\.make_mesh"):
        jshard.FSDP(mesh)
    with pytest.raises(
        jshard.UserError, match=r"^mesh is a list; see jshard\.make_mesh"
    ):
        jshard.FSDP(jax.devices())  # pyright: ignore[reportArgumentType]


def test_a_batch_that_does_not_divide_is_refused_with_the_multiple_to_use():
    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(accumulate=4))
    with pytest.raises(
        jshard.UserError, match="12 examples is not divisible by 8 devices; use 8 or 16"
    ):
        fsdp.shard_batch({"x": np.ones((12, 3))})
    with pytest.raises(jshard.UserError, match="same leading dimension"):
        fsdp.shard_batch({"x": np.ones((8, 3)), "y": np.ones(16)})
    with pytest.raises(jshard.UserError, match="same leading dimension"):
        fsdp.shard_batch({"x": np.ones(())})

    def loss_fn(model, batch):
        return jshard.Mean(model(batch).sum(), batch.shape[0])

    def make_model(rngs):
        return nnx.Sequential(jshard.Unit(nnx.Linear(3, 3, rngs=rngs)))

    state = fsdp.abstract_state(make_model, optax.sgd(1.0))
    step = fsdp.train_step(loss_fn, optax.sgd(1.0))
    with pytest.raises(jshard.UserError, match=r"4 micro-batches .* use 32"):
        step(state, fsdp.shard_batch(np.ones((16, 3), np.float32)))


def test_a_model_without_parameters_is_refused():
    class Empty(nnx.Module):
        pass

    fsdp = jshard.FSDP(jshard.make_mesh())
    with pytest.raises(jshard.UserError, match="no parameters"):
        fsdp.init(lambda rngs: Empty(), optax.sgd(1.0))


def test_wrt_must_select_parameters():
    class Normed(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.norm = jshard.Unit(nnx.BatchNorm(8, rngs=rngs))

    fsdp = jshard.FSDP(jshard.make_mesh())
    with pytest.raises(jshard.UserError, match=r"norm\.mean.*must select nnx\.Param"):
        fsdp.init(Normed, optax.sgd(1.0), wrt=nnx.Variable)


def test_a_large_root_is_a_warning_that_names_its_modules():
    fsdp = jshard.FSDP(jshard.make_mesh())
    with pytest.warns(UserWarning, match=r"layers\.0\.kernel.*jshard\.Unit"):
        fsdp.abstract_state(
            lambda rngs: nnx.Sequential(nnx.Linear(64, 64, rngs=rngs)), optax.sgd(1.0)
        )


def test_parameters_annotated_with_a_further_axis_keep_it_and_train_the_same():
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            up = {"out_sharding": (None, "model")}
            self.up = jshard.Unit(
                nnx.Linear(16, 64, kernel_metadata=up, rngs=rngs),
            )
            self.down = jshard.Unit(nnx.Linear(64, 16, rngs=rngs))

        def __call__(self, x):
            return self.down(jax.nn.relu(self.up(x)))

    def loss_fn(model, batch):
        return jshard.Mean((model(batch) ** 2).sum(), batch.size)

    batch = np.random.default_rng(0).standard_normal((32, 16), np.float32)
    devices = np.array(jax.devices()).reshape(1, 4, 2)
    axes = ("replica", "fsdp", "model")
    losses, tx = [], optax.sgd(0.1)
    for mesh in (
        Mesh(devices, axes, axis_types=(AxisType.Auto,) * 3),
        jshard.make_mesh(replica=2),
    ):
        fsdp = jshard.FSDP(mesh, jshard.Policy(min_shard_elements=0))
        state, step = fsdp.init(Net, tx), fsdp.train_step(loss_fn, tx)
        metrics = {}
        for _ in range(3):
            state, metrics = step(state, fsdp.shard_batch(batch))
        losses.append(metrics["loss"])
        kernel = dict(nnx.to_flat_state(state.params))["up", "kernel"]
        spec = kernel.get_value().sharding.spec
        assert spec[0] == "fsdp"
        assert ("model" in spec) == ("model" in mesh.axis_names)
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_annotations_with_an_axis_that_is_not_automatic_are_refused():
    class Annotated(nnx.Linear):
        splits_sequences = True

    def annotated(rngs):
        metadata = {"out_sharding": (None, "tensor")}
        return Annotated(16, 64, kernel_metadata=metadata, rngs=rngs)

    fsdp = jshard.FSDP(jshard.make_mesh(tensor=2))
    with pytest.raises(
        jshard.UserError, match=r"'kernel' is annotated with .* 'tensor'"
    ):
        fsdp.abstract_state(annotated, optax.sgd(1.0))


def test_tensor_across_hosts_warns_of_what_crosses_the_network():
    with pytest.warns(UserWarning, match="tensor=4 spans 2 hosts, so the activations"):
        jshard.make_mesh(tensor=4, devices=devices_of(0, 0, 1, 1))
