"""A step again on other devices: the same bits, or who computed others."""

import dataclasses
import gc
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
import tiny_axes
from filled import filled
from flipped import Flip, Flipping, Model, loss_fn, rows
from jshard.sharding.step.replay.bits import hash_bits
from jshard.sharding.step.replay.replayed import Difference, Replay
from jshard.sharding.step.replay.rolled import (
    distances,
    move,
    move_and_free,
    rolled_mesh,
)
from jshard.sharding.step.replay.sent import Event, Loop
from jshard.sharding.step.replay.verdict import Computation, differs, judge

KINDS = {"float32": jnp.uint32, "bfloat16": jnp.uint16, "int8": jnp.uint8}


@pytest.mark.parametrize("dtype", KINDS)
def test_each_bit_and_each_place_changes_the_hash(dtype):
    bits = np.random.default_rng(0).integers(0, 2**7, (3, 5)).astype(KINDS[dtype])
    size = bits.itemsize * 8
    others = np.repeat(bits[None], 1 + bits.size * size, axis=0)
    for number in range(bits.size * size):
        others[1 + number].reshape(-1)[number // size] ^= 1 << number % size
    swapped = np.concatenate([others, bits[None, ::-1]])
    arrays = jax.lax.bitcast_convert_type(jnp.asarray(swapped), jnp.dtype(dtype))
    hashes = np.asarray(jax.jit(lambda x: hash_bits(x, 1))(arrays))
    assert len({tuple(words) for words in hashes.tolist()}) == len(swapped)


def test_each_layer_has_the_hash_that_it_has_alone():
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    both = hash_bits(jnp.asarray(x), 1)
    np.testing.assert_array_equal(both[1], hash_bits(jnp.asarray(x[1])))


EVENTS = [
    Event("sent", "later", (2,)),
    Event("sent", "turns", (1, Loop(3, reverse=True), 0)),
    Event("gradient", "w", (3,), (2,)),
]


def computed(distance: int, *changes: tuple[int, int, int]) -> Computation:
    """Words of four places; each change is (place, hash, value)."""
    words = np.zeros((4, 6, 2), np.uint32)
    for place, number, value in changes:
        words[place, number] = value
    return Computation(distance, words.reshape(4, -1))


@pytest.mark.parametrize(
    ("given", "kind", "places", "first"),
    [
        # Device 2 was wrong once; others got its values later.
        ([computed(0, (2, 1, 7), (0, 0, 7), (1, 4, 7)), computed(1), computed(2),
          computed(0)], "device", (2,), "turns, turn 0"),
        # It is always: in each computation it is in another place.
        ([computed(0, (2, 3, 7)), computed(1, (1, 3, 8)), computed(2, (0, 3, 9)),
          computed(0, (2, 3, 6))], "device", (2,), "turns, turn 2"),
        # The same devices compute something else each time.
        ([computed(0, (1, 0, 1)), computed(1, (1, 0, 2)), computed(2, (1, 0, 3)),
          computed(0, (1, 0, 4))], "random", (0, 1, 2, 3)[1:], "later"),
        # All agree with themselves alone.
        ([computed(0, (1, 0, 1)), computed(1, (1, 0, 2)), computed(2, (1, 0, 3)),
          computed(0, (1, 0, 1))], "open", (1, 2, 3), "later"),
        # All devices got what differs, out of a sum.
        ([computed(0, *((i, 5, 1) for i in range(4))), computed(1), computed(2),
          computed(0)], "open", (0, 1, 2, 3), "w, layer 1"),
    ],
)  # fmt: skip
def test_the_first_difference_names_the_device_that_is_alone(
    given, kind, places, first
):
    verdict = judge(EVENTS, given)
    assert (verdict.kind, verdict.places, verdict.first) == (kind, places, first)


def mesh_of(number: int, **sizes: Any) -> Any:
    return jshard.make_mesh(**sizes, devices=jax.devices()[:number])


def test_a_step_moves_to_the_next_devices_and_then_further():
    assert distances(mesh_of(1)) == []
    assert distances(mesh_of(2)) == [1]
    assert distances(mesh_of(4)) == [1, 2]


def test_each_shard_moves_to_another_device_with_its_bits():
    mesh = mesh_of(4, replica=2)
    place = jax.NamedSharding(mesh, jax.P(("replica", "fsdp")))
    x = jax.device_put(np.arange(8, dtype=np.float32), place)
    # A step, by which CPUs order what is sent, moves along.
    moved, _ = move([x, jnp.int32(3)], mesh, 1)
    assert moved.sharding.mesh == rolled_mesh(mesh, 1)
    np.testing.assert_array_equal(np.asarray(moved), np.asarray(x))
    on = lambda x: [s.device.id for s in sorted(x.addressable_shards, key=_start)]
    assert (on(x), on(moved)) == ([0, 1, 2, 3], [1, 2, 3, 0])


def _start(shard: Any) -> int:
    return shard.index[0].start or 0


def test_one_device_has_nobody_to_exchange_with():
    fsdp = jshard.FSDP(mesh_of(1))
    with pytest.raises(jshard.UserError, match="the mesh has one"):
        Replay(fsdp, loss_fn, optax.sgd(0.1))


class Watched:
    """A replay on a mesh, of a state and a batch."""

    def __init__(
        self, number: int, *, stacked: bool = False, layers: int = 3, **sizes: Any
    ):
        accumulate = sizes.pop("accumulate", 1)
        on_host = sizes.pop("on_host", False)
        policy = jshard.Policy(min_shard_elements=0, accumulate=accumulate)
        self.fsdp = jshard.FSDP(mesh_of(number, **sizes), policy)
        self.optimizer = optax.sgd(1e-2)
        make = lambda: Model(nnx.Rngs(0), layers, stacked=stacked)
        model = filled(make)
        for path, variable in nnx.to_flat_state(nnx.state(model)):
            if path[-1] == "number":
                own = path[1] if not stacked else np.arange(layers)
                variable.set_value(np.asarray(own, np.int32))
        self.state = self.fsdp.from_model(model, self.optimizer)
        self.batch = self.fsdp.shard_batch(rows())
        self.replay = Flipping(self.fsdp, loss_fn, self.optimizer, on_host=on_host)

    def find(self, fault: Flip | None) -> Difference | None:
        self.replay.fault, self.replay.made = fault, 0
        given = self.replay.source(self.state), self.batch
        other = self.replay.elsewhere(*given, self.replay.distances[0])
        here = self.replay.here(*given)[1]
        found = None
        if differs(here, other):
            found = self.replay.explain(*given, here, other)
        self.state = given[0].state()
        return found


@pytest.mark.slow
def test_a_bit_that_flips_on_a_device_is_found_there_and_none_else():
    watched = Watched(2, layers=1)
    assert watched.find(None) is None
    flip = Flip(device=1, site=1, layer=0, element=9, bit=30, computations=(0,))
    found = watched.find(flip)
    assert found is not None
    assert (found.verdict.kind, found.verdict.places) == ("device", (1,))
    assert found.verdict.arrays == ("blocks.0.down.kernel",)
    assert [x.distance for x in found.computations] == [0, 1, 0, 1]
    # Of two devices one that is always wrong is found, and cannot be told.
    found = watched.find(dataclasses.replace(flip, computations=(0, 1, 2, 3)))
    assert found is not None
    assert (found.verdict.kind, found.verdict.places) == ("open", (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "options"),
    [
        (8, {"replica": 2, "stacked": True}),
        (8, {"accumulate": 2, "stacked": True}),
        (4, {"replica": 2}),
        (8, {"replica": 8, "fsdp": 1}),
        (2, {"stacked": True}),
        (4, {"on_host": True}),
    ],
    ids=str,
)
def test_a_hundred_flipped_bits_are_all_found_and_named(number, options):
    watched = Watched(number, **options)
    assert watched.find(None) is None
    rng = np.random.default_rng(number)
    for index in range(100):
        # Once, here or elsewhere; or always, of two devices one then cannot say which.
        often = (0, 1, 2, 3, 4) if number > 2 else (0,)
        times = ((0,), (1,), often)[index % 3]
        device, site, layer = (int(rng.integers(n)) for n in (number, 2, 3))
        element, bit = int(rng.integers(128)), int(rng.integers(32))
        flip = Flip(device, site, layer, element, bit, times)
        found = watched.find(flip)
        assert found is not None, flip
        assert (found.verdict.kind, found.verdict.places) == ("device", (device,)), flip
        name = ("up", "down")[site]
        stack = f"blocks.{name}.kernel, layer {layer}", f"blocks.{layer}.{name}.kernel"
        assert found.verdict.arrays in ((), stack[:1], stack[1:]), flip
    assert watched.find(None) is None


def test_a_state_in_host_memory_is_on_the_devices_once_and_stays_the_same():
    mesh, optimizer = mesh_of(2), optax.sgd(1e-2)
    fsdp = jshard.FSDP(mesh, jshard.Policy(min_shard_elements=0))
    state = fsdp.from_model(Model(nnx.Rngs(0), 1, stacked=False), optimizer)
    before = jax.tree.map(np.array, state)
    replay = Replay(fsdp, loss_fn, optimizer, on_host=True)
    batch = fsdp.shard_batch(rows())

    def on_devices() -> int:
        gc.collect()
        found = [x for x in jax.live_arrays() if x.sharding.memory_kind == "device"]
        return sum(x.nbytes for x in found)

    full = on_devices()
    source = replay.source(state)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    size = sum(x.nbytes for x in jax.tree.leaves(before))
    assert on_devices() <= full - size
    other = replay.elsewhere(source, batch, 1)
    (after, _), here = replay.here(source, batch)
    assert not differs(here, other)
    assert int(after.step) == 1
    again = source.state()
    chex.assert_trees_all_equal(again, before)
    # What moves is freed where it was, and the step there takes its memory.
    moved = move_and_free(again, mesh, 1)
    assert all(x.is_deleted() for x in jax.tree.leaves(again))
    replay.program(1)(moved, move([batch, jnp.int32(0)], mesh, 1)[0])
    assert all(x.is_deleted() for x in jax.tree.leaves(moved))


@pytest.mark.slow
def test_a_replayed_step_is_the_step_and_leaves_its_state():
    watched = Watched(8, replica=2, stacked=True, accumulate=2)
    step = watched.fsdp.train_step(loss_fn, watched.optimizer)
    want = step(watched.state.copy(), watched.batch)
    source = watched.replay.source(watched.state)
    got, _ = watched.replay.here(source, watched.batch)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    assert int(watched.state.step) == 0


@pytest.mark.slow
def test_no_false_alarm_in_ten_thousand_steps():
    watched = Watched(4, layers=1)
    state, replay = watched.state, watched.replay
    rng = np.random.default_rng(0)
    for _ in range(10_000):
        batch = rows()
        batch["x"] = rng.normal(size=batch["x"].shape).astype(np.float32)
        batch = watched.fsdp.shard_batch(batch)
        source = replay.source(state)
        other = replay.elsewhere(source, batch, 1)
        (state, _), here = replay.here(source, batch)
        assert not differs(here, other), int(state.step)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 2, "fsdp": 2},
        {"context": 2, "replica": 2, "fsdp": 2},
        {"pipe": 2, "fsdp": 2},
    ],
    ids=str,
)
def test_other_axes_compute_the_same_bits_elsewhere(sizes):
    number = int(np.prod(list(sizes.values())))
    accumulate = 2 if "pipe" in sizes else 1
    fsdp = jshard.FSDP(
        mesh_of(number, **sizes),
        jshard.Policy(min_shard_elements=0, accumulate=accumulate),
        sequences=("x", "y", "weights"),
    )
    state = fsdp.from_model(tiny_axes.made(), tiny_axes.TX)
    batch = fsdp.shard_batch(tiny_axes.batch())
    replay = Replay(fsdp, tiny_axes.loss_fn, tiny_axes.TX)
    source = replay.source(state)
    assert replay.check(source, batch) is None
    other = {name: x + (name == "x") for name, x in tiny_axes.batch().items()}
    other = replay.here(source, fsdp.shard_batch(other))[1]
    assert differs(replay.here(source, batch)[1], other)
