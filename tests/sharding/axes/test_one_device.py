"""What a device computes with its part of a sequence, its heads and its features."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jshard
from filled import filled
from jshard.sharding.axes.context import on_whole_sequences, positions, whole_sequences
from jshard.sharding.axes.tensor import (
    norm_columns,
    own_columns,
    tensor_parallel,
    with_all_columns,
)
from jshard.sharding.settings.mesh import split_sequences

SEQUENCE = P(None, ("context", "tensor"))
FEATURES = P(None, None, "tensor")


def on_devices(fn: Callable, specs: Any, out: Any, *args: Any, **sizes: int) -> Any:
    """Runs ``fn`` on each device of a mesh whose steps split sequences."""
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh: Any = jshard.make_mesh(fsdp=1, devices=devices, **sizes)  # pyright: ignore
    drop = lambda spec: P(*(_within(names, mesh) for names in spec))
    specs, out = jax.tree.map(drop, (specs, out), is_leaf=lambda x: isinstance(x, P))

    def run(*args: Any) -> Any:
        with split_sequences():
            return fn(*args)

    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False
    )
    return jax.jit(mapped)(*args)


def _within(names: Any, mesh: Any) -> tuple[str, ...]:
    names = names if isinstance(names, tuple) else (names,)
    return tuple(name for name in names if name in mesh.axis_names)


def array(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("sizes", [{"context": 4}, {"context": 2, "tensor": 2}])
def test_positions_go_on_where_the_part_before_ends(sizes):
    got = on_devices(lambda: positions(3), (), P(("context", "tensor")), **sizes)
    np.testing.assert_array_equal(got, np.arange(12))


def test_whole_sequences_have_the_parts_in_their_order():
    x_BTD = array(2, 12, 3)
    both = lambda x: (whole_sequences(x), x)
    got = on_devices(both, SEQUENCE, (P(), SEQUENCE), x_BTD, context=2, tensor=2)
    for y_BTD in got:
        np.testing.assert_array_equal(y_BTD, x_BTD)


@pytest.mark.quick("3-3-sizes0", "8-2-sizes1", "6-2-sizes0", "4-1-sizes1")
@pytest.mark.parametrize("sizes", [{"context": 4}, {"context": 2}])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (4, 1), (6, 2), (3, 3)])
def test_each_head_attends_with_its_own_keys_sinks_and_documents(
    heads, kv_heads, sizes
):
    def attend(q_BTNH, k_BTKH, v_BTKH, ids_BT, sinks_N):
        # Depends on all that a head is given, and on the order of tokens.
        group = q_BTNH.shape[2] // k_BTKH.shape[2]
        k_BTNH, v_BTNH = (jnp.repeat(x, group, axis=2) for x in (k_BTKH, v_BTKH))
        before = jnp.cumsum(k_BTNH * ids_BT[..., None, None], axis=1)
        return q_BTNH * before + v_BTNH * sinks_N[:, None]

    q, k, v = (array(2, 8, n, 4) for n in (heads, kv_heads, kv_heads))
    ids, sinks = np.arange(16).reshape(2, 8), np.arange(1.0, heads + 1, dtype="f4")
    run = lambda *args: on_whole_sequences(attend, *args)
    specs = (*(SEQUENCE,) * 4, P())
    with warnings.catch_warnings(record=True) as filled_up:
        warnings.simplefilter("always")
        got = on_devices(run, specs, SEQUENCE, q, k, v, ids, sinks, **sizes)
    more = -heads % sizes["context"]
    words = f"does not divide the {heads} heads, so {more} more, of zeros, are computed"
    assert [words in str(x.message) for x in filled_up] == [True] * bool(more)
    want = jax.jit(attend)(q, k, v, ids, sinks)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def within(fn: Callable) -> Callable:
    """As in ``tensor_parallel``, where features are split, and sequences are not."""

    def run(*args: Any) -> Any:
        with split_sequences(("context",)):
            return fn(*args)

    return run


def test_a_norm_of_split_features_is_that_of_all_of_them():
    norm: Any = filled(lambda: nnx.RMSNorm(8, rngs=nnx.Rngs(0)))
    norm = jax.tree.map(jax.device_put, norm)
    x_BTE = array(2, 3, 8) * np.arange(8, dtype=np.float32)
    run = within(lambda x: norm_columns(norm, x))
    got = on_devices(run, FEATURES, FEATURES, x_BTE, tensor=4)
    np.testing.assert_allclose(got, norm(x_BTE), rtol=1e-6)
    np.testing.assert_array_equal(norm_columns(norm, x_BTE), norm(x_BTE))


def test_a_device_has_its_columns_of_each_fused_projection():
    layer: Any = filled(lambda: nnx.Linear(3, 12, rngs=nnx.Rngs(0)))
    layer = jax.tree.map(jax.device_put, layer)
    run = within(lambda x: own_columns(layer, [8, 4])(x))
    got = on_devices(run, P(), FEATURES, array(2, 5, 3), tensor=2)
    columns = [0, 1, 2, 3, 8, 9, 4, 5, 6, 7, 10, 11]
    want = np.asarray(layer(array(2, 5, 3)))[..., columns]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert own_columns(layer, [8, 4]) is layer


def test_a_split_head_gives_each_token_all_its_columns():
    x_BTD, head_DV = array(2, 8, 3), array(3, 6)
    run = lambda x, head: with_all_columns(lambda x: x @ head, x)
    specs = SEQUENCE, P(None, "tensor")
    got = on_devices(run, specs, SEQUENCE, x_BTD, head_DV, context=2, tensor=2)
    np.testing.assert_allclose(got, x_BTD @ head_DV, rtol=1e-5, atol=1e-5)


@pytest.mark.quick("True-3", "False-4")
@pytest.mark.parametrize("examples", [4, 3])
@pytest.mark.parametrize("on_gpus", [False, True])
def test_split_columns_and_rows_compute_and_learn_as_whole_ones(
    examples, on_gpus, monkeypatch
):
    """Also in two parts of the examples, of which one travels during the other."""
    monkeypatch.setattr("jshard.sharding.axes.tensor.on_gpus", lambda: on_gpus)

    def mlp(x_BTD, shift_BT, scale, up_DF, down_FD):
        return jnp.tanh(x_BTD @ up_DF + shift_BT[..., None]) @ down_FD * scale

    def local(x_BTD, shift_BT, scale, up_DF, down_FD, ct_BTD):
        def run(x_BTD, up_DF, down_FD):
            fn = lambda x, shift, *, scale: mlp(x, shift, scale, up_DF, down_FD)
            return tensor_parallel(fn, x_BTD, shift_BT, scale=scale, tokens=("shift",))

        y_BTD, pullback = jax.vjp(run, x_BTD, up_DF, down_FD)
        return y_BTD, pullback(ct_BTD)

    x, ct = array(examples, 8, 3), array(examples, 8, 3)[::-1]
    args = x, array(examples, 8), np.float32(0.5), array(3, 6), array(6, 3)
    of_weights = P(None, "tensor"), P("tensor")
    got = on_devices(
        local,
        (SEQUENCE, SEQUENCE, P(), *of_weights, SEQUENCE),
        (SEQUENCE, (SEQUENCE, *of_weights)),
        *args,
        ct,
        tensor=2,
    )
    whole = lambda x, up, down: mlp(x, *args[1:3], up, down)

    def learned(ct, *args):
        y, pullback = jax.vjp(whole, *args)
        return y, *pullback(ct)

    want = jax.jit(learned)(ct, x, *args[3:])
    for a, b in zip(jax.tree.leaves(got), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
