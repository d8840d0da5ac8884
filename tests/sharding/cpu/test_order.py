"""Collectives have one order on all devices, in every program that jshard compiles."""

import functools
import itertools
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.extend.core.primitives import closed_call_p
from jax.sharding import AxisType, PartitionSpec

import jshard
from filled import filled
from jshard.models.gpt import GPT, GPTConfig, generate
from jshard.sharding.cpu.order import in_order
from jshard.system.compat.xla_options import BARRIERS_HOLD_ON_CPUS
from order import exchanging, unordered
from stress import Cell, check

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
CONFIG = GPTConfig(
    vocab_size=64, sequence_length=16, num_layers=3, num_heads=2, width=32, tied=False
)


class TwoStacks(nnx.Module):
    """Loops that do not read each other's results, and weights outside of them."""

    def __init__(self, rngs):
        def layer(rngs):
            init = nnx.initializers.orthogonal()
            return nnx.Linear(32, 32, kernel_init=init, rngs=rngs)

        self.left = jshard.Stack(layer, 3, rngs=rngs)
        self.right = jshard.Stack(layer, 3, rngs=rngs)
        axes: Any = ("replica", "fsdp")
        self.norm = nnx.BatchNorm(32, axis_name=axes, rngs=rngs)
        self.head = jshard.Unit(nnx.Linear(64, 64, rngs=rngs))

    def __call__(self, x):
        x = jnp.concatenate([self.left(self.norm(x)), self.right(x)], -1)
        return self.head(x)


def squared(model, batch):
    y = model(batch["x"])
    return jshard.Mean(jnp.sum(jnp.square(y)), y.size)


def gpt_loss(model, batch):
    x = batch["tokens"]
    return model.loss(x, jnp.roll(x, -1, 1), jnp.ones(x.shape))


def muon():
    """Loops around whole layers, and one that the partitioner fills: of the head."""
    return optax.chain(optax.clip_by_global_norm(1.0), jshard.optim.muon(1e-2))


MAKERS = {
    "gpt": (
        lambda rngs: GPT(CONFIG, rngs=rngs),
        gpt_loss,
        {"tokens": jnp.zeros((16, 16), int)},
    ),
    "two stacks": (TwoStacks, squared, {"x": jnp.ones((16, 32))}),
}
POLICIES = {
    "full": jshard.Policy(min_shard_elements=0),
    "dots": jshard.Policy(remat="dots", min_shard_elements=0),
    "none": jshard.Policy(remat="none", min_shard_elements=0),
    "prefetch": jshard.Policy(prefetch=True, min_shard_elements=0),
    "unroll": jshard.Policy(prefetch=True, unroll=True, min_shard_elements=0),
    "zero2": jshard.Policy(reshard_after_forward=False, min_shard_elements=0),
    "accumulate": jshard.Policy(accumulate=2, min_shard_elements=0),
    "no_sync": jshard.Policy(accumulate=2, defer_scatter=True, min_shard_elements=0),
    "root": jshard.Policy(reshard_root=True, min_shard_elements=0),
    "bf16 sums": jshard.Policy(
        precision=jshard.Precision(reduce="bfloat16", sum="float32"),
        min_shard_elements=0,
    ),
}
OPTIMIZERS = {
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "muon": muon,
    "lamb": lambda: jshard.optim.per_layer(optax.lamb(1e-3)),
    "adafactor": lambda: jshard.optim.per_layer(optax.adafactor(1e-3)),
    "every second": lambda: optax.MultiSteps(OPTIMIZERS["adamw"](), 2),
    "finite": lambda: optax.apply_if_finite(muon(), 3),
}


def setup(model, policy=POLICIES["full"], optimizer=None, **mesh):
    make_model, loss_fn, batch = MAKERS[model]
    fsdp = jshard.FSDP(jshard.make_mesh(**mesh), policy)
    optimizer = optimizer or optax.sgd(0.1)
    state = fsdp.abstract_state(make_model, optimizer)
    return fsdp, optimizer, state, loss_fn, fsdp.shard_batch(batch)


