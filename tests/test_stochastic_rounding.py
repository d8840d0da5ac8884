"""bf16_moments: rounding right on average, the same on every mesh, on shards."""

import functools
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

import checkpoints
import hlo
import jshard
from decoder import PlainDecoder, Sizes, loss_fn, lower_update, make_decoder, make_fsdp
from jshard import stochastic_rounding
from jshard.optim import sharded_update
from jshard.restore import restore_state
from jshard.stochastic_rounding import Bf16MomentsState, random_bits, round_to_bf16
from jshard.training.config import complete
from jshard.training.recipe import find_recipe, open_recipe

pytestmark = pytest.mark.usefixtures("quick_compilation")

POLICY = jshard.Policy(min_shard_elements=0)
ALL_BITS = jnp.arange(2**16, dtype=jnp.uint16)
KEY = (jnp.uint32(1), jnp.uint32(2))
MAX = float(jnp.finfo(jnp.bfloat16).max)


def from_raw(raw: Any) -> jax.Array:
    return lax.bitcast_convert_type(jnp.asarray(raw, jnp.uint32), jnp.float32)


def as_raw(x: jax.Array) -> np.ndarray:
    """The bits of bfloat16 values; comparing these tells -0 from 0."""
    return np.asarray(lax.bitcast_convert_type(x, jnp.uint16))


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
    x = jnp.asarray(np.random.default_rng(0).normal(size=50), jnp.float32)
    draws = 20_000
    bits = random_bits(KEY, (draws, 50))
    rounded = round_to_bf16(jnp.broadcast_to(x, bits.shape), bits)
    error = np.mean(np.asarray(rounded, np.float64), axis=0) - np.asarray(x)
    unit = 2.0 ** (np.floor(np.log2(np.abs(x))) - 7)
    # The standard deviation of one rounding is at most half a unit.
    assert np.max(np.abs(error) / unit) < 5 * 0.5 / np.sqrt(draws)


@pytest.mark.parametrize("bits", [0, 1, 0x7FFF, 0xFFFF])
def test_what_bfloat16_represents_stays_itself(bits):
    x = from_raw(np.arange(2**16, dtype=np.uint32) << 16)
    got = round_to_bf16(x, jnp.full(x.shape, bits, jnp.uint16))
    finite = ~np.isnan(x)
    np.testing.assert_array_equal(as_raw(got)[finite], np.arange(2**16)[finite])
    assert np.isnan(np.asarray(got, np.float32)[~finite]).all()


@pytest.mark.parametrize("bits", [0, 0x7FFF, 0xFFFF])
def test_finite_values_stay_finite_and_others_do_not_become_so(bits):
    # Among the NaNs one whose payload is cut off, and one that a carry makes -0.
    raw = [0x7F7F_FFFF, 0xFF7F_0001, 0x7F80_0000, 0xFF80_0000, 0x7F80_0001, 0x7FFF_FFFF]
    got = round_to_bf16(from_raw(raw), jnp.full(6, bits, jnp.uint16))
    want = [MAX, -MAX, np.inf, -np.inf, np.nan, np.nan]
    np.testing.assert_array_equal(
        np.asarray(got, np.float32), np.asarray(want, np.float32)
    )


# The random bits.


def bits_of(*words: int, shape: tuple[int, ...] = (1 << 16,), layer_dims: int = 0):
    first, second = map(jnp.uint32, words)
    return np.asarray(random_bits((first, second), shape, layer_dims))


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
        key = functools.reduce(stochastic_rounding.fold, (i, j), KEY)
        np.testing.assert_array_equal(many[i, j], random_bits(key, (5, 7)))
    assert len({layer.tobytes() for layer in many.reshape(6, -1)}) == 6


# The transformation. optax.trace without decay keeps the gradient as its moment, so
# that what is stored is that gradient, rounded.

KEEP = optax.trace(0.0)


def values_like(tree: Any, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), "f4"), tree)


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
    params = nnx.state(Model(layers, nnx.Rngs(0)), nnx.Param)
    matrix = values_like(jnp.zeros((16, 40)))
    return jax.tree.map(lambda x: jnp.broadcast_to(matrix, x.shape), params)


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
    first = rounded(jshard.bf16_moments(KEEP), grads)
    assert differing(first, rounded(jshard.bf16_moments(KEEP), grads)) == 0
    assert differing(first, rounded(jshard.bf16_moments(KEEP, seed=1), grads)) > 0.2
    assert differing(first, rounded(jshard.bf16_moments(KEEP), grads, 2)) > 0.2
    # Layers have the same values here, and other bits.
    matrix = first["['blocks']['matrix'].value"]
    assert all(np.mean(matrix[0] != layer) > 0.2 for layer in matrix[1:])
    # Layer 1 is the same in a Stack of another depth.
    fewer = rounded(jshard.bf16_moments(KEEP), make_params(2))
    np.testing.assert_array_equal(fewer["['blocks']['matrix'].value"], matrix[:2])


