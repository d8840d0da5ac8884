"""jshard.nn.cross_entropy of a head whose columns are split, and how chunks are cut."""

import importlib
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from test_cross_entropy import arguments, plain, squared_plain

import jshard
from jshard.nn import cross_entropy, token_log_probs
from jshard.sharding.settings.mesh import TENSOR, split_sequences

# The module, not the function of its name.
cross_entropy_module = importlib.import_module("jshard.nn.cross_entropy")


def test_a_split_head_with_padding_has_the_losses_and_gradients_of_the_whole(x64):
    mesh = jshard.make_mesh(tensor=2, devices=jax.devices()[:2])
    x, head, targets, weights = arguments((3, 4), 5, 7, "any", jnp.float64)
    targets, weights = np.array(targets), np.array(weights)
    weights[0, 1] = 0
    # The first and the last column of each device.
    targets[[0, 1, 2, 2], [0, 1, 2, 3]] = [4, 3, 6, 0]
    padded = np.pad(head, [(0, 0), (0, 1)], constant_values=9)
    options: dict[str, Any] = {"chunk": 4, "soft_cap": 3.0, "vocabulary": 7}

    def total(x, head, targets, weights):
        return cross_entropy(x, head, targets, weights, **options).total

    def squared(x, head, targets, weights):
        log_probs = token_log_probs(x, head, targets, **options)
        return jnp.sum(jnp.where(weights > 0, log_probs, 0) ** 2)

    def of_all(*args):
        found = []
        for fn in (total, squared):
            value, grads = jax.value_and_grad(fn, argnums=(0, 1, 3))(*args)
            found.append((jax.lax.psum(value, TENSOR), grads))
        uneven = lambda head: (
            (1 + jax.lax.axis_index(TENSOR)) * total(args[0], head, *args[2:])
        )
        return [x for x, _ in found], [x for _, x in found], jax.grad(uneven)(args[1])

    def local(*args):
        with split_sequences():
            return of_all(*args)

    split = P(None, TENSOR)
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=split,
        out_specs=([P(), P()], [(split, split, split)] * 2, split),
        check_vma=False,
    )
    odd = np.array(x)
    odd[0, 1] = np.inf  # of weight 0
    values, grads, uneven = jax.jit(run)(odd, padded, targets, weights)
    for value, (dx, dhead, dweights), fn in zip(
        values, grads, (capped_plain, squared_plain), strict=True
    ):
        want, (want_x, want_head, want_weights) = jax.jit(
            jax.value_and_grad(fn, argnums=(0, 1, 3))
        )(x, head, targets, weights)
        np.testing.assert_allclose(value, want, rtol=1e-12)
        np.testing.assert_allclose(dx, want_x, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(dhead[:, :7], want_head, rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(dhead[:, 7], 0)
        np.testing.assert_array_equal(dweights[0, 1], 0)
        want_weights = np.array(want_weights)
        want_weights[0, 1] = 0
        np.testing.assert_allclose(dweights, want_weights, rtol=1e-9, atol=1e-12)
    assert np.isnan(uneven).all()  # devices that do not agree on what follows


def capped_plain(x, head, targets, weights):
    logits = 3 * jnp.tanh(x @ head / 3)
    return plain(logits, jnp.eye(head.shape[1], dtype=head.dtype), targets, weights)


SMOOTHED = {"label_smoothing": 0.1, "z_loss": 0.01}


def smoothed_plain(x, head, targets, weights):
    """PyTorch's smoothing of labels, and PaLM's z-loss, by way of all logits."""
    logits = 3 * jnp.tanh(x @ head / 3)
    V, spread = head.shape[1], SMOOTHED["label_smoothing"]
    labels = (1 - spread) * jax.nn.one_hot(targets, V) + spread / V
    losses = optax.softmax_cross_entropy(logits, labels)
    losses += SMOOTHED["z_loss"] * jax.nn.logsumexp(logits, axis=-1) ** 2
    return jnp.sum(losses * weights)


def test_smoothing_and_z_loss_are_those_of_all_logits_of_a_whole_or_split_head(x64):
    mesh = jshard.make_mesh(tensor=2, devices=jax.devices()[:2])
    args = arguments((3, 4), 5, 7, "any", jnp.float64)
    x, head, *rest = args

    def total(*args):
        options: Any = {"chunk": 5, "soft_cap": 3.0, "vocabulary": 7, **SMOOTHED}
        return cross_entropy(*args, **options).total

    def local(*args):
        with split_sequences():
            value, grads = jax.value_and_grad(total, argnums=(0, 1, 3))(*args)
            return jax.lax.psum(value, TENSOR), grads

    want = jax.jit(jax.value_and_grad(smoothed_plain, argnums=(0, 1, 3)))(*args)
    got = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 3)))(*args)
    chex.assert_trees_all_close(got, want, rtol=1e-12, atol=1e-12)
    split = P(None, TENSOR)
    out = (P(), (split, split, split))
    run = jax.shard_map(
        local, mesh=mesh, in_specs=split, out_specs=out, check_vma=False
    )
    padded = np.pad(head, [(0, 0), (0, 1)], constant_values=9)
    value, (dx, dhead, dweights) = jax.jit(run)(x, padded, *rest)
    got = value, (dx, dhead[:, :7], dweights)
    chex.assert_trees_all_close(got, want, rtol=1e-9, atol=1e-12)
    with pytest.raises(jshard.UserError, match=r"label_smoothing=1\.0 must be in"):
        cross_entropy(*args, chunk=5, label_smoothing=1.0)
    with pytest.raises(jshard.UserError, match="z_loss=-1 at least 0"):
        cross_entropy(*args, chunk=5, z_loss=-1)


@pytest.mark.parametrize(
    ("devices", "columns", "vocabulary", "fits"),
    [
        (1, 24, 24, True),
        (1, 24, 48, False),
        (2, 24, 48, True),
        (2, 24, 25, True),  # a column on the second device
        (2, 24, 24, True),  # the whole head on each
        (2, 24, 49, False),
        (3, 24, 48, False),  # none on the third
        (3, 24, 49, True),
    ],
)
def test_the_columns_of_a_head_are_all_or_a_devices(devices, columns, vocabulary, fits):
    mesh = AbstractMesh((devices,), (TENSOR,), (AxisType.Auto,))

    def local(x, head, targets):
        with split_sequences():
            return token_log_probs(x, head, targets, chunk=2, vocabulary=vocabulary)

    run = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    args = (
        jax.ShapeDtypeStruct((2, 3, 4), jnp.float32),
        jax.ShapeDtypeStruct((4, columns), jnp.float32),
        jax.ShapeDtypeStruct((2, 3), jnp.int32),
    )
    if fits:
        assert jax.eval_shape(run, *args).shape == (2, 3)
        return
    said = rf"vocabulary={vocabulary} is neither the head's {columns} columns nor"
    with pytest.raises(jshard.UserError, match=f"{said} those of {devices} devices"):
        jax.eval_shape(run, *args)


@pytest.mark.parametrize(
    ("tokens", "chunk", "shape"),
    [(10, 4, (3, 4)), (9, 4, (3, 3)), (8, 4, (2, 4)), (3, 7, (1, 3)), (1, 1, (1, 1))],
)
def test_chunks_are_equal_and_as_few_as_fit(tokens, chunk, shape):
    x = np.arange(1.0, tokens + 1)
    got = cross_entropy_module._in_chunks(chunk, jnp.asarray(x))
    assert got.shape == shape
    want = np.pad(x, (0, got.size - tokens))
    np.testing.assert_array_equal(got.reshape(-1), want)