def assert_ordered(traced):
    text = traced.lower().compile(compiler_options=QUICK).as_text()
    assert exchanging(text)
    assert unordered(text) == []


@functools.cache
def traced_step(model, policy):
    fsdp, optimizer, state, loss_fn, batch = setup(model, POLICIES[policy])
    return fsdp.train_step(loss_fn, optimizer).trace(state, batch)


def _sample(model, policy):
    """The Stacks side by side are compiled soon; of the GPT a few do by default."""
    quick = model == "two stacks" or policy in ("full", "prefetch")
    marks = [] if quick else [pytest.mark.slow]
    if (model, policy) == ("two stacks", "full"):
        marks = [pytest.mark.core]
    return pytest.param(model, policy, marks=marks)


@pytest.mark.quick("two stacks-full")
@pytest.mark.parametrize(
    ("model", "policy"),
    list(itertools.starmap(_sample, itertools.product(MAKERS, POLICIES))),
)
def test_training_orders_its_collectives(model, policy):
    assert_ordered(traced_step(model, policy))


@pytest.mark.slow  # by default without replicas, above
@pytest.mark.parametrize("mesh", [{"replica": 2}, {"fsdp": 1, "replica": 8}], ids=str)
@pytest.mark.parametrize("policy", ["full", "bf16 sums"])
def test_training_orders_its_collectives_on_hybrid_meshes(policy, mesh):
    optimizer = OPTIMIZERS["adafactor"]()
    fsdp, optimizer, state, loss_fn, batch = setup(
        "two stacks", POLICIES[policy], optimizer, **mesh
    )
    assert_ordered(fsdp.train_step(loss_fn, optimizer).trace(state, batch))


@pytest.mark.slow  # by default two stacks, above
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_order_their_collectives(optimizer):
    optimizer = OPTIMIZERS[optimizer]()
    fsdp, optimizer, state, loss_fn, batch = setup("two stacks", optimizer=optimizer)
    assert_ordered(fsdp.train_step(loss_fn, optimizer).trace(state, batch))


def test_a_program_is_the_same_each_time_it_is_traced():
    """Or no cache would hold it, and processes could compile different ones."""
    once, again = traced_step, traced_step.__wrapped__
    texts = {trace("two stacks", "full").lower().as_text() for trace in (once, again)}
    assert len(texts) == 1


@pytest.mark.quick("two stacks")
@pytest.mark.parametrize("model", MAKERS)
def test_evaluation_orders_its_collectives(model):
    fsdp, _, state, loss_fn, batch = setup(model)
    assert_ordered(fsdp.eval_step(loss_fn).trace(state, batch))


def test_prediction_orders_its_collectives():
    fsdp, _, state, _, batch = setup("two stacks")
    predict = fsdp.predict_step(lambda model, batch: model(batch["x"]))
    assert_ordered(predict.trace(state, batch))


@pytest.mark.slow  # a loop around what is predicted above
def test_generation_orders_its_collectives():
    fsdp, _, state, _, _ = setup("gpt")
    tokens, seed = np.zeros((8, 4), np.int32), np.zeros(8, np.uint32)
    prompt = fsdp.shard_batch({"tokens": tokens, "seed": seed})
    predict = fsdp.predict_step(functools.partial(generate, length=4))
    assert_ordered(predict.trace(state, prompt))