def test_names_tell_moments_of_equal_shape_apart():
    x = values_like(jnp.zeros((64, 64)))
    got = rounded(jshard.bf16_moments(KEEP), {"a": x, "b": x})
    assert np.mean(got["['a']"] != got["['b']"]) > 0.2


def test_per_layer_inside_or_outside_rounds_alike():
    grads = make_params(3)
    together = rounded(jshard.bf16_moments(KEEP), grads)
    apart = rounded(jshard.per_layer(jshard.bf16_moments(KEEP)), grads)
    assert differing(together, apart) == 0


@pytest.mark.parametrize("per_layer", [True, False])
def test_the_same_values_are_rounded_alike_on_every_mesh(per_layer):
    tx = jshard.bf16_moments(KEEP)
    tx = jshard.per_layer(tx) if per_layer else tx
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


@pytest.mark.parametrize("inside", [True, False])
def test_bits_are_made_where_the_shards_are(inside):
    sizes = Sizes(width=64, hidden=128, vocab=256)
    tx = jshard.bf16_moments(optax.adamw(1e-3))
    tx = jshard.per_layer(tx) if inside else tx
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


# Other transformations around it and in it.


def leaves_by_name(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def moment(name: str) -> bool:
    return bool(re.search(r"\.(mu|nu|trace)\b", name))


def matrices(params: Any) -> Any:
    return nnx.map_state(lambda path, _: path[-1] == "kernel", params)


WRAPPED = {
    "alone": lambda: jshard.bf16_moments(optax.adamw(1e-3)),
    "around a chain": lambda: jshard.bf16_moments(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    ),
    "around per_layer": lambda: jshard.bf16_moments(jshard.per_layer(optax.lamb(1e-3))),
    "in per_layer": lambda: jshard.per_layer(jshard.bf16_moments(optax.lamb(1e-3))),
    "in per_layer, with matrices": lambda: jshard.per_layer(
        jshard.bf16_moments(optax.contrib.muon(1e-3))
    ),
    "around a mask": lambda: jshard.bf16_moments(
        optax.masked(optax.adamw(1e-3), matrices)
    ),
    "in a mask": lambda: optax.masked(jshard.bf16_moments(optax.adamw(1e-3)), matrices),
    "around hyperparameters": lambda: jshard.bf16_moments(
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)
    ),
    "in hyperparameters": lambda: optax.inject_hyperparams(
        lambda learning_rate: jshard.bf16_moments(optax.adamw(learning_rate))
    )(learning_rate=1e-3),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_moments_and_they_alone_are_bfloat16_and_sharded_like_parameters(name):
    fsdp, tx = make_fsdp(POLICY), WRAPPED[name]()
    lowered, state = lower_update(fsdp, make_decoder(Sizes()), tx)
    params, found = leaves_by_name(state.params), 0
    for path, leaf in leaves_by_name(state.opt_state).items():
        assert (leaf.dtype == jnp.bfloat16) == moment(path), path
        if moment(path):
            name = max(filter(path.endswith, params), key=len)
            assert leaf.sharding == params[name].sharding, path
            found += 1
    assert found >= 4
    # An update returns what it was given: the step can donate it.
    _, after = lowered.out_info
    kinds = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    assert kinds(after) == kinds(state.opt_state)


def test_moments_of_scalars_and_factored_statistics_stay_float32():
    params = {"scale": jnp.ones(()), "matrix": jnp.ones((256, 256))}
    adam: Any = jshard.bf16_moments(optax.adam(1e-3)).init(params).inner[0]
    assert adam.mu["scale"].dtype == jnp.float32
    assert adam.mu["matrix"].dtype == jnp.bfloat16
    factored = jshard.bf16_moments(optax.adafactor(1e-3)).init(params)
    dtypes = {x.dtype for x in jax.tree.leaves(factored) if x.size > 1}
    assert dtypes == {jnp.dtype("float32")}


def test_the_inner_update_sees_float32():
    seen = []

    def update(updates, state, params=None, *, value):
        seen.append((state.dtype, value))
        return updates, state * 0.5

    inner = optax.GradientTransformationExtraArgs(lambda params: params, update)
    tx = jshard.bf16_moments(inner)
    params = jnp.ones((4, 4), jnp.bfloat16)
    updates, state = tx.update(params, tx.init(params), params, value=3)
    assert seen == [(jnp.float32, 3)]
    assert state.inner.dtype == updates.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(state.inner, np.float32), 0.5)
    assert isinstance(state, Bf16MomentsState)
    assert int(state.step) == 1


def test_the_state_takes_half_the_memory():
    def held(tx: Any) -> int:
        state = make_fsdp(POLICY).abstract_state(make_decoder(Sizes()), tx)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.opt_state))

    adamw = optax.adamw(1e-3)
    counts = 4
    assert held(jshard.bf16_moments(adamw)) - 2 * counts == (held(adamw) - counts) / 2


# Why: training.


def to_nearest(x: jax.Array, bits: jax.Array) -> jax.Array:
    del bits
    # A mere cast in a loop XLA drops, as excess precision.
    return lax.reduce_precision(x, 8, 7).astype(jnp.bfloat16)


