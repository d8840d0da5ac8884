"""Masks of Dropout: which key an example's has, on meshes, in parts and in stages."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jshard
from jshard.nn import dropout
from jshard.sharding.collectives.microbatch import microbatch
from jshard.sharding.layout.values import random_streams
from jshard.sharding.settings.in_stages import in_stages
from jshard.sharding.settings.mesh import batch_spec, split_sequences

RATE, SHAPE = 0.25, (16, 4, 3)


def make(**options: Any) -> jshard.Dropout:
    return jshard.Dropout(RATE, rngs=nnx.Rngs(dropout=7), **options)


def by_definition(count: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Where values are kept: an example's key is that of the call and its index."""
    key = jax.random.fold_in(make().key[...], count)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(shape[0]))
    draw = lambda key: jax.random.bernoulli(key, 1 - RATE, shape[1:])
    return np.asarray(jax.jit(jax.vmap(draw))(keys))


def kept(mesh: Any, parts: int = 1) -> np.ndarray:
    """What the second call keeps of ones, on a mesh and in micro-batches."""

    def local(x: jax.Array) -> jax.Array:
        outputs = []
        for index, part in enumerate(jnp.split(x, parts)):
            module = make()
            module.count.set_value(jnp.uint32(1))
            with split_sequences(), microbatch(index, parts):
                outputs.append(module(part))
        return jnp.concatenate(outputs)

    spec = batch_spec(mesh, sequence=True)
    run = jax.shard_map(
        local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    values = np.asarray(jax.jit(run)(jnp.ones(SHAPE)))
    assert set(np.unique(values)) == {np.float32(0), np.float32(1 / (1 - RATE))}
    return values > 0


@pytest.mark.core
def test_masks_are_bitwise_equal_on_every_mesh_and_without_one():
    want = by_definition(1)
    assert 0.1 < np.mean(~want) < 0.4
    module, drop = make(), nnx.jit(lambda module, x: module(x))
    for count in range(2):
        got = np.asarray(drop(module, jnp.ones(SHAPE)))
        np.testing.assert_array_equal(got > 0, by_definition(count))
    meshes = [jshard.make_mesh(context=2, replica=2)]
    meshes += [jshard.make_mesh(context=2, tensor=2)]
    for mesh in meshes:
        np.testing.assert_array_equal(kept(mesh), want)
    np.testing.assert_array_equal(
        kept(jshard.make_mesh(replica=2, devices=jax.devices()[:4]), 2), want
    )


def test_examples_in_stages_of_a_pipeline_have_their_place_in_the_batch():
    # Replicas are outermost, then stages: a stage has rows of a device of each stage.
    mesh = jshard.make_mesh(replica=2, fsdp=2, devices=jax.devices()[:4])

    def local(own: jax.Array) -> jax.Array:
        with in_stages(3):
            return dropout.in_batch(own, 6)[None]

    spec = jax.sharding.PartitionSpec(("replica", "fsdp"))
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=spec,
        check_vma=False,
    )
    got = np.asarray(jax.jit(run)(jnp.arange(6, dtype=jnp.uint32)))
    # Examples in order, by replica, stage, device of the stage, and row.
    places = np.arange(24).reshape(2, 3, 2, 2)
    np.testing.assert_array_equal(got, places.transpose(0, 2, 1, 3).reshape(4, 6))


def test_a_value_is_kept_or_dropped_in_its_own_dtype():
    module = make()
    x = jnp.full((2, 8), 3, jnp.bfloat16)
    y = module(x)
    assert y.dtype == jnp.bfloat16
    assert set(np.unique(np.asarray(y, np.float32))) == {0, 4}
    vector = make()(jnp.ones(16))  # an example is a number
    np.testing.assert_array_equal(np.asarray(vector) > 0, by_definition(0, (16,)))


def test_nothing_is_dropped_or_counted_when_deterministic_or_at_rate_0():
    for module in (make(deterministic=True), jshard.Dropout(0.0, rngs=nnx.Rngs(0))):
        x = jnp.ones((4, 4))
        assert module(x) is x
        assert int(module.count[...]) == 0
    assert not make().deterministic
    for rate in (-0.1, 1.0):
        with pytest.raises(ValueError, match=f"rate={rate} must be in"):
            jshard.Dropout(rate, rngs=nnx.Rngs(0))


# What a step does to random streams.


class Streams(nnx.Module):
    """A stream, a key of the model's own, a Dropout, and what is not random."""

    def __init__(self):
        self.stream = nnx.Rngs(noise=0).noise.fork()
        self.key = nnx.Variable(jax.random.key(1))
        self.dropout = make()
        self.mean = nnx.BatchStat(jnp.zeros(()))


def values(state: Any) -> dict[str, Any]:
    """Values by path, of keys their words."""
    found = {}
    for path, variable in nnx.to_flat_state(state):
        value = variable.get_value()
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        data = jax.random.key_data(value) if is_key else value
        found[".".join(map(str, path))] = np.asarray(data).tolist()
    return found


