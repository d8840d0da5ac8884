"""An update streamed from host memory is the update, and holds two layers of it.

On the CPU memory kinds are names, so there the arithmetic and the types are tested;
what a device holds is read from programs compiled for H100s, which needs no GPU, but
JAX's CUDA plugin.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hlo
import jshard
from decoder import Sizes, bytes_in, make_decoder, make_fsdp
from h100 import h100s
from jshard.plan import compile_for
from jshard.sharding.update.end_of_step import update

OFFLOADS = ("optimizer", "all")
BOUND = 1e-9


def make_policy(offload: Any, **knobs: Any) -> jshard.Policy:
    return jshard.Policy(min_shard_elements=0, offload=offload, **knobs)


class Dense(nnx.Module):
    """A layer whose initial values compile in no time."""

    def __init__(self, width: int, hidden: int, dtype: Any):
        grid = np.arange(width * hidden).reshape(width, hidden)
        self.kernel = nnx.Param(jax.device_put(np.asarray(np.sin(grid) / 4, dtype)))
        self.bias = nnx.Param(
            jax.device_put(np.asarray(np.linspace(-1, 1, width), dtype))
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ self.kernel[...]) @ self.kernel[...].T + self.bias[...]


class Model(nnx.Module):
    """Two Stacks of different lengths, one of one layer, a Unit, and a root."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any = jnp.float64):
        make = lambda rngs: Dense(8, 16, dtype)
        self.long = jshard.Stack(make, 4, rngs=rngs)
        self.short = jshard.Stack(make, 3, rngs=rngs)
        self.single = jshard.Stack(make, 1, rngs=rngs)
        self.unit = jshard.Unit(Dense(8, 24, dtype))
        self.scale = nnx.Param(jnp.ones(8, dtype))
        self.odd = nnx.Param(jnp.ones(3, dtype))  # replicated

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.single(self.short(self.long(x)))
        return self.unit(x) * self.scale[...] * self.odd[...].sum()


def squares(model: Any, batch: jax.Array) -> jshard.Mean:
    return jshard.Mean(jnp.sum(model(batch) ** 2), batch.shape[0])


def random_like(tree: Any, seed: int = 0) -> Any:
    """Positive numbers, where second moments need them; counts are 3."""
    rng = np.random.default_rng(seed)

    def one(x: Any) -> np.ndarray:
        if jnp.issubdtype(x.dtype, jnp.integer):
            return np.full(x.shape, 3, x.dtype)
        return rng.uniform(0.1, 1, x.shape).astype(x.dtype)

    return jax.tree.map(one, tree)


def updated(
    offload: str | None, tx: Any, finite: bool | None, fsdp: int = 8
) -> list[jax.Array]:
    """Parameters, optimizer's state and averages after two updates."""
    mesh = jshard.make_mesh(fsdp=fsdp, replica=8 // fsdp)
    trainer = jshard.FSDP(mesh, make_policy(offload, ema_decay=0.9))
    state = trainer.abstract_state(Model, tx)
    places = (state.params, state.opt_state, state.ema)
    moving = jax.tree.map(
        lambda x, place: jax.device_put(x, place.sharding), random_like(places), places
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def run(moving: Any, given: Any) -> Any:
        return update(mesh, trainer.policy, tx, moving, given)

    for seed in (1, 2):
        grads = jax.tree.map(
            lambda x, place: jax.device_put(
                x - 0.5, place.sharding.with_memory_kind("device")
            ),
            random_like(state.params, seed),
            state.params,
        )
        keep = None if finite is None else jnp.asarray(finite)
        moving = run(moving, (grads, jnp.asarray(0.5), jnp.asarray(seed), keep))
        kinds = jax.tree.map(lambda x: x.sharding.memory_kind, (moving, places))
        assert kinds[0] == kinds[1], "arrays do not stay where they were"
    return jax.tree.leaves(moving)


def trace_update(fsdp: jshard.FSDP, state: jshard.TrainState, tx: Any) -> Any:
    """The update alone, after something that makes gradients, as in a step."""

    @functools.partial(jax.jit, donate_argnums=0)
    def run(moving: Any, step: Any) -> Any:
        def gradient(x: Any) -> jax.Array:
            made = jnp.broadcast_to(step.astype(x.dtype), x.shape)
            place = x.sharding.with_memory_kind("device")
            return jax.lax.with_sharding_constraint(made, place)

        grads = jax.lax.optimization_barrier(jax.tree.map(gradient, state.params))
        given = (grads, jnp.float32(0), step, None)
        return update(fsdp.mesh, fsdp.policy, tx, moving, given)

    return run.trace((state.params, state.opt_state, state.ema), state.step)


def check_update(offload: str, tx: Any, finite: bool | None = None, **knobs: Any):
    got, want = (updated(o, tx, finite, **knobs) for o in (offload, None))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), BOUND, 1e-12)


