"""The start-up note says what the compiled program does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import hlo
import jshard
from jshard.models.gpt import GPT, GPTConfig
from jshard.plan.start_up import Traffic, describe, traffic

CONFIG = GPTConfig(
    vocab_size=64,
    sequence_length=16,
    num_layers=3,
    num_heads=2,
    width=32,
    loss_chunk=64,
)
OPTIMIZER = optax.sgd(0.1)


def make_model(rngs: nnx.Rngs) -> GPT:
    return GPT(CONFIG, rngs=rngs)


def loss_fn(model, batch):
    return model.loss(batch["tokens"], batch["tokens"], batch["weights"])


BATCH = {"tokens": np.zeros((32, 16), np.int32), "weights": np.ones((32, 16), "f4")}


@pytest.mark.parametrize(
    ("replica", "accumulate"),
    [
        (2, 2),
        *[pytest.param(*x, marks=pytest.mark.slow) for x in ((1, 1), (1, 2), (2, 1))],
    ],
)
def test_traffic_of_the_note_is_that_of_the_compiled_program(replica, accumulate):
    fsdp = jshard.FSDP(
        jshard.make_mesh(replica=replica), jshard.Policy(accumulate=accumulate)
    )
    state = fsdp.abstract_state(make_model, OPTIMIZER)
    step = fsdp.train_step(loss_fn, OPTIMIZER)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), BATCH)
    jaxpr, sizes = step.trace(state, batch).jaxpr.jaxpr, dict(fsdp.mesh.shape)
    noted = traffic(jaxpr, sizes)
    found = hlo.collectives(step.lower(state, batch).compile().as_text() or "")
    for kind in ("all-gather", "reduce-scatter"):
        compiled = [c for c in found if c.kind == kind and c.group > 1]
        count = sum(c.times * len(c.results) for c in compiled)
        assert count == noted[kind, "float32"].count > 0
        sent = sum(c.wire_bytes for c in compiled)
        assert sent == noted[kind, "float32"].wire_bytes
    if replica == 2:  # a host for each copy: only sums of gradients leave a host
        between = traffic(jaxpr, sizes, {"replica": 1})
        leaving = {kind for (kind, _), found in between.items() if found.network_bytes}
        assert leaving == {"all-reduce"}


@pytest.mark.parametrize(
    ("group", "crosses"), [(2, False), (4, False), (8, True)], ids=str
)
def test_what_stays_on_a_host_is_no_traffic_of_the_network(group, crosses):
    """Of an axis of eight devices, four of which share a host."""
    mesh = jshard.make_mesh()
    groups = np.arange(8).reshape(-1, group).tolist() if group < 8 else None
    gather = jax.shard_map(
        lambda x: jax.lax.all_gather(x, "fsdp", axis_index_groups=groups),
        mesh=mesh,
        in_specs=P("fsdp"),
        out_specs=P("fsdp"),
        check_vma=False,
    )
    jaxpr = jax.make_jaxpr(gather)(jnp.ones((8, 4))).jaxpr
    (found,) = traffic(jaxpr, dict(mesh.shape), {"fsdp": 4}).values()
    received = (group - 1) * 4 * 4
    assert found == Traffic(1, received, received * crosses)


def test_the_note_names_devices_sizes_what_is_replicated_and_why():
    class Odd(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.even = jshard.Unit(nnx.Linear(64, 64, use_bias=False, rngs=rngs))
            self.odd = jshard.Unit(nnx.Linear(71, 73, use_bias=False, rngs=rngs))
            self.scale = nnx.Param(jnp.ones(4))
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            y = self.odd(jnp.pad(x, [(0, 0), (0, 7)]))
            return self.dropout(self.even(x)) * self.scale.sum() + y.mean()

    def loss(model, batch):
        return jshard.Mean(jnp.sum(model(batch)), batch.size)

    fsdp = jshard.FSDP(jshard.make_mesh())
    state = fsdp.abstract_state(Odd, OPTIMIZER)
    step = fsdp.train_step(loss, OPTIMIZER)
    note = describe(fsdp, state, np.ones((8, 64), np.float32), step)
    total = 64 * 64 + 71 * 73 + 4
    assert "8 x cpu: replica 1 x fsdp 8" in note
    assert f"{total:,} ({64 * 64 // 8 + 72 * 73 // 8 + 4:,} per device)" in note
    assert f"padded          {73 * 4} B of zeros in the state" in note
    assert "8 does not divide odd.kernel" in note
    assert "fewer than 4096 elements per layer: scale" in note
    assert "dropout.rngs" in note
    wire = (64 * 64 + 72 * 73) * 4 * 7 / 8 / 1024
    assert f"reduce-scatters 2 per step, {wire:.1f} KiB per device, float32" in note


@pytest.mark.slow
def test_tracing_for_the_note_is_not_repeated_by_the_first_step():
    traces = []

    def counting_loss(model, batch):
        traces.append(1)
        return loss_fn(model, batch)

    fsdp = jshard.FSDP(jshard.make_mesh())
    state = fsdp.init(make_model, OPTIMIZER)
    step = fsdp.train_step(counting_loss, OPTIMIZER)
    describe(fsdp, fsdp.abstract_state(make_model, OPTIMIZER), BATCH, step)
    after_note = len(traces)
    step(state, fsdp.shard_batch(BATCH))
    assert len(traces) == after_note > 0
