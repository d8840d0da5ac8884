"""bf16_moments: rounding right on average, the same on every mesh, on shards."""

import functools
import importlib
import re
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import strategies as st
from jax import lax

import hlo
import jshard
from decoder import Sizes, lower_update, make_decoder, make_fsdp, values_like
from jshard.sharding.float8.random_bits import random_bits
from jshard.sharding.update.bf16_moments import round_to_bf16
from jshard.sharding.update.end_of_step import update
from jshard.sharding.update.whole_layers import sharded_update

# The module, not the function of its name.
bf16_moments = importlib.import_module("jshard.sharding.update.bf16_moments")
POLICY = jshard.Policy(min_shard_elements=0)
ALL_BITS = jnp.arange(2**16, dtype=jnp.uint16)
KEY = (jnp.uint32(1), jnp.uint32(2))
MAX = float(jnp.finfo(jnp.bfloat16).max)


def from_raw(raw: Any) -> np.ndarray:
    return np.asarray(raw, np.uint32).view(np.float32)


def as_raw(x: jax.Array) -> np.ndarray:
    """The bits of bfloat16 values; comparing these tells -0 from 0."""
    return np.asarray(x).view(np.uint16)


jitted_bits = jax.jit(random_bits, static_argnums=(1, 2))
jitted_rounding = jax.jit(round_to_bf16)


# The rounding itself. Values are made of their bits: XLA's CPUs flush subnormals.


@jax.jit
def round_with_all_bits(raw: jax.Array) -> jax.Array:
    x = jnp.full(2**16, lax.bitcast_convert_type(raw, jnp.float32))
    return lax.bitcast_convert_type(round_to_bf16(x, ALL_BITS), jnp.uint16)


@hypothesis.settings(max_examples=50)
@hypothesis.given(raw=st.integers(0, 0x7F7F_0000), negative=st.booleans())
@hypothesis.example(raw=1, negative=True)
@hypothesis.example(raw=0x0000_FFFF, negative=False)  # subnormal in bfloat16, too
@hypothesis.example(raw=0x3FFF_8000, negative=False)  # its neighbour is a power of two
def test_the_mean_over_all_bits_is_the_value_itself(raw, negative):
    raw += negative << 31
    rounded = np.asarray(round_with_all_bits(jnp.uint32(raw))).astype(np.uint32) << 16
    values, counts = np.unique(rounded.view(np.float32), return_counts=True)
    want = np.float64(np.uint32(raw).view(np.float32))
    # Only the two neighbours, so that float64 holds the sum exactly.
    assert len(values) <= 2
    assert np.sum(values.astype(np.float64) * counts) / 2**16 == want


def test_the_mean_of_many_roundings_is_the_value_within_the_central_limit():
    x = np.random.default_rng(0).normal(size=50).astype(np.float32)
    draws = 20_000
    bits = jitted_bits(KEY, (draws, 50), 0)
    rounded = jitted_rounding(np.broadcast_to(x, bits.shape), bits)
    error = np.mean(np.asarray(rounded, np.float64), axis=0) - x
    unit = 2.0 ** (np.floor(np.log2(np.abs(x))) - 7)
    # The standard deviation of one rounding is at most half a unit.
    assert np.max(np.abs(error) / unit) < 5 * 0.5 / np.sqrt(draws)


@pytest.mark.parametrize("bits", [0, 1, 0x7FFF, 0xFFFF])
def test_what_bfloat16_represents_stays_itself(bits):
    x = from_raw(np.arange(2**16, dtype=np.uint32) << 16)
    got = jitted_rounding(x, np.full(x.shape, bits, np.uint16))
    finite = ~np.isnan(x)
    np.testing.assert_array_equal(as_raw(got)[finite], np.arange(2**16)[finite])
    assert np.isnan(np.asarray(got, np.float32)[~finite]).all()


@pytest.mark.parametrize("bits", [0, 0x7FFF, 0xFFFF])
def test_finite_values_stay_finite_and_others_do_not_become_so(bits):
    # Among the NaNs one whose payload is cut off, and one that a carry makes -0.
    raw = [0x7F7F_FFFF, 0xFF7F_0001, 0x7F80_0000, 0xFF80_0000, 0x7F80_0001, 0x7FFF_FFFF]
    got = jitted_rounding(from_raw(raw), np.full(6, bits, np.uint16))
    want = [MAX, -MAX, np.inf, -np.inf, np.nan, np.nan]
    np.testing.assert_array_equal(
        np.asarray(got, np.float32), np.asarray(want, np.float32)
    )


# The random bits.


def bits_of(*words: int, shape: tuple[int, ...] = (1 << 16,), layer_dims: int = 0):
    first, second = map(np.uint32, words)
    return np.asarray(jitted_bits((first, second), shape, layer_dims))


