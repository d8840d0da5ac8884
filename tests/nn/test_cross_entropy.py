"""jshard.nn.cross_entropy against all logits at once, and what it costs."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import hlo
import jshard
import parity
from jshard.nn import cross_entropy, token_log_probs
from jshard.nn.cross_entropy import _logsumexp_in_one_pass

WEIGHTS = {
    "ones": lambda rng, shape: np.ones(shape),
    "zeros": lambda rng, shape: np.zeros(shape),
    "mask": lambda rng, shape: (rng.random(shape) < 0.5) * 1.0,
    "any": lambda rng, shape: rng.standard_normal(shape),
}


def plain(x_BTD, head_DV, targets_BT, weights_BT) -> jax.Array:
    """The total by way of all logits."""
    loss_BT = optax.softmax_cross_entropy_with_integer_labels(
        x_BTD @ head_DV, targets_BT
    )
    return jnp.sum(loss_BT * weights_BT)


@functools.cache
def capped(soft_cap: float | None) -> Callable[..., jax.Array]:
    """``plain`` with a soft cap of the logits."""

    def fn(x_BTD, head_DV, targets_BT, weights_BT) -> jax.Array:
        logits_BTV = x_BTD @ head_DV
        if soft_cap is not None:
            logits_BTV = soft_cap * jnp.tanh(logits_BTV / soft_cap)
        eye = jnp.eye(head_DV.shape[1], dtype=head_DV.dtype)
        return plain(logits_BTV, eye, targets_BT, weights_BT)

    return fn


def total(x_BTD, head_DV, targets_BT, weights_BT, chunk: int = 8) -> jax.Array:
    return cross_entropy(x_BTD, head_DV, targets_BT, weights_BT, chunk=chunk).total


@functools.cache
def fused(soft_cap: float | None) -> Callable[..., jax.Array]:
    """The same by jshard."""
    return lambda *args: cross_entropy(*args, chunk=7, soft_cap=soft_cap).total


@functools.cache  # tests with equal functions and shapes share what is traced
def jitted(fn: Callable) -> Callable:
    return jax.jit(jax.value_and_grad(fn, argnums=(0, 1, 3)))


def value_and_grads(fn: Callable, *args: Any) -> tuple:
    """The total and its gradients by features, head and weights."""
    return jitted(fn)(*args)


def arguments(
    shape: tuple[int, ...] = (4, 8),
    D: int = 8,
    V: int = 50,
    weights: str = "ones",
    dtype: Any = jnp.float32,
    seed: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    return (
        jax.device_put(np.asarray(rng.standard_normal((*shape, D)), dtype)),
        jax.device_put(np.asarray(rng.standard_normal((D, V)), dtype)),
        jax.device_put(rng.integers(0, V, shape)),
        jax.device_put(
            np.asarray(
                WEIGHTS[weights](rng, shape), jnp.promote_types(dtype, "float32")
            )
        ),
    )


@settings(max_examples=3)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 7)),
    D=st.integers(1, 6),
    V=st.integers(1, 9),
    chunk=st.integers(1, 30),
    weights=st.sampled_from(sorted(WEIGHTS)),
    seed=st.integers(0, 2**32 - 1),
)
def test_total_and_gradients_are_those_of_all_logits(shape, D, V, chunk, weights, seed):
    with jax.enable_x64(True):
        args = arguments(shape, D, V, weights, jnp.float64, seed)
        want = value_and_grads(plain, *args)

        def with_count(*args: jax.Array) -> tuple[jax.Array, Any]:
            mean = cross_entropy(*args, chunk=chunk)
            return mean.total, mean.count

        run = jax.value_and_grad(with_count, argnums=(0, 1, 3), has_aux=True)
        (got, count), grads = jax.jit(run)(*args)
        chex.assert_trees_all_close((got, grads), want, rtol=1e-12, atol=1e-12)
        assert count == np.sum(args[3])


@pytest.mark.quick("shape0")
@pytest.mark.parametrize("shape", [(), (2, 3, 5)])
def test_features_may_have_any_number_of_dimensions(x64, shape):
    args = arguments(shape, dtype=jnp.float64)
    got, want = jax.jit(total)(*args), jax.jit(plain)(*args)
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.quick("bfloat16")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_follows_float32(dtype):
    args = arguments((16, 16), 32, 200, "any", dtype)
    wide = [np.asarray(x, np.float32) if x.dtype == dtype else x for x in args]
    value, grads = value_and_grads(total, *args)
    want, want_grads = value_and_grads(plain, *wide)
    assert value.dtype == jnp.float32
    assert [g.dtype for g in grads] == [dtype, dtype, jnp.float32]
    # Inputs are the same and sums are in float32; gradients are rounded, twice.
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(grads[2], want_grads[2], rtol=1e-4, atol=1e-4)
    for got, want in zip(grads[:2], want_grads[:2], strict=True):
        error = np.max(np.abs(np.asarray(got, np.float32) - np.asarray(want)))
        assert error <= 2 * float(jnp.finfo(dtype).eps) * np.max(np.abs(want))


def test_a_float32_head_has_a_float32_gradient_below_bfloat16_features():
    x, head, targets, weights = arguments(dtype=jnp.bfloat16)
    _, (dx, dhead, _) = value_and_grads(
        total, x, np.asarray(head, np.float32), targets, weights
    )
    assert (dx.dtype, dhead.dtype) == (jnp.bfloat16, jnp.float32)
    dhead = np.asarray(dhead)
    assert not np.all(dhead == dhead.astype(jnp.bfloat16).astype(np.float32))


def test_the_heads_gradient_adds_up_in_float32():
    # A thousand equal terms: in bfloat16 the sum would stop at 256 times one of them.
    one = arguments((1, 1), dtype=jnp.bfloat16)
    many = [np.tile(np.asarray(x), (1000, *[1] * (x.ndim - 1))) for x in one]
    many[1] = np.asarray(one[1])
    _, (_, dhead, _) = value_and_grads(functools.partial(total, chunk=1), *many)
    _, (_, want, _) = value_and_grads(
        plain, *[np.asarray(x, np.float32) for x in one[:2]], *one[2:]
    )
    want = 1000 * np.asarray(want)
    np.testing.assert_allclose(np.asarray(dhead, np.float32), want, rtol=0.02)


@pytest.mark.parametrize("weight", [1e-7, 1.0, 1e4])
def test_float16_keeps_the_gradients_of_improbable_tokens(weight):
    # float16 has nothing between 0 and 6e-8, and nothing above 65504.
    x, targets = np.ones((1, 1, 1), np.float32), np.zeros((1, 1), np.int32)
    head = np.zeros((1, 33), np.float32)
    head[0, 0] = 17
    ones = np.ones((1, 1), np.float32)
    want = np.asarray(value_and_grads(plain, x, head, targets, ones)[1][1])
    assert np.all((want[0, 1:] > 3e-8) & (want[0, 1:] < 5e-8))
    low = x.astype(np.float16)
    _, (_, got, _) = value_and_grads(
        total, low, head, targets, np.float32(weight) * ones
    )
    np.testing.assert_allclose(np.asarray(got)[0, 1:], weight * want[0, 1:], rtol=1e-2)
    tokens: Any = low, targets

    def scaled(head: Any) -> Any:
        log_probs = token_log_probs(tokens[0], head, tokens[1], chunk=1)
        return -weight * jnp.sum(log_probs)

    of_head = jax.grad(scaled)
    got = np.asarray(jax.jit(of_head)(head))
    np.testing.assert_allclose(got[0, 1:], weight * want[0, 1:], rtol=1e-2)


def test_large_logits_do_not_overflow():
    x, head, targets, weights = arguments()
    large = np.float32(1e4)
    args = large * np.asarray(x), large * np.asarray(head), targets, weights
    got, want = value_and_grads(total, *args), value_and_grads(plain, *args)
    chex.assert_tree_all_finite(got)
    chex.assert_trees_all_close(got, want, rtol=1e-5)


def test_targets_may_be_bytes():
    x, head, targets, weights = arguments(V=300)
    targets = np.asarray(targets) % 200
    got = jax.jit(total)(x, head, targets.astype(np.uint8), weights)
    want = jax.jit(total)(x, head, targets, weights)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("target", [-100, 50])
def test_a_target_outside_the_vocabulary_is_nan_unless_its_weight_is_0(target):
    x, head, targets, weights = map(np.array, arguments())
    outside, masked = targets.copy(), weights.copy()
    outside[1, 2] = target
    assert np.isnan(value_and_grads(total, x, head, outside, weights)[0])
    masked[1, 2] = 0
    value, grads = value_and_grads(total, x, head, outside, masked)
    want, want_grads = value_and_grads(total, x, head, targets, masked)
    np.testing.assert_array_equal(value, want)
    chex.assert_trees_all_close(grads[:2], want_grads[:2])


@pytest.mark.quick("nan-0.5")
@pytest.mark.parametrize("soft_cap", [None, 0.5])
@pytest.mark.parametrize("feature", [np.inf, -np.inf, np.nan, 1e300])
def test_a_token_of_weight_0_adds_nothing_whatever_its_features(x64, feature, soft_cap):
    args = arguments(weights="mask", dtype=jnp.float64)
    x, head, targets, weights = map(np.asarray, args)
    counts = weights != 0
    args = x[counts], head, targets[counts], weights[counts]
    want, want_grads = value_and_grads(capped(soft_cap), *args)
    total_alone = jax.jit(fused(soft_cap))
    for width in (1, x.shape[-1]):  # one such feature, or all of them
        ignored = (weights == 0)[..., None] & (np.arange(x.shape[-1]) < width)
        odd = np.where(ignored, feature, x)
        value, grads = value_and_grads(fused(soft_cap), odd, head, targets, weights)
        grads = [np.asarray(grad) for grad in grads]
        np.testing.assert_allclose(value, want, rtol=1e-12)
        assert not np.any(grads[0][~counts])
        assert np.all(np.isfinite(grads[2]))
        got = grads[0][counts], grads[1], grads[2][counts]
        chex.assert_trees_all_close(got, want_grads, rtol=1e-12, atol=1e-12)
        alone = total_alone(odd, head, targets, weights)
        np.testing.assert_array_equal(alone, value)


@pytest.mark.quick("float16")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_adds_nothing_of_a_token_of_weight_0(dtype):
    x, head, targets, weights = arguments(weights="mask", dtype=dtype)
    ignored = (np.asarray(weights) == 0)[..., None]
    odd = np.where(ignored, np.asarray(np.inf, dtype), np.asarray(x))
    _, got = value_and_grads(total, odd, head, targets, weights)
    _, want = value_and_grads(total, x, head, targets, weights)
    chex.assert_trees_all_equal(got[:2], want[:2])
    assert np.all(np.isfinite(got[2]))


@pytest.mark.quick("wrt1-3", "wrt2-2-float32", "wrt4-1-bfloat16")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("wrt", "products"),
    [((), 1), ((0, 1), 3), ((0,), 2), ((1,), 2), ((3,), 1)],
)
def test_products_with_the_head(wrt, products, dtype):
    (B, T), D, V = shape, D, V = (4, 64), 16, 96
    args = arguments(shape, D, V, dtype=dtype)
    fn = functools.partial(total, chunk=64)
    fn = jax.value_and_grad(fn, argnums=wrt) if wrt else fn
    compiled = hlo.compile(jax.jit(fn).lower(*args))
    flops = sum(dot.flops for dot in hlo.dots(compiled.as_text()))
    assert flops == products * 2 * B * T * D * V


def test_gradients_on_a_mesh_are_those_of_a_devices_tokens(x64):
    args = arguments((8, 3), weights="mask", dtype=jnp.float64)
    mesh = jshard.make_mesh(replica=2)
    batch = P(("replica", "fsdp"))

    def grads(*args):
        of_x, of_head, of_weights = jax.grad(total, argnums=(0, 1, 3))(*args)
        return of_x, jax.lax.psum(of_head, ("replica", "fsdp")), of_weights

    specs = (batch, P(), batch, batch)
    out = (batch, P(), batch)
    sharded = jax.shard_map(
        grads, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False
    )
    want = value_and_grads(plain, *args)[1]
    chex.assert_trees_all_close(jax.jit(sharded)(*args), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": (7, 50)}, r"head has shape \(7, 50\); for x of shape \(4, 8, 8\)"),
        ({"head": (8,)}, r"head has shape \(8,\).*must be \(8, 'vocabulary'\)"),
        ({"targets": (4, 7)}, r"targets has shape \(4, 7\).*it must be \(4, 8\)"),
        ({"weights": (32,)}, r"weights has shape \(32,\).*it must be \(4, 8\)"),
        ({"x": (4, 0, 8), "targets": (4, 0), "weights": (4, 0)}, "is empty"),
    ],
)
def test_shapes_that_do_not_fit_are_a_users_error(change, message):
    shapes = {"x": (4, 8, 8), "head": (8, 50), "targets": (4, 8), "weights": (4, 8)}
    arrays = {k: jnp.zeros(shape) for k, shape in (shapes | change).items()}
    arrays["targets"] = arrays["targets"].astype(int)
    with pytest.raises(jshard.UserError, match=message):
        cross_entropy(*arrays.values(), chunk=8)


def test_dtypes_and_chunks_of_another_kind_are_a_users_error():
    x, head, targets, weights = arguments()
    with pytest.raises(jshard.UserError, match="targets is float32; it must hold"):
        cross_entropy(x, head, weights, weights, chunk=8)
    with pytest.raises(jshard.UserError, match="x is int32 and head is float32"):
        cross_entropy(x.astype(int), head, targets, weights, chunk=8)
    for chunk in (0, -1, 2.5):
        with pytest.raises(jshard.UserError, match=rf"chunk={chunk} must be"):
            cross_entropy(x, head, targets, weights, chunk=chunk)  # pyright: ignore[reportArgumentType]


def test_the_logarithm_of_a_sum_of_exponentials_takes_one_pass(x64):
    logits = 40 * np.random.default_rng(0).normal(size=(6, 1000))
    logits[0, 1:] = -np.inf
    logits[1] = -np.inf
    logits[2, 7] = np.nan
    found = jax.jit(_logsumexp_in_one_pass)(logits)
    expected = jax.jit(functools.partial(jax.nn.logsumexp, axis=1))(logits)
    np.testing.assert_allclose(found, expected, rtol=1e-14)


@pytest.mark.core
def test_a_soft_cap_is_one_of_the_logits(x64):
    args = arguments(weights="any", dtype=jnp.float64)
    found = (value_and_grads(fn(0.5), *args) for fn in (fused, capped))
    errors = jax.tree.map(parity.error, *found)
    assert max(jax.tree.leaves(errors)) <= 1e-9


def squared(x_BTD, head_DV, targets_BT, weights_BT) -> jax.Array:
    """A loss that is not linear in log-probabilities; some tokens do not count."""
    log_probs_BT = token_log_probs(x_BTD, head_DV, targets_BT, chunk=8, soft_cap=3.0)
    return jnp.sum(jnp.where(weights_BT > 0, log_probs_BT, 0) ** 2)


def squared_plain(x_BTD, head_DV, targets_BT, weights_BT) -> jax.Array:
    each = lambda x, target: capped(3.0)(x, head_DV, target, jnp.ones(()))
    loss_BT = jax.vmap(jax.vmap(each))(x_BTD, targets_BT)
    return jnp.sum(jnp.where(weights_BT > 0, loss_BT, 0) ** 2)


def test_log_probabilities_of_tokens_have_gradients_of_their_own(x64):
    args = arguments((3, 7), weights="mask", dtype=jnp.float64)
    fns = squared, squared_plain
    run, plain_run = (jax.jit(jax.value_and_grad(fn, argnums=(0, 1))) for fn in fns)
    got, want = run(*args), plain_run(*args)
    chex.assert_trees_all_close(got, want, rtol=1e-12, atol=1e-12)
    x_BTD, weights_BT = np.array(args[0]), np.array(args[3])
    x_BTD[0, 0], weights_BT[0, 0] = np.inf, 0  # of a token that does not count
    _, grads = run(x_BTD, *args[1:3], weights_BT)
    assert all(np.all(np.isfinite(x)) for x in grads)


def test_the_sum_of_log_probabilities_is_the_cross_entropy(x64):
    args = arguments(weights="any", dtype=jnp.bfloat16)

    def summed(x_BTD, head_DV, targets_BT, weights_BT):
        log_probs_BT = token_log_probs(x_BTD, head_DV, targets_BT, chunk=8)
        return -jnp.sum(log_probs_BT * weights_BT)

    got, want = value_and_grads(summed, *args), value_and_grads(total, *args)
    chex.assert_trees_all_equal_dtypes(got, want)
    chex.assert_trees_all_close(got, want, rtol=1e-5)


@pytest.mark.quick("wrt0", "wrt2")
@pytest.mark.parametrize(("wrt", "products"), [((), 1), ((0,), 3), ((0, 1), 4)])
def test_log_probabilities_take_one_product_more(wrt, products):
    B, T, D, V = 2, 8, 16, 64
    args = arguments((B, T), D=D, V=V)

    def fn(*args):
        return jnp.sum(token_log_probs(*args[:3], chunk=4) ** 2)

    compiled = hlo.compile(jax.jit(jax.grad(fn, wrt) if wrt else fn).lower(*args))
    flops = sum(dot.flops for dot in hlo.dots(compiled.as_text()))
    assert flops == products * 2 * B * T * D * V
