"""The order in which XLA runs a step, compiled for absent H100s.

What the replayed figures rest on: in every layer's loop computation runs beside each
gather and scatter.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

import jshard
from h100 import h100s
from jshard.plan import hlo, tracing_for
from jshard.plan.cost.kernel_work import work
from jshard.plan.cost.timeline import replay
from jshard.plan.cost.transfers import Transfer, transfer
from jshard.plan.fit.hardware import GPUS
from jshard.recipes import llama
from jshard.sharding.settings.mesh import BATCH
from jshard.system.compat.xla_options import GATHERS_LATE

pytestmark = pytest.mark.h100

# Two layers' loops and what is around them are the same with any number of layers.
LAYERS = 16
SMALL = 1 << 20  # bytes; sums of scalars, and norms
SEQUENCE = 6144  # no weight and no shard of weights is as large as an activation


@functools.cache
def compiled(
    gpus: int,
    remat: Any,
    prefetch: bool | None = None,
    replica: int = 1,
    unroll: bool = False,
) -> Any:
    """Llama 2 7B with fewer layers, one sequence a GPU."""
    mesh = h100s(gpus, replica=replica)
    config = llama.get_config("2-7b")
    config.model.num_layers = LAYERS
    config.model.sequence_length = SEQUENCE
    precision = jshard.Precision(compute="bfloat16")
    policy = jshard.Policy(
        remat=remat, prefetch=prefetch, unroll=unroll, precision=precision
    )
    fsdp, optimizer = jshard.FSDP(mesh, policy), llama.make_optimizer(config)
    state = fsdp.abstract_state(functools.partial(llama.make_model, config), optimizer)
    sharding = NamedSharding(mesh, BATCH)

    def array(dtype):
        shape = (gpus, config.model.sequence_length)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    tokens, weights = array(jnp.int32), array(jnp.float32)
    batch = {"inputs": tokens, "targets": tokens, "weights": weights}
    step = fsdp.train_step(llama.loss_fn, optimizer)
    with tracing_for(GPUS["h100"]):
        return step.trace(state, batch).lower().compile()


@functools.cache
def schedule(
    gpus: int, remat: str, replica: int = 1, unroll: bool = False
) -> hlo.Module:
    """Its program, in the order in which it runs."""
    program = compiled(gpus, remat, replica=replica, unroll=unroll)
    return hlo.parse(str(program.as_text()))


def loops(module: hlo.Module) -> list[hlo.Computation]:
    """The bodies of the loops that move weights: forward and backward of the layers."""
    bodies = [
        module.body(x)
        for computation in module.computations.values()
        for x in computation.instructions
        if x.opcode == "while"
    ]
    return [body for body in bodies if large(module, body)]


def large(module: hlo.Module, body: hlo.Computation) -> dict[str, Transfer]:
    """The collectives of weights and gradients, by name."""
    moved = {x.name: transfer(module, body, x, 1, 1) for x in body.instructions}
    return {
        name: found
        for name, found in moved.items()
        if found is not None and found.wire_bytes > SMALL
    }


def check_products_beside(module: hlo.Module, body: hlo.Computation) -> None:
    """A matrix product runs between the start and the done of every collective."""
    order = {x.name: i for i, x in enumerate(body.instructions)}
    products = [
        order[x.name]
        for x in body.instructions
        if x.opcode in ("fusion", "custom-call") and work(module, body, x).flops
    ]
    assert len(products) > 10
    for name in large(module, body):
        (done,) = body.users(name)
        assert done.opcode.endswith("-done"), f"{name} is synchronous"
        beside = [i for i in products if order[name] < i < order[done.name]]
        assert beside, f"nothing runs beside {name}"


CASES = [(8, "full"), (8, "dots"), (64, "full"), (64, "dots")]


@pytest.mark.parametrize(("gpus", "remat"), CASES)
def test_matrix_products_run_beside_every_gather_and_scatter_of_a_layer(gpus, remat):
    module = schedule(gpus, remat)
    forward, backward = loops(module)
    kinds = [
        sorted({t.kind for t in large(module, body).values()})
        for body in (forward, backward)
    ]
    assert kinds == [["all-gather"], ["all-gather", "reduce-scatter"]]
    check_products_beside(module, forward)
    check_products_beside(module, backward)


@pytest.mark.parametrize(("gpus", "remat"), CASES)
def test_a_layers_scatter_starts_once_the_gather_beside_it_has_ended(gpus, remat):
    module = schedule(gpus, remat)
    _, backward = loops(module)
    order = {x.name: i for i, x in enumerate(backward.instructions)}
    moved = large(module, backward)
    spans = [(order[x], order[backward.users(x)[0].name]) for x in moved]
    if GATHERS_LATE:  # otherwise both start early enough at once
        assert all(end < start for (_, end), (start, _) in itertools.pairwise(spans))


def test_on_a_hybrid_mesh_they_run_beside_the_sums_over_copies_too():
    module = schedule(64, "full", replica=8)
    forward, backward = loops(module)
    assert "all-reduce" in {t.kind for t in large(module, backward).values()}
    check_products_beside(module, forward)
    check_products_beside(module, backward)


@pytest.mark.parametrize(("gpus", "remat"), CASES)
def test_only_the_first_gather_and_the_last_scatter_may_be_synchronous(gpus, remat):
    module = schedule(gpus, remat)
    timeline = replay(module, GPUS["h100"], gpus)
    kinds = ("all-gather", "reduce-scatter")
    moved = [e for e in timeline.events if e.kind in kinds and e.bytes > SMALL]
    # Both are of the first layer: nothing can run beside them.
    first, last = moved[0], max(moved, key=lambda e: e.start)
    assert (first.kind, last.kind) == ("all-gather", "reduce-scatter")
    alone = {*timeline.synchronous} - {first.name, last.name}
    assert not {e.name for e in moved} & alone


@pytest.mark.parametrize(("gpus", "remat"), CASES)
def test_a_layer_of_a_loop_is_one_gather_a_pass_and_one_scatter(gpus, remat):
    module = schedule(gpus, remat)
    for body in loops(module):
        moved = [t.kind for t in large(module, body).values()]
        # XLA unrolls the loops by two.
        assert all(moved.count(kind) == 2 for kind in set(moved))


@pytest.mark.parametrize(("gpus", "remat"), CASES)
def test_no_loop_copies_the_weights_or_the_gradients_that_it_carries(gpus, remat):
    module = schedule(gpus, remat)
    for body in loops(module):
        (carried,) = (x for x in body.instructions if x.opcode == "parameter")
        copied = [x for x in body.instructions if x.opcode == "copy"]
        sizes = {array.size for array in carried.arrays} - {1, SEQUENCE * 4096}
        assert {4096 * 4096, 4096 * 11008, 4096 // gpus * LAYERS} < sizes
        assert not [x for x in copied for array in x.arrays if array.size in sizes]


@pytest.mark.parametrize(("gpus", "remat"), CASES[2:])
def test_no_layer_but_the_first_and_the_last_waits_for_its_weights(gpus, remat):
    timeline = replay(schedule(gpus, remat), GPUS["h100"], gpus)
    waits = [
        gap
        for gap in timeline.gaps
        if gap.waits_for.stream == "collectives" and gap.waits_for.bytes > SMALL
    ]
    loops = [gap for gap in waits if "while/body" in gap.waits_for.source]
    # The first gather of the forward loop is issued with the first layer's own.
    assert sum(gap.seconds for gap in loops) < 1e-3
    assert len(waits) < 8


@pytest.mark.parametrize(
    ("gpus", "remat"), [pytest.param(8, "full", marks=pytest.mark.slow), (64, "dots")]
)
def test_without_a_loop_a_step_is_faster_hides_as_much_and_needs_no_more(gpus, remat):
    loop, straight = (
        replay(schedule(gpus, remat, unroll=unroll), GPUS["h100"], gpus)
        for unroll in (False, True)
    )
    assert straight.floor < (0.995 if remat == "full" else 0.98) * loop.floor
    assert straight.exposed < loop.exposed + 1e-3
    most, least = (
        compiled(gpus, remat, unroll=unroll).memory_analysis().temp_size_in_bytes
        for unroll in (False, True)
    )
    assert least < 1.02 * most


def test_working_ahead_costs_a_layers_weights_and_gradients_at_most():
    config = llama.get_config("2-7b").model
    attention, mlp = 4 * config.width**2, 3 * config.width * config.hidden
    layer = 2 * (attention + mlp)  # bytes in bfloat16
    ahead, in_turn = (
        compiled(64, "full", prefetch).memory_analysis().temp_size_in_bytes
        for prefetch in (None, False)
    )
    assert ahead - in_turn < 2 * layer