@pytest.mark.slow
def test_every_program_of_a_run_orders_its_collectives(command, tmp_path):
    """Initial values, restoring and all else included."""
    flags = f"--xla_dump_to={tmp_path / 'programs'} --xla_dump_hlo_as_text"
    for steps in (2, 4):
        words = [
            "--config=gpt.py",
            "--workdir=run",
            f"--config.steps={steps}",
            "--config.eval_every=2",
            "--config.model.width=32",
            "--config.sample.length=4",
        ]
        run = command(tmp_path, *words, env={"XLA_FLAGS": flags})
        done = subprocess.run(**run)
        assert done.returncode == 0, done.stderr
    files = (tmp_path / "programs").glob("*cpu_after_optimizations.txt")
    texts = {file.name: file.read_text() for file in files}
    exchange = {
        name: unordered(text) for name, text in texts.items() if exchanging(text)
    }
    for step in ("train_step", "eval_step", "predict_step"):
        assert any(step in name for name in exchange), exchange
    assert not any(exchange.values()), exchange


def test_initial_values_order_their_collectives(monkeypatch):
    """Orthogonal matrices are not made in shards: the partitioner moves them."""
    texts = []
    compiled = jax.stages.Lowered.compile
    jit = jax.jit

    def read(fn, **kwargs):
        wrapped = jit(fn, **kwargs)

        def run(*args):
            texts.append(compiled(wrapped.lower(*args)).as_text())
            return wrapped(*args)

        return run

    monkeypatch.setattr("jshard.sharding.layout.values.initial_values.jax.jit", read)
    fsdp = jshard.FSDP(jshard.make_mesh(), POLICIES["full"])
    fsdp.init(TwoStacks, optax.sgd(0.1))
    assert texts
    assert [unordered(text) for text in texts] == [[]] * len(texts)


# Ordering itself.

MESH = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def shuffled(shards):
    """Collectives of all dtypes, in loops and branches and out of them."""
    _, (nan, zero, whole, flags, empty), n = shards
    gather = lambda x: lax.all_gather(x, "x", tiled=True)
    looped, _ = lax.scan(lambda c, x: (c + gather(nan).sum() * x, None), zero, whole)
    until = lax.while_loop(
        lambda c: jnp.all(lax.pmax(c, "x") < 4),
        lambda c: c + lax.psum(1, "x") / 8,
        zero,
    )
    chosen = lax.cond(n > 2, lambda x: lax.psum(x, "x"), lambda x: x * 8.0, zero)
    again = jax.checkpoint(lambda x: jnp.sin(lax.psum(jnp.sin(x), "x")))(zero)
    summed = jax.custom_jvp(lambda x: lax.psum(x, "x"))
    summed.defjvps(lambda tangent, _, x: summed(tangent))
    custom = summed(zero)
    inner = jax.make_jaxpr(lambda x: lax.psum(x, "x"), axis_env=[("x", 8)])(custom)
    params = closed_call_p.get_bind_params({"call_jaxpr": inner})
    (called,) = closed_call_p.bind(custom, **params)
    lost = gather(whole)  # nobody reads it
    del lost
    flags = lax.all_gather(flags, "x", tiled=True)
    return [
        gather(nan),
        gather(zero),
        flags,
        gather(empty),
        looped,
        until,
        chosen,
        again,
        custom,
        called,
    ]


@pytest.mark.skipif(
    metadata.version("jaxlib").startswith("0.11."),
    reason="XLA crashes on the empty array",
)
def test_in_order_changes_no_value_by_a_bit():
    spec = PartitionSpec("x")
    every = jax.shard_map(
        lambda *args: jax.tree.map(lambda y: y[None], shuffled(args)),
        mesh=MESH,
        in_specs=(PartitionSpec(), spec, PartitionSpec()),
        out_specs=spec,
        check_vma=False,
    )
    values = (
        jnp.asarray([jnp.nan, -0.0, jnp.inf, 1e-45] * 4),
        jnp.asarray([-0.0, 1.5] * 8),
        jnp.arange(16, dtype=jnp.int8),
        jnp.arange(16) % 3 == 0,
        jnp.zeros((16, 0)),
    )
    args = (jnp.asarray(7), values, jnp.asarray(3))
    plain, ordered = jax.jit(every)(*args), jax.jit(in_order(every))(*args)
    for ours, theirs in zip(ordered, plain, strict=True):
        assert ours.dtype == theirs.dtype
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def test_in_order_keeps_no_collective_that_nobody_reads():
    spec = PartitionSpec("x")
    run = jax.shard_map(
        lambda step, x: (lax.psum(x, "x"), x * step)[1],
        mesh=MESH,
        in_specs=(PartitionSpec(), spec),
        out_specs=spec,
    )
    compiled: Any = jax.jit(in_order(run)).lower(1, jnp.ones(8)).compile()
    assert not exchanging(compiled.as_text())


