"""What a parameter's placement says of its shards, its sums and what a layer reads."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import jshard
from jshard.sharding.layout import memory_kinds
from jshard.sharding.layout.memory_kinds import check_memory, on_device, on_host
from jshard.sharding.layout.placement import Part, Placement, Sharding, Weight


def in_shards(fn, *shape: int, **sizes: int):
    """The shape that ``fn`` gives one device of such a mesh."""
    options: dict[str, Any] = {"replica": 1} | sizes
    count = int(np.prod(list(options.values())))
    mesh = jshard.make_mesh(**options, devices=jax.devices()[:count])
    spec = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.eval_shape(mapped, jax.ShapeDtypeStruct(shape, jnp.float32)).shape


@pytest.mark.parametrize(
    ("place", "padded"),
    [
        (Placement(Sharding(-2, exact=(-2, 9))), (12, 3)),  # four shards
        (
            Placement(Sharding(-2, exact=(-2, 9), parts=2)),
            (16, 3),
        ),  # each of which a stage splits in two
        (Placement(Sharding(-2, exact=(-2, 9), over=("fsdp",))), (10, 3)),
        (Placement(Sharding(-2)), (9, 3)),
        (
            Placement(Sharding(-2, exact=(-2, 9)), part=Part(splits=((-2, "tensor"),))),
            (9, 3),
        ),
        (
            Placement(
                Sharding(-2, exact=(-2, 9)),
                part=Part(splits=((-2, "tensor"),), whole=True),
            ),
            (12, 3),
        ),
        (
            Placement(Sharding(-2, exact=(-2, 9)), part=Part(splits=((-1, "tensor"),))),
            (12, 3),
        ),
        (Placement(Sharding(None, exact=(-2, 9))), (9, 3)),
    ],
    ids=str,
)
def test_gradients_are_padded_for_all_shards_of_all_stages(place, padded):
    assert in_shards(place.with_padding, 9, 3, fsdp=2, context=2) == padded
    assert in_shards(place.without_padding, *padded, fsdp=2, context=2) == (9, 3)


def test_padding_is_zeros_after_the_values():
    place, x = (
        Placement(Sharding(-1, exact=(-1, 3), over=("fsdp",))),
        jnp.arange(1.0, 7).reshape(2, 3),
    )
    mesh = jshard.make_mesh(fsdp=2, devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec()
    options = {"mesh": mesh, "in_specs": spec, "out_specs": spec, "check_vma": False}
    full = jax.jit(jax.shard_map(place.with_padding, **options))(x)
    np.testing.assert_array_equal(full, [[1, 2, 3, 0], [4, 5, 6, 0]])
    np.testing.assert_array_equal(place.without_padding(full), x)


def test_axes_are_those_that_shard_and_those_that_split():
    assert Placement(Sharding(-1, over=("fsdp",))).axes() == "fsdp"
    assert Placement(Sharding(-1, over=("fsdp", "context"))).axes() == (
        "fsdp",
        "context",
    )
    assert Placement(Sharding(None)).shards() == 1
    place = Placement(
        Sharding(-1, over=("fsdp",)),
        part=Part(splits=((-2, "tensor"),), on_rank_zero="expert"),
    )
    assert place.differs_over() == ("fsdp", "tensor", "expert")
    assert Placement(Sharding(None)).differs_over() == ()


def test_what_four_bits_stand_for_takes_no_gradient():
    """Which would be added to the tables of codes, and be the weight's own."""
    four_bit: Any = SimpleNamespace(decode=lambda full: 2 * full)
    place = Placement(
        Sharding(-1), weight=Weight(four_bit=four_bit, decoded_to=jnp.dtype("bfloat16"))
    )
    decoded, pullback = jax.vjp(place.decoded, jnp.ones(3))
    assert decoded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(decoded, [2, 2, 2])
    (grad,) = pullback(jnp.ones_like(decoded))
    np.testing.assert_array_equal(grad, np.zeros(3))
    assert Placement(Sharding(-1)).decoded(decoded) is decoded


def test_hosted_shards_are_fetched_and_others_stay_where_they_are():
    x = jnp.ones(4)
    assert Placement(Sharding(-1)).fetched(x) is x
    there = jax.device_put(x, jax.memory.Space.Host)
    assert on_host(there)
    assert not on_host(x)
    assert on_device(x) is x
    assert not on_host(on_device(there))
    assert not on_host(Placement(Sharding(-1, hosted=True)).fetched(there))
    assert on_host(Placement(Sharding(-1)).fetched(there))
    assert memory_kinds.typed_as_device(x) is x


def without_host_memory(*kinds: str) -> Any:
    memories = [SimpleNamespace(kind=kind) for kind in kinds]
    device = SimpleNamespace(addressable_memories=lambda: memories)
    return SimpleNamespace(devices=np.array([device], object))


def test_offloading_needs_memory_that_the_devices_have():
    moments = jshard.Policy(offload="optimizer")
    activations = jshard.Policy(remat=jshard.Offload("hidden"))
    check_memory(moments, jshard.make_mesh())
    check_memory(moments, AbstractMesh((1, 8), ("replica", "fsdp")))
    lacking = without_host_memory("device", "another")
    check_memory(jshard.Policy(), lacking)
    for policy, kinds, said in (
        (moments, ["device"], r"offload='optimizer' .*\(it has device\)"),
        (moments, [], r"\(it has none\)"),
        (activations, ["device"], r"jshard\.Offload needs memory"),
    ):
        with pytest.raises(jshard.UserError, match=said):
            check_memory(policy, without_host_memory(*kinds))
    # A topology that is only compiled for does not say what it has.
    check_memory(activations, without_host_memory())


@pytest.mark.parametrize(
    ("sizes", "place", "nbytes", "turns"),
    [
        ({"tensor": 2}, Placement(Sharding(-1)), 2**20, ["fsdp", "tensor"]),
        (
            {"expert": 2, "tensor": 2},
            Placement(Sharding(-1)),
            1,
            [("fsdp", "expert"), "tensor"],
        ),
        # Ports are then better shared.
        ({"tensor": 2}, Placement(Sharding(-1)), 2**20 + 1, [("fsdp", "tensor")]),
        # Two roundings would be two errors.
        (
            {"tensor": 2},
            Placement(Sharding(-1), weight=Weight(gather="int8")),
            1,
            [("fsdp", "tensor")],
        ),
        ({"tensor": 2}, Placement(Sharding(-1, over=("fsdp",))), 1, ["fsdp"]),
        ({"tensor": 2, "fsdp": 1}, Placement(Sharding(-1)), 1, [("fsdp", "tensor")]),
        ({"context": 2}, Placement(Sharding(-1)), 1, [("fsdp", "context")]),
    ],
    ids=str,
)
def test_small_arrays_are_scattered_along_tensor_last(sizes, place, nbytes, turns):
    found = []
    in_shards(
        lambda x: found.extend(place.axes_in_turn(nbytes)) or x,
        1,
        **{"fsdp": 2} | sizes,
    )
    assert found == turns
