"""Trains a program in the style of public code with jshard, and with plain Flax.

A program is a model and a loss that know of no mesh. ``plain`` trains it on one device
with JAX, Flax and optax alone, ``sharded`` with jshard on a mesh. Both must go the same
way: losses, norms of gradients, parameters, and the model's state.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jshard
from parity import make_mesh

STEPS = 3
# Both divide by 1, 2, 3, 4, 6 and 8 devices; in the programs are other widths, too.
EXAMPLES = WIDTH = 24
BOUND = 1e-9


def sgd() -> optax.GradientTransformation:
    return optax.sgd(0.1, momentum=0.9)


@dataclasses.dataclass(frozen=True, eq=False)
class Phase:
    """One optimizer of a program: what it minimizes, and what it trains."""

    loss: Callable[[Any, Any], tuple[Any, Any]]  # (model, batch) -> (total, count)
    trained: Any = nnx.Param  # an NNX filter
    optimizer: optax.GradientTransformation = dataclasses.field(default_factory=sgd)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A model, its losses and its data.

    Attributes:
      model: makes the model from random streams.
      phases: optimizers, which take turns on each batch.
      batch: makes a batch of ``EXAMPLES`` examples, in NumPy.
      units: types that jshard makes Units of, without a change to the model; none for
        what a Unit refuses.
      default: (devices, whether with units) of the test that is not slow.
      remat: of jshard's policy.
    """

    model: Callable[[nnx.Rngs], nnx.Module]
    phases: tuple[Phase, ...]
    batch: Callable[[np.random.Generator], Any]
    units: tuple[type, ...]
    default: tuple[int, bool]
    remat: Any = "full"


def program(
    model: Callable[[nnx.Rngs], nnx.Module],
    loss: Callable[[Any, Any], tuple[Any, Any]],
    batch: Callable[[np.random.Generator], Any],
    units: tuple[type, ...],
    default: tuple[int, bool],
    trained: Any = nnx.Param,
    remat: Any = "full",
) -> Program:
    """A program with one optimizer."""
    return Program(model, (Phase(loss, trained),), batch, units, default, remat)


@dataclasses.dataclass(frozen=True)
class Run:
    losses: list[float]
    grad_norms: list[float]
    arrays: dict[tuple, Any]  # parameters and state, by path


def batches(program: Program) -> list[Any]:
    rng = np.random.default_rng(0)
    return [program.batch(rng) for _ in range(STEPS)]


@functools.cache
def plain(program: Program) -> Run:
    """The program on one device, without jshard."""
    model = program.model(nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    opt_states: list[Any] = [None] * len(program.phases)
    losses, norms = [], []
    steps = [_plain_step(graphdef, phase) for phase in program.phases]
    for batch in batches(program):
        for i, phase in enumerate(program.phases):
            trained, rest = _select(flat, phase.trained)
            if opt_states[i] is None:
                opt_states[i] = phase.optimizer.init(trained)
            trained, after, opt_states[i], loss, norm = steps[i](
                trained, rest, opt_states[i], batch
            )
            flat |= dict(nnx.to_flat_state(trained))
            # What a layer makes during a step is not part of the model.
            made = dict(nnx.to_flat_state(after))
            flat |= {path: made[path] for path in flat if path in made}
            losses.append(float(loss))
            norms.append(float(norm))
    return Run(losses, norms, _arrays(flat))


def _select(flat: dict[tuple, Any], trained: Any) -> tuple[nnx.State, nnx.State]:
    chosen = nnx.filterlib.to_predicate(trained)
    parts = ([], [])
    for path, leaf in flat.items():
        parts[0 if chosen(path, leaf) else 1].append((path, leaf))
    return nnx.from_flat_state(parts[0]), nnx.from_flat_state(parts[1])


def _plain_step(graphdef: Any, phase: Phase) -> Callable:
    @jax.jit
    def step(trained, rest, opt_state, batch):
        def loss_fn(trained):
            model = nnx.merge(graphdef, trained, rest, copy=True)
            total, count = phase.loss(model, batch)
            return total / count, nnx.state(model, nnx.Not(nnx.Param))

        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, after), grads = value_and_grad(trained)
        updates, opt_state = phase.optimizer.update(grads, opt_state, trained)
        new = optax.apply_updates(trained, updates)
        return new, after, opt_state, loss, optax.tree.norm(grads)

    return step