def test_programs_of_many_sums_stay_small():
    spec = PartitionSpec("x")
    run = jax.shard_map(
        lambda step, x: [lax.psum(jnp.sin(x + i), "x") * step for i in range(20)],
        mesh=MESH,
        in_specs=(PartitionSpec(), spec),
        out_specs=PartitionSpec(),
    )

    def lines(fn) -> int:
        compiled: Any = jax.jit(fn).lower(1, jnp.ones(8)).compile()
        return compiled.as_text().count("\n")

    assert lines(in_order(run)) < 4 * lines(run)


@pytest.mark.parametrize("loop", [False, True])
def test_collectives_are_tied_only_around_loops_that_have_some(loop):
    spec = PartitionSpec("x")

    def sums(step, x):
        y = lax.psum(x, "x")
        if loop:
            y, _ = lax.scan(lambda y, _: (lax.pmax(y * x, "x"), None), y, length=2)
        return lax.psum(y * x * step, "x")

    everywhere = PartitionSpec()
    run = jax.shard_map(
        sums, mesh=MESH, in_specs=(everywhere, spec), out_specs=everywhere
    )
    program = str(
        jax.make_jaxpr(in_order(lambda step, x: run(step, x) + x))(1, jnp.ones(8))
    )
    inside, after = program.split("psum", 1)[0], program.rsplit("out_specs", 1)[1]
    tied = loop or not BARRIERS_HOLD_ON_CPUS
    assert ("dynamic_update_slice" in inside) == tied
    assert ("select_n" in after) == tied  # what reads the results of shard_map


def test_in_order_needs_an_integer():
    with pytest.raises(jshard.UserError, match="an integer among its arguments"):
        jax.jit(in_order(jnp.sum))(jnp.ones(3))


# Running.


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        Cell(2, 128, "none", True),
        Cell(4, 64, "none", True, cores=1),
        Cell(3, 64, "full", True, cores=1, batch=9),
        Cell(8, 32, "dots", True, cores=2),
    ],
    ids=str,
)
def test_training_ends_with_the_same_losses_however_it_is_started(cell):
    check(cell)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "calls"),
    [
        (2, "train"),
        (8, "both"),
    ],
)
def test_a_loop_that_never_waits_for_a_step_ends(devices, calls):
    """Before JAX 0.12, XLA:CPU hangs where more than 32 programs are under way."""
    script = Path(__file__).parents[2] / "helpers" / "ahead.py"
    words = [sys.executable, str(script), str(devices), calls]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow  # test_callers_mesh.py lowers and traces
def test_a_step_can_be_lowered_and_traced_like_any_jitted_function():
    fsdp = jshard.FSDP(jshard.make_mesh(), POLICIES["full"])
    model = filled(lambda: TwoStacks(nnx.Rngs(0)), spread=0.1)
    state = fsdp.from_model(model, optax.sgd(0.1))
    step: Any = fsdp.eval_step(squared)
    batch = fsdp.shard_batch({"x": np.ones((8, 32), np.float32)})
    shapes = jax.tree.leaves(jax.eval_shape(step, state, batch))
    outside = jax.tree.leaves(step(state, batch))
    inside = jax.tree.leaves(jax.jit(lambda *args: step(*args))(state, batch))
    assert [x.shape for x in shapes] == [x.shape for x in outside]
    for one, other in zip(inside, outside, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert step.__name__ == "eval_step"
    assert step.lower(state, batch).compile().memory_analysis() is not None
