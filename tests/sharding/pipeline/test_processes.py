"""Two processes of four devices each, with the stages of a pipeline across them."""

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from processes import Processes

WIDTH, ROWS, STEPS, SAVED = 16, 32, 4, 2


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=jnp.float64)
        self.dropout = jshard.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(jnp.tanh(self.linear(x)))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = jshard.Stack(Layer, 5, rngs=rngs)
        self.head = jshard.Unit(
            nnx.Linear(WIDTH, 1, rngs=rngs, param_dtype=jnp.float64)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.layers(x))[:, 0]


def loss_fn(model: Any, batch: Any) -> jshard.Mean:
    error = model(batch["x"]) - batch["x"].sum(1)
    return jshard.Mean(jnp.sum(error**2), len(error))


def digest(fsdp: Any, state: Any) -> str:
    """Of all bits of a state, wherever they are."""
    leaves = jax.tree.leaves(fsdp.fetch((state.params, state.opt_state)))
    whole = b"".join(np.asarray(x).tobytes() for x in leaves)
    return hashlib.sha256(whole).hexdigest()


def train(
    folder: Path, pipe: int, killed_at: int | None = None, **policy: Any
) -> tuple[list[float], list[str]]:
    """Losses from the last checkpoint on, and digests of what is saved or restored."""
    jax.config.update("jax_enable_x64", True)  # in the threads that restore, too
    policy = {"min_shard_elements": 0, "accumulate": 4} | policy
    fsdp = jshard.FSDP(jshard.make_mesh(pipe=pipe), jshard.Policy(**policy))
    for stages in fsdp.mesh.devices[0].T if pipe > 1 else ():
        assert {device.process_index for device in stages} == {0, 1}
    tx, part = optax.adamw(1e-2), ROWS // jax.process_count()
    own = slice(part * jax.process_index(), part * (jax.process_index() + 1))
    step, losses, digests = fsdp.train_step(loss_fn, tx), [], []
    with jshard.Checkpointer(folder) as checkpointer:
        if checkpointer.steps():
            state = checkpointer.restore(fsdp.abstract_state(Model, tx))
            digests.append(digest(fsdp, state))
        else:
            state = fsdp.init(Model, tx)
        for seed in range(int(state.step), STEPS):
            x = np.random.default_rng(seed).normal(size=(ROWS, WIDTH))
            state, metrics = step(state, fsdp.shard_batch({"x": x[own]}))
            if seed == killed_at and jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            losses.append(float(metrics["loss"]))
            if seed + 1 == SAVED:
                checkpointer.save(state)
                checkpointer.wait()
                digests.append(digest(fsdp, state))
                (folder / f"bits-{jax.process_index()}").write_text(digests[-1])
    return losses, digests


@pytest.mark.slow
def test_a_pipeline_across_hosts_goes_on_in_other_stages_after_one_was_killed(tmp_path):
    with Processes(2, 4, tmp_path) as processes:
        whole, again = processes.call(train, tmp_path / "whole", 2, timeout=500)
    assert whole == again
    losses, _ = whole
    with Processes(2, 4, tmp_path) as processes:
        processes.start(train, tmp_path / "run", 2, killed_at=SAVED)
        assert processes.wait_for(1, 500) == -signal.SIGKILL
        processes.kill()
    saved = [(tmp_path / "run" / f"bits-{process}").read_text() for process in (0, 1)]
    assert saved[0] == saved[1]
    more = {"stages_per_device": 2, "accumulate": 2}
    for pipe, policy in ((4, {}), (2, more)):
        with Processes(2, 4, tmp_path) as processes:
            (found, restored), _ = processes.call(
                train, tmp_path / "run", pipe, timeout=500, **policy
            )
        assert restored == saved[:1]  # bit for bit
        np.testing.assert_allclose(found, losses[SAVED:], rtol=1e-12)
