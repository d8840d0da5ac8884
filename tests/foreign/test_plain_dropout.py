"""nnx.Dropout as it is: its masks depend on the mesh, and have the right statistics."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from compare import EXAMPLES
from filled import filled
from parity import make_mesh

RATE, WIDTH, LAYERS, STEPS = 0.25, 64, 2, 2


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(WIDTH))
        self.dropout = nnx.Dropout(RATE, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x * self.scale[...])


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(model: Any, x: jax.Array) -> Any:
    """Counts what is kept, and in how many places rows of all devices agree."""
    y = model(x)
    kept = y != 0
    axes = jax.sharding.get_abstract_mesh().manual_axes
    rows = jax.lax.all_gather(kept, axes, tiled=True)
    alike = jnp.mean(rows[:, None] == kept[None], axis=-1)
    whole = {
        "kept": jshard.Mean(jnp.sum(kept), kept.size),
        "alike": jshard.Mean(jnp.sum(alike) - len(x), alike.size - len(x)),
        "twins": jshard.Mean(jnp.sum(alike > 0.9) - len(x), 1),
    }
    return jshard.Mean(jnp.sum(y), y.size), whole


@pytest.mark.quick("units-8-1")
@pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("units", [(), (Layer,)], ids=["root", "units"])
def test_masks_drop_what_they_should_and_differ_by_example_and_step(
    units, devices, accumulate
):
    mesh = make_mesh(2, 2) if devices == 4 else make_mesh(1, devices)
    if accumulate > 1 and devices == 3:
        accumulate = 2
    policy = jshard.Policy(min_shard_elements=0, accumulate=accumulate)
    fsdp = jshard.FSDP(mesh, policy, units=units)
    tx = optax.sgd(0.0)
    state = fsdp.from_model(filled(lambda: Model(nnx.Rngs(0)), spread=0.0), tx)
    step = fsdp.train_step(loss_fn, tx)
    batch = fsdp.shard_batch(np.ones((EXAMPLES, WIDTH), "f4"))
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        keep = (1 - RATE) ** LAYERS
        # Five standard deviations of what independent masks give.
        deviation = np.sqrt(keep * (1 - keep) / (EXAMPLES * WIDTH))
        assert abs(float(metrics["kept"]) - keep) < 5 * deviation
        np.testing.assert_allclose(
            metrics["loss"], metrics["kept"] / keep, rtol=1e-5
        )  # what is kept is scaled
        assert float(metrics["twins"]) == 0
        expected = keep**2 + (1 - keep) ** 2
        assert abs(float(metrics["alike"]) - expected) < 0.05
        losses.append(float(metrics["loss"]))
    assert losses[0] != losses[1]
