"""Restores into every memory: averages and offload, on meshes, bit for bit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jshard
from checkpoints import (
    WIDTH,
    Model,
    check_equal,
    loss_fn,
    make_fsdp,
    restore_parameters,
    save_steps,
    values,
)
from jshard.export import export
from parity import every_pair

TX = optax.adamw(1e-2)
OFFLOADS = (None, "optimizer", "all")
MESHES = ((1, 8), (2, 4), (1, 1))


def make(ema_decay: float | None, offload: Any, mesh: tuple[int, int], **knobs):
    policy = jshard.Policy(
        min_shard_elements=0, ema_decay=ema_decay, offload=offload, **knobs
    )
    if mesh == (1, 1):
        return jshard.FSDP(jshard.make_mesh(devices=jax.devices()[:1]), policy)
    return make_fsdp(*mesh, policy)


def make_state(fsdp: jshard.FSDP, seed: int, tx: Any = TX) -> jshard.TrainState:
    """A state of random values, where its arrays belong."""
    rng = np.random.default_rng(seed)

    def one(x: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.device_put(
                jax.random.split(jax.random.key(seed), x.shape), x.sharding
            )
        value = np.abs(rng.normal(size=x.shape)) * 8
        return jax.device_put(value.astype(x.dtype), x.sharding)

    return jax.tree.map(one, fsdp.abstract_state(Model, tx))


def check_usable(
    fsdp: jshard.FSDP, state: jshard.TrainState, tx: Any = TX, *, traced: bool = True
) -> None:
    """Every array is where the policy has it, and a step takes the state.

    Args:
      fsdp: whose policy it is.
      state: what must be usable.
      tx: the optimizer.
      traced: whether a step is traced with it; else it has the types of a state.
    """
    abstract = fsdp.abstract_state(Model, tx)
    for x, want in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        kind = want.sharding.memory_kind
        assert kind in (None, x.sharding.memory_kind)
        assert (x.shape, x.dtype) == (want.shape, want.dtype)
        assert x.sharding.is_equivalent_to(want.sharding, x.ndim)
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    if not traced:
        return
    batch = fsdp.shard_batch(np.ones((16, WIDTH), np.float32))
    fsdp.train_step(loss_fn, tx).trace(state, batch)


@pytest.mark.quick("0.9-None-(2,4)")
@every_pair(ema_decay=(None, 0.9), offload=tuple(OFFLOADS), mesh=tuple(MESHES))
def test_a_state_restores_bit_for_bit_in_every_memory(case, tmp_path):
    ema_decay, offload, mesh = case.values()
    knobs = {"loss_scale": True, "precision": jshard.Precision(param="bfloat16")}
    tx = jshard.optim.bf16_moments(TX)
    fsdp = make(ema_decay, offload, mesh, **knobs)
    state = make_state(fsdp, 1, tx)
    save_steps(tmp_path, state, 1)
    state = dataclasses.replace(state, step=jnp.ones_like(state.step))
    for other in OFFLOADS:
        target = make(ema_decay, other, MESHES[MESHES.index(mesh) - 1], **knobs)
        with jshard.Checkpointer(tmp_path) as checkpointer:
            restored = checkpointer.restore(target.abstract_state(Model, tx))
        check_equal(restored, state)
        check_usable(target, restored, tx, traced=other == "all")


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "param"), [((1, 8), "float32"), ((2, 4), "bfloat16")])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_run_starts_from_parameters_with_averages_in_every_memory(
    offload, mesh, param, tmp_path
):
    knobs: dict[str, Any] = {"precision": jshard.Precision(param=param)}
    source, target = make(0.9, None, (1, 8), **knobs), make(0.9, offload, mesh, **knobs)
    saved = make_state(source, 1)
    save_steps(tmp_path, saved, 1)
    export(tmp_path, tmp_path / "exported")
    export(tmp_path, tmp_path / "averages", ema=True)
    want = values(saved)
    for path, optimizer in (
        (tmp_path, False),
        (tmp_path, True),
        (tmp_path / "exported", False),
    ):
        started = restore_parameters(path, make_state(target, 2), optimizer=optimizer)
        check_usable(target, started)
        got = values(started)
        for name in want:
            if name.startswith("params."):
                np.testing.assert_array_equal(got[name], want[name])
                average = name.replace("params", "ema", 1)
                params = want[average if optimizer else name].astype(np.float32)
                np.testing.assert_array_equal(got[average], params)
            if name.startswith("opt_state.") and optimizer:
                np.testing.assert_array_equal(got[name], want[name])
    averaged = restore_parameters(tmp_path / "averages", make_state(target, 2))
    check_usable(target, averaged)
    got, want = values(averaged), values(saved.with_ema_params())
    names = [name for name in want if name.startswith("params.")]
    assert names
    for name in names:
        np.testing.assert_array_equal(got[name], want[name])