@pytest.mark.parametrize("words", [(0, 0), (1, 0), (0, 1), (0xDEADBEEF, 0x12345678)])
def test_bits_are_uniform_and_neighbours_are_independent(words):
    bits = bits_of(*words)
    n = bits.size
    for byte in (bits >> 8, bits & 0xFF):
        counts = np.bincount(byte, minlength=256)
        chi_squared = np.sum((counts - n / 256) ** 2 / (n / 256))
        assert 150 < chi_squared < 380  # 255 degrees of freedom: 5 sigma
    other = [np.roll(bits, 1), np.roll(bits, 2), np.roll(bits, 256)]
    other += [bits_of(words[0] ^ 1, words[1]), bits_of(words[0], words[1] ^ 1)]
    for more in other:
        assert abs(np.corrcoef(bits, more)[0, 1]) < 5 / np.sqrt(n)


def test_bits_of_a_layer_are_those_of_its_key_alone():
    many = bits_of(1, 2, shape=(3, 2, 5, 7), layer_dims=2)
    fewer = bits_of(1, 2, shape=(2, 2, 5, 7), layer_dims=2)
    np.testing.assert_array_equal(many[:2], fewer)
    for i, j in np.ndindex(3, 2):
        key = functools.reduce(bf16_moments.fold, (i, j), KEY)
        np.testing.assert_array_equal(many[i, j], jitted_bits(key, (5, 7)))
    assert len({layer.tobytes() for layer in many.reshape(6, -1)}) == 6


# The transformation. optax.trace without decay keeps the gradient as its moment, so
# that what is stored is that gradient, rounded.

KEEP = optax.trace(0.0)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.matrix = nnx.Param(rngs.normal((16, 40)))


class Model(nnx.Module):
    """A Stack and a Unit."""

    def __init__(self, layers: int, rngs: nnx.Rngs):
        self.blocks = jshard.Stack(Layer, layers, rngs=rngs)
        self.head = jshard.Unit(Layer(rngs))


def make_params(layers: int) -> nnx.State:
    """Parameters whose layers have all the same values."""
    model = nnx.eval_shape(lambda: Model(layers, nnx.Rngs(0)))
    params = nnx.state(model, nnx.Param)
    matrix = np.asarray(values_like(np.zeros((16, 40))))
    return jax.tree.map(
        lambda x: jax.device_put(np.broadcast_to(matrix, x.shape)), params
    )


def rounded(tx: Any, grads: Any, steps: int = 1) -> dict[str, np.ndarray]:
    """The moments after some updates with the same gradients, by name, as bits."""
    state = tx.init(grads)
    for _ in range(steps):
        _, state = jax.jit(tx.update)(grads, state)
    moments = [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if leaf.dtype == jnp.bfloat16
    ]
    assert moments
    # Names from the parameter's on: per_layer keeps Stacks apart from the rest.
    return {re.sub(r"^.*\.trace", "", name): as_raw(x) for name, x in moments}