def matrices(params: Any) -> Any:
    named = jax.tree_util.tree_map_with_path
    return named(lambda path, p: "kernel" in str(path), params)


def labels(params: Any) -> Any:
    return jax.tree.map(lambda chosen: "adam" if chosen else "sgd", matrices(params))


def odd() -> optax.GradientTransformation:
    """Swaps two states, forgets one, keeps one, and returns one as the update."""

    def init(params: Any) -> dict[str, Any]:
        return {name: optax.tree.zeros_like(params) for name in "abcd"}

    def update(grads: Any, state: dict[str, Any], params: Any = None) -> Any:
        del params
        a, b, c = state["a"], state["b"], state["c"]
        new = jax.tree.map(lambda b, c, g: b + c * (g / g.size), b, c, grads)
        kept = state["d"]
        return new, {"a": new, "b": a, "c": optax.tree.zeros_like(c), "d": kept}

    return optax.GradientTransformation(init, update)


def add_total() -> optax.GradientTransformation:
    """Looks at all gradients and parameters, and keeps nothing."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        total = sum(jnp.sum(x) for x in jax.tree.leaves((grads, params)))
        return jax.tree.map(lambda g: g + total / 100, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def count_steps() -> optax.GradientTransformation:
    """Counts."""

    def update(grads: Any, state: jax.Array, params: Any = None) -> Any:
        return grads, state + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), int), update)


CLIP = optax.clip_by_global_norm(0.1)
TRANSFORMATIONS: dict[str, Any] = {
    "adamw": jshard.optim.chain(
        CLIP, optax.adamw(optax.linear_schedule(0, 1e-2, 2), mask=matrices)
    ),
    "momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "lamb": jshard.optim.chain(CLIP, jshard.optim.per_layer(optax.lamb(1e-2))),
    "adafactor": jshard.optim.per_layer(
        optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9)
    ),
    "adaptive clipping": jshard.optim.chain(
        jshard.optim.per_layer(optax.adaptive_grad_clip(0.01)), optax.adam(1e-2)
    ),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    "bf16 moments": jshard.optim.chain(
        CLIP, jshard.optim.bf16_moments(optax.adamw(1e-2))
    ),
    "bf16 moments per layer": jshard.optim.per_layer(
        jshard.optim.bf16_moments(optax.adam(1e-2))
    ),
    "no state": optax.chain(CLIP, optax.sgd(1e-2)),
    "opaque": optax.chain(optax.clip(0.1), optax.adamw(1e-2, mask=matrices)),
    "every second": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "odd": jshard.optim.per_layer(odd()),
    "muon": jshard.optim.chain(CLIP, jshard.optim.muon(1e-2)),
    "own before": jshard.optim.chain(add_total(), CLIP, optax.adamw(1e-2)),
    "partition": optax.partition(
        {"adam": optax.adam(1e-2), "sgd": optax.sgd(1e-2, momentum=0.9)}, labels
    ),
    "norm of a layer": jshard.optim.per_layer(
        optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1e-2, momentum=0.9))
    ),
    "scaled after": jshard.optim.chain(
        jshard.optim.per_layer(optax.lamb(1e-2)), optax.scale(0.5)
    ),
}


# One whose parameters outside Stacks are updated one by one, and one all at once.
@pytest.mark.quick("norm of a layer-all")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_streamed_update_is_the_update(name, offload):
    check_update(offload, TRANSFORMATIONS[name])


@pytest.mark.slow  # above on eight devices
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("fsdp", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_streamed_update_is_the_update_on_every_mesh(fsdp):
    check_update("all", TRANSFORMATIONS["momentum"], fsdp=fsdp)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("finite", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_update_that_is_skipped_changes_nothing_in_host_memory(finite):
    tx = jshard.optim.chain(count_steps(), TRANSFORMATIONS["momentum"])
    if finite:
        return check_update("optimizer", tx, finite)
    trainer = jshard.FSDP(jshard.make_mesh(), make_policy("optimizer", ema_decay=0.9))
    state = trainer.abstract_state(Model, tx)
    start = random_like((state.params, state.opt_state, state.ema))
    for x, y in zip(
        updated("optimizer", tx, finite), jax.tree.leaves(start), strict=True
    ):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow  # test_offload.py counts a step's
def test_a_streamed_update_adds_no_collective():
    def collectives(offload: str | None) -> list[Any]:
        fsdp = make_fsdp(make_policy(offload))
        tx = jshard.optim.chain(CLIP, optax.sgd(1e-2, momentum=0.9))
        state = fsdp.abstract_state(make_decoder(Sizes(layers=3)), tx)
        traced = trace_update(fsdp, state, tx)
        assert ("scan[" in str(traced.jaxpr)) == bool(offload)  # layer by layer
        compiled = traced.lower().compile()
        found = hlo.collectives(compiled.as_text() or "")
        return sorted((c.kind, c.times, c.wire_bytes) for c in found)

    assert collectives("all") == collectives(None)


# On H100s. Wide layers and a small vocabulary: Stacks are what there is.

GPUS, LAYERS = 8, 6
ADAMW = jshard.optim.chain(CLIP, optax.adamw(1e-3))
ROUNDING = 2**12  # to what the compiler aligns, and its counters


def compiled_update(offload: Any) -> tuple[Any, jshard.TrainState]:
    """The update alone, for eight H100s, and its state."""
    mesh = h100s(GPUS)
    abstract: Any = mesh.abstract_mesh
    fsdp = jshard.FSDP(abstract, jshard.Policy(offload=offload))
    sizes = Sizes(layers=LAYERS, width=1024, hidden=4096, vocab=64)
    state = fsdp.abstract_state(make_decoder(sizes), ADAMW)
    return compile_for(mesh, trace_update(fsdp, state, ADAMW)), state


@pytest.mark.h100
@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_gpu_holds_two_layers_of_what_is_streamed(offload):
    compiled, state = compiled_update(offload)
    memory = compiled.memory_analysis()
    moving = (state.params, state.opt_state)
    adam = optax.tree.get(state.opt_state, "mu"), optax.tree.get(state.opt_state, "nu")
    stacks = [tree["blocks"] for tree in (state.params, *adam)]
    layer = bytes_in("pinned_host", stacks) // LAYERS
    hosted = bytes_in("pinned_host", moving)
    assert memory.host_argument_size_in_bytes == hosted
    assert memory.host_alias_size_in_bytes == hosted  # updated in place
    assert memory.host_temp_size_in_bytes == 0
    assert abs(memory.argument_size_in_bytes - bytes_in(None, moving)) <= ROUNDING
    gradients = bytes_in(None, state.params) + bytes_in("pinned_host", state.params)
    assert memory.temp_size_in_bytes <= gradients + 2 * layer + ROUNDING


@pytest.mark.h100
def test_a_gpu_sends_and_fetches_at_once_and_gathers_nothing():
    text = compiled_update("optimizer")[0].as_text()
    bodies = [c for c in re.split(r"\n(?=%|ENTRY)", text) if c.startswith("%region")]
    body = max(bodies, key=lambda c: c.count("fusion-start("))
    kinds = {"dynamic-slice": "in", "dynamic-update-slice": "out"}
    running: dict[str, int] = {"in": 0, "out": 0}
    together = 0
    for name, event in re.findall(
        r"^  %(dynamic-(?:update-)?slice)-(start|done)[\w.]* = ", body, re.MULTILINE
    ):
        running[kinds[name]] += 1 if event == "start" else -1
        together += event == "start" and all(running.values())
    # Two moments of three parameters: of each pair of transfers one starts first.
    assert together >= 6
    assert running == {"in": 0, "out": 0}
    assert {c.kind for c in hlo.collectives(text)} <= {"all-reduce"}  # the norm