def test_streams_whose_draws_depend_on_the_mesh_are_named():
    assert random_streams.plain_streams(Streams()) == ["key", "stream"]
    assert random_streams.plain_streams(make()) == []
    state = nnx.state(Streams())
    named = {".".join(map(str, p)): v for p, v in nnx.to_flat_state(state)}
    random = {name for name, x in named.items() if random_streams.is_random(x)}
    assert random == {"stream.key", "stream.count", "dropout.key", "dropout.count"}


def test_a_micro_batch_leaves_counts_and_keys_to_the_last():
    before: Any = nnx.state(Streams())
    model = Streams()
    model.stream()
    model.key[...] = jax.random.key(5)
    model.dropout(jnp.ones((2, 2)))
    model.mean[...] = jnp.ones(())
    after: Any = nnx.state(model)
    drawn = {"stream.count", "key", "dropout.count"}
    old, new = values(before), values(after)
    for last in (False, jnp.asarray(False), True, jnp.asarray(True)):
        got = values(random_streams.merge_state(before, after, last=last))
        want = {
            name: old[name] if name in drawn and not last else new[name] for name in new
        }
        assert got == want
    # The key of a Dropout never moves.
    other = jax.tree.map(lambda x: x, after)
    other["dropout"]["key"] = after["dropout"]["key"].copy(jax.random.key(9))
    assert values(random_streams.merge_state(before, other)) == new


def test_keys_are_folded_for_a_device_and_stored_without_it():
    before: Any = nnx.state(Streams())
    number = jnp.uint32(3)
    given: Any = random_streams.fold_streams(before, number)
    fold = lambda key, *numbers: jax.random.key_data(
        jax.random.fold_in(key, numbers[0])
        if len(numbers) == 1
        else jax.random.fold_in(jax.random.fold_in(key, numbers[0]), numbers[1])
    ).tolist()
    want = values(before)
    own = before["key"].get_value()
    want["key"] = fold(own, 0, 3)
    bare: Any = random_streams.fold_streams(nnx.State({"key": own}), number)["key"]
    assert jax.random.key_data(bare).tolist() == want["key"]
    want["stream.key"] = fold(before["stream"]["key"].get_value(), 0, 3)
    assert values(given) == want
    # Without a mesh there is no device to agree with.
    mesh = jshard.make_mesh(devices=jax.devices()[:2])

    def unfolded(replace: bool) -> Any:
        def local(replaced: jax.Array) -> Any:
            after: Any = jax.tree.map(lambda x: x, given)
            other = jnp.where(
                replaced[0] & replace, jax.random.key(8), given["key"].get_value()
            )
            after["key"] = given["key"].copy(other)
            state: Any = random_streams.unfold_streams(before, given, after)
            return jax.random.key_data(state["key"].get_value())

        spec = jax.sharding.PartitionSpec("fsdp")
        run = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=spec,
            out_specs=jax.sharding.PartitionSpec(),
            check_vma=False,
        )
        # The model of one device alone replaces its key.
        return np.asarray(jax.jit(run)(jnp.array([False, True]))).tolist()

    assert unfolded(False) == values(before)["key"]
    assert unfolded(True) == fold(own, 2**32 - 1)


def test_numbers_of_examples_are_dropped_where_sequences_are_split():
    graphdef, state = nnx.split(jshard.Dropout(0.5, rngs=nnx.Rngs(0)))

    def run(state, x_B):
        with split_sequences():
            return nnx.merge(graphdef, state)(x_B)

    mesh, same = jshard.make_mesh(context=2), PartitionSpec()
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=same, out_specs=same, check_vma=False
    )
    assert jax.eval_shape(mapped, state, jnp.ones(6)).shape == (6,)


def test_noise_on_embeddings_is_of_neftunes_size_on_every_mesh_and_in_training_alone():
    noise = dropout.EmbeddingNoise(5.0, rngs=nnx.Rngs(dropout=7))
    draw = nnx.jit(lambda module, x: module(x))
    first, second = (np.asarray(draw(noise, jnp.zeros(SHAPE))) for _ in range(2))
    assert not np.any(first == second)
    most = 5 / np.sqrt(SHAPE[1] * SHAPE[2])
    assert 0.9 * most < np.abs(first).max() <= most
    assert first.std() == pytest.approx(most / np.sqrt(3), rel=0.1)
    mesh = jshard.make_mesh(context=2, replica=2)
    spec = batch_spec(mesh, sequence=True)

    def local(x: jax.Array) -> jax.Array:
        with split_sequences():
            return dropout.EmbeddingNoise(5.0, rngs=nnx.Rngs(dropout=7))(x)

    run = jax.shard_map(
        local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    np.testing.assert_array_equal(jax.jit(run)(jnp.zeros(SHAPE)), first)
    noise.eval()
    assert not np.any(noise(jnp.zeros(SHAPE)))