def differing(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Which part of all values differs."""
    assert a.keys() == b.keys()
    return float(np.mean(np.concatenate([(a[k] != b[k]).reshape(-1) for k in a])))


def test_the_bits_depend_on_seed_step_name_and_layer_and_on_nothing_else():
    grads = make_params(4)
    tx = jshard.optim.bf16_moments(KEEP)
    first = rounded(tx, grads)
    assert differing(first, rounded(tx, grads)) == 0
    assert (
        differing(first, rounded(jshard.optim.bf16_moments(KEEP, seed=1), grads)) > 0.2
    )
    assert differing(first, rounded(tx, grads, 2)) > 0.2
    # Layers have the same values here, and other bits.
    matrix = first["['blocks']['matrix'].value"]
    assert all(np.mean(matrix[0] != layer) > 0.2 for layer in matrix[1:])
    # Layer 1 is the same in a Stack of another depth.
    fewer = rounded(jshard.optim.bf16_moments(KEEP), make_params(2))
    np.testing.assert_array_equal(fewer["['blocks']['matrix'].value"], matrix[:2])


def test_names_tell_moments_of_equal_shape_apart():
    x = values_like(jnp.zeros((64, 64)))
    got = rounded(jshard.optim.bf16_moments(KEEP), {"a": x, "b": x})
    assert np.mean(got["['a']"] != got["['b']"]) > 0.2


def test_the_moments_of_a_parameter_are_rounded_apart():
    tx = jshard.optim.bf16_moments(optax.chain(KEEP, optax.identity(), KEEP))
    grads = make_params(2)
    state: Any = jax.jit(tx.update)(grads, tx.init(grads))[1].inner
    first, second = (as_raw(state[i].trace["head"]["matrix"][...]) for i in (0, 2))
    assert np.mean(first != second) > 0.2


# By default a test below compares a training step's update on meshes.
@pytest.mark.slow
@pytest.mark.parametrize("per_layer", [True, False])
def test_the_same_values_are_rounded_alike_on_every_mesh(per_layer):
    tx = jshard.optim.bf16_moments(KEEP)
    tx = jshard.optim.per_layer(tx) if per_layer else tx
    results = []
    for mesh in (
        jshard.make_mesh(devices=jax.devices()[:1]),
        jshard.make_mesh(),
        jshard.make_mesh(replica=2),
    ):
        fsdp = jshard.FSDP(mesh, POLICY)
        state = fsdp.abstract_state(functools.partial(Model, 4), tx)
        grads = jax.tree.map(
            lambda x, a: jax.device_put(x, a.sharding), make_params(4), state.params
        )
        with sharded_update(mesh, POLICY):
            results.append(rounded(tx, grads))
    assert differing(results[0], results[1]) == differing(results[0], results[2]) == 0


class Nested(nnx.Module):
    """Stacks of equal depth, one with Stacks in its layers, and a Unit."""

    def __init__(self, rngs: nnx.Rngs):
        self.deep = jshard.Stack(functools.partial(Model, 2), 3, rngs=rngs)
        self.plain = jshard.Stack(Layer, 3, rngs=rngs)
        self.head = jshard.Unit(Layer(rngs))


TWO_MOMENTS = functools.partial(optax.scale_by_adam, b1=0.5, b2=0.75)
ORDERS = {
    "alone": lambda: jshard.optim.bf16_moments(TWO_MOMENTS()),
    "around": lambda: jshard.optim.bf16_moments(jshard.optim.per_layer(TWO_MOMENTS())),
    "inside": lambda: jshard.optim.per_layer(jshard.optim.bf16_moments(TWO_MOMENTS())),
    "around a chain": lambda: jshard.optim.bf16_moments(
        optax.chain(optax.identity(), jshard.optim.per_layer(TWO_MOMENTS()))
    ),
    "in a mask": lambda: optax.masked(
        jshard.optim.per_layer(jshard.optim.bf16_moments(TWO_MOMENTS())), True
    ),
}
MESHES = {  # (replica, fsdp), offload
    "one device": ((1, 1), None),
    "sharded": ((1, 8), None),
    "hybrid": ((2, 4), None),
    "offloaded": ((1, 8), "optimizer"),
}


def moments_on(order: str, where: str) -> dict[str, np.ndarray]:
    """The moments after two updates of a training step, as bits, by name."""
    (replica, shards), offload = MESHES[where]
    mesh = jshard.make_mesh(
        replica=replica, fsdp=shards, devices=jax.devices()[: replica * shards]
    )
    policy = jshard.Policy(min_shard_elements=0, offload=offload)
    tx = ORDERS[order]()
    abstract = jshard.FSDP(mesh, policy).abstract_state(Nested, tx)
    put = lambda x, a: jax.device_put(np.asarray(x), a.sharding)
    params, opt_state = jax.tree.map(
        lambda a: put(np.zeros(a.shape, a.dtype), a),
        (abstract.params, abstract.opt_state),
    )
    grads = jax.tree.map(put, values_like(abstract.params), abstract.params)
    run = jax.jit(functools.partial(update, mesh, policy, tx))
    for step in range(2):
        params, opt_state, _ = run(
            (params, opt_state, None),
            (grads, jnp.float32(0), jnp.int32(step), None),
        )
    return {
        re.sub(r"^.*\.(mu|nu)", r"\1", jax.tree_util.keystr(path)): as_raw(x)
        for path, x in jax.tree_util.tree_leaves_with_path(opt_state)
        if x.dtype == jnp.bfloat16
    }


@functools.cache
def first_moments() -> dict[str, np.ndarray]:
    return moments_on("alone", "one device")


@pytest.mark.quick("inside-hybrid")
@pytest.mark.parametrize(
    ("order", "where"),
    [*((order, "one device") for order in ORDERS)]
    + [(order, where) for order in ("around", "inside") for where in [*MESHES][1:]],
)
def test_around_and_inside_per_layer_round_alike_on_every_mesh(order, where):
    got = moments_on(order, where)
    assert len(got) == 2 * 4
    assert differing(got, first_moments()) == 0


@pytest.mark.quick("False")
@pytest.mark.parametrize("inside", [True, False])
def test_bits_are_made_where_the_shards_are(inside):
    sizes = Sizes(width=64, hidden=128, vocab=256)
    tx = jshard.optim.bf16_moments(optax.adamw(1e-3))
    tx = jshard.optim.per_layer(tx) if inside else tx
    lowered, _ = lower_update(make_fsdp(POLICY), make_decoder(sizes), tx)
    text = lowered.compile().as_text() or ""
    assert "u16[" in text
    assert hlo.collectives(text) == []
    shard = sizes.layers * sizes.width * sizes.hidden // 8  # the largest
    sizes_found = [
        np.prod([int(n) for n in dims.split(",")])
        for dims in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text)
    ]
    assert max(sizes_found) == shard
