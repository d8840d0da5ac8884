"""Copies that devices hold of the same array are compared, and the odd ones named."""

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from jshard.sharding.step.replay import replicas
from jshard.sharding.step.replay.replicas import Copies, bytes_sent, compare_copies


def state_on(number: int, replica: int) -> tuple[Any, Any]:
    mesh: Any = jshard.make_mesh(replica=replica, devices=jax.devices()[:number])
    fsdp = jshard.FSDP(mesh, jshard.Policy(min_shard_elements=0))
    linear = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    model = filled(lambda: nnx.Sequential(jshard.Unit(linear()), jshard.Unit(linear())))
    return mesh, fsdp.from_model(model, optax.adam(1e-3))


def flipped(x: jax.Array, place: int, element: int = 0, bit: int = 0) -> jax.Array:
    """Returns an array of which one device's shard has another bit."""
    shards = []
    for number, shard in enumerate(x.addressable_shards):
        values = np.array(shard.data)
        if number == place:
            words = values.reshape(-1).view(np.uint32)
            words[element % words.size] ^= np.uint32(1 << bit)
        shards.append(jax.device_put(values, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def with_flip(state: Any, name: str, *where: int) -> Any:
    named = {name: number for number, (name, _, _) in enumerate(arrays_of(state))}
    leaves, structure = jax.tree.flatten(state)
    leaves[named[name]] = flipped(leaves[named[name]], *where)
    return jax.tree.unflatten(structure, leaves)


def arrays_of(state: Any) -> Any:
    return replicas.named_arrays(state)


@pytest.fixture(scope="module")
def held():
    return state_on(4, 2)


def test_copies_that_are_equal_are_no_difference(held):
    assert compare_copies(*held) == []


def test_of_two_copies_both_are_named_and_of_more_the_odd_one(held):
    mesh, state = held
    spoiled = with_flip(state, "params.layers.1.kernel", 3, 5, 17)
    (found,) = compare_copies(mesh, spoiled)
    assert found == Copies("params.layers.1.kernel", (1, 3), ())
    spoiled = with_flip(state, "step", 2)
    assert compare_copies(mesh, spoiled) == [Copies("step", (2,), (0, 1, 3))]


def test_each_array_of_a_state_is_compared(held):
    mesh, state = held
    for name, x, _ in arrays_of(state):
        spoiled = with_flip(state, name, 1, x.size - 1, 31)
        assert [found.name for found in compare_copies(mesh, spoiled)] == [name]


def test_what_is_said_to_be_sent_is_what_the_program_sends(held):
    mesh, state = held
    leaves = [x for _, x, _ in arrays_of(state)]
    specs = tuple(x.sharding.spec for x in leaves)
    program = replicas._comparison(mesh, specs)
    text = program.lower(leaves, state.step).compile().as_text()
    sent = 0
    for dtype, shape in re.findall(r"= (\w+?)32\[([\d,]*)\]\S* all-reduce", text):
        assert dtype in "us"
        sent += 4 * int(np.prod([int(n) for n in shape.split(",") if n]))
    number, arrays, size = bytes_sent(mesh, state)
    assert (number, arrays) == (len(leaves), len(leaves))
    assert sent == size


@pytest.mark.slow
@pytest.mark.parametrize(("number", "replica"), [(8, 4), (8, 2), (4, 4), (2, 1)])
def test_a_hundred_flipped_bits_of_copies_are_all_named(number, replica):
    mesh, state = state_on(number, replica)
    arrays = [
        (name, x)
        for name, x, _ in arrays_of(state)
        if replicas.axes_of_copies(mesh, x.sharding.spec)
    ]
    rng = np.random.default_rng(0)
    for _ in range(100):
        name, x = arrays[int(rng.integers(len(arrays)))]
        place, bit = int(rng.integers(number)), int(rng.integers(32))
        spoiled = with_flip(state, name, place, int(rng.integers(99)), bit)
        (found,) = compare_copies(mesh, spoiled)
        assert found.name == name
        copies = number // len({str(s.index) for s in x.addressable_shards})
        assert place in found.wrong
        assert len(found.wrong) == (2 if copies == 2 else 1)
    assert compare_copies(mesh, dataclasses.replace(state)) == []