def sharded(
    program: Program,
    devices: int,
    *,
    units: bool,
    exists: bool = False,
    accumulate: int = 1,
) -> Run:
    """The program with jshard; four devices are two replicas.

    With ``exists`` the model is made before it is sharded.
    """
    mesh = make_mesh(2, 2) if devices == 4 else make_mesh(1, devices)
    policy = jshard.Policy(program.remat, min_shard_elements=0, accumulate=accumulate)
    fsdp = jshard.FSDP(mesh, policy, units=program.units if units else ())
    start = fsdp.from_model if exists else fsdp.init
    model: Any = program.model(nnx.Rngs(0)) if exists else program.model
    states, steps = [], []
    for phase in program.phases:
        tx = phase.optimizer
        states.append(start(model, tx, wrt=phase.trained))
        steps.append(fsdp.train_step(_as_mean(phase.loss), tx))
    params = jax.tree.leaves(states[0].params)
    assert devices == 1 or not all(x.is_fully_replicated for x in params)
    state, losses, norms = states[0], [], []
    for batch in batches(program):
        for i, step in enumerate(steps):
            state, metrics = step(_hand_over(state, states[i]), fsdp.shard_batch(batch))
            states[i] = state
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
    parts = fsdp.fetch((state.params, state.frozen, state.model_state))
    flat = [item for part in parts for item in nnx.to_flat_state(part)]
    return Run(losses, norms, _arrays(dict(flat)))


def _as_mean(loss: Callable) -> Callable:
    return lambda model, batch: jshard.Mean(*loss(model, batch))


def _hand_over(
    source: jshard.TrainState, target: jshard.TrainState
) -> jshard.TrainState:
    """The state of another optimizer, with the model's arrays of ``source``."""
    fields = ("params", "frozen", "model_state")
    flat = {}
    for name in fields:
        flat |= dict(nnx.to_flat_state(getattr(source, name)))

    def newest(state: nnx.State) -> nnx.State:
        paths = [path for path, _ in nnx.to_flat_state(state)]
        return nnx.from_flat_state([(path, flat[path]) for path in paths])

    new = {name: newest(getattr(target, name)) for name in fields}
    return dataclasses.replace(target, **new)


def _arrays(flat: dict[tuple, Any]) -> dict[tuple, Any]:
    """Arrays by path; without the keys and counts of random streams."""
    return {
        path: leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        for path, leaf in flat.items()
        if not isinstance(leaf, nnx.RngState)
    }


def check(program: Program, devices: int, *, units: bool, **options: Any) -> None:
    """Compares the program on a mesh with plain Flax; raises AssertionError."""
    compare(sharded(program, devices, units=units, **options), plain(program))


def compare(got: Run, want: Run) -> None:
    np.testing.assert_allclose(got.losses, want.losses, rtol=BOUND)
    np.testing.assert_allclose(got.grad_norms, want.grad_norms, rtol=BOUND)
    assert min(want.grad_norms) > 0
    # Constants of the model, in no Variable, need not be part of a state.
    assert got.arrays.keys() <= want.arrays.keys()
    for path, value in got.arrays.items():
        expected = np.asarray(want.arrays[path])
        assert (value.shape, value.dtype) == (expected.shape, expected.dtype), path
        size = np.abs(expected).max(initial=1e-30)
        error = np.abs(np.asarray(value) - expected).max(initial=0)
        assert error <= BOUND * size, (path, error / size)


def normal(*shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    """Makes a batch of one array of normally distributed values."""
    return lambda rng: rng.normal(size=(EXAMPLES, *shape))


def linear(d_in: int, d_out: int, rngs: nnx.Rngs, **options: Any) -> nnx.Linear:
    """A layer in the dtype that is current, float64 in these tests."""
    return nnx.Linear(d_in, d_out, param_dtype=float, rngs=rngs, **options)


def squares(model: Any, x: jax.Array) -> tuple[Any, Any]:
    """A loss for models whose outputs are all that matters."""
    return jnp.sum(jnp.sin(model(x)) ** 2), len(x)