def test_a_second_moment_decays_and_rounded_to_nearest_it_is_stuck(monkeypatch):
    adam = optax.scale_by_adam(b2=0.999)
    steps, params = 700, jnp.ones((64, 64))

    def second_moment(tx: Any) -> float:
        _, state = tx.update(params, tx.init(params))
        update = lambda state, _: (tx.update(0 * params, state)[1], None)
        state, _ = jax.jit(lambda s: lax.scan(update, s, length=steps))(state)
        return float(jnp.mean(optax.tree.get(state, "nu")))

    want = 1e-3 * 0.999**steps
    assert second_moment(adam) == pytest.approx(want, rel=1e-3)
    assert second_moment(jshard.bf16_moments(adam)) == pytest.approx(want, rel=0.02)
    monkeypatch.setattr(stochastic_rounding, "round_to_bf16", to_nearest)
    assert second_moment(jshard.bf16_moments(adam)) == pytest.approx(1e-3, rel=0.01)


def train(tx: Any, steps: int = 1000) -> tuple[np.ndarray, nnx.State, nnx.State]:
    """Learns a permutation of tokens: losses, parameters, second moments."""
    sizes = Sizes(layers=1)
    graphdef, params = nnx.split(PlainDecoder(sizes, nnx.Rngs(0)), nnx.Param)
    permutation = jax.random.permutation(jax.random.key(1), sizes.vocab)

    def step(carry, key):
        params, state = carry
        tokens = jax.random.randint(key, (16, sizes.length), 0, sizes.vocab)
        batch = {"tokens": tokens, "targets": permutation[tokens]}
        loss = lambda p: loss_fn(nnx.merge(graphdef, p), batch).compute()
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    keys = jax.random.split(jax.random.key(0), steps)
    run = jax.jit(lambda carry: lax.scan(step, carry, keys))
    (params, state), losses = run((params, tx.init(params)))
    return np.asarray(losses), params, optax.tree.get(state, "nu")


@pytest.mark.slow
def test_adamw_follows_float32_where_rounding_to_nearest_does_not(monkeypatch):
    tx = optax.adamw(3e-3, b2=0.999)
    losses, params, nu = train(tx)
    assert losses[-1] < losses[0] / 1000

    def apart(losses_: np.ndarray, params_: nnx.State, nu_: nnx.State) -> tuple:
        """The differences in early losses, late ones, parameters and moments."""
        difference = np.abs(losses_ - losses)
        moved = jax.tree.map(jnp.subtract, params_, params)
        total = lambda tree: float(optax.tree.sum(optax.tree.cast(tree, "float32")))
        return (
            np.max(difference[:100]),
            np.max(difference[500:]) / np.mean(losses[500:]),
            float(optax.tree.norm(moved) / optax.tree.norm(params)),
            total(nu_) / total(nu),
        )

    early, late, moved, moments = apart(*train(jshard.bf16_moments(tx)))
    assert early < 2e-3
    assert late < 0.01
    assert moved < 0.01
    assert 0.97 < moments < 1.03
    monkeypatch.setattr(stochastic_rounding, "round_to_bf16", to_nearest)
    # Gradients are small by now; second moments are still those of large ones.
    _, late, moved, moments = apart(*train(jshard.bf16_moments(tx)))
    assert late > 0.05
    assert moved > 0.01
    assert moments > 1.5


# In checkpoints and recipes.


def test_a_checkpoint_restores_bfloat16_moments_on_another_mesh(tmp_path):
    tx = jshard.bf16_moments(optax.adamw(1e-2))
    fsdp, other = checkpoints.make_fsdp(), checkpoints.make_fsdp(2, 4)
    state = fsdp.init(checkpoints.Model, tx)
    moments = values_like(state.opt_state.inner[0].mu)
    state.opt_state.inner[0].mu.update(jax.tree.map(jnp.bfloat16, moments))
    checkpoints.save_steps(tmp_path, state, 1)
    abstract = other.abstract_state(checkpoints.Model, tx)
    restored = restore_state(tmp_path / "1", abstract)
    checkpoints.check_equal(restored, checkpoints.at_step(state, 1))
    assert {x.dtype for x in jax.tree.leaves(restored.opt_state.inner[0].nu)} == {
        jnp.dtype("bfloat16")
    }


@pytest.mark.parametrize("recipe", ["gpt.py", "gpt2_124m.py"])
def test_recipes_take_a_moment_dtype(recipe):
    with open_recipe(find_recipe(recipe)) as loaded:
        config = complete(loaded.get_config(), recipe)
        params = nnx.State({"kernel": nnx.Param(jnp.ones((2, 2)))})
        for dtype in ("float32", "bfloat16"):
            config.optimizer.moment_dtype = dtype
            state = loaded.make_optimizer(config).init(params)
            nu = optax.tree.get(state, "nu")
            assert nu["kernel"].dtype == dtype
        config.optimizer.moment_dtype = "float16"
        with pytest.raises(jshard.UserError, match="possible: float32, bfloat16"):
            loaded.make_optimizer(config)
