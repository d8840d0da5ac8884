"""What jshard does within each kind of ``jax.set_mesh``, beside what it does without.

Kinds of contexts are those of a user's program: the mesh of FSDP itself, other axes on
the same devices, and other devices, each of Auto and of Explicit axes.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh

import jshard

KINDS = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}
CONTEXTS = {
    "own": ((2, 4), ("replica", "fsdp")),
    "other axes": ((4, 2), ("data", "model")),
    "other devices": ((2,), ("data",)),
}
FUNCTIONS = ("init", "train", "eval", "predict", "save", "restore", "model(state)(x)")
TX = optax.adam(1e-2)
BATCH = np.random.default_rng(0).standard_normal((8, 12)).astype(np.float32)


class Net(nnx.Module):
    """Sharded, padded and replicated parameters, and a mask."""

    def __init__(self, rngs: nnx.Rngs):
        self.drop = jshard.Dropout(0.1, rngs=rngs)
        self.scale = nnx.Param(jnp.float32(1.5))
        self.unit = jshard.Unit(nnx.Linear(12, 5, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.unit(self.drop(x * self.scale[...]))


def loss_fn(model: Any, batch: Any) -> jshard.Mean:
    return jshard.Mean((model(batch) ** 2).sum(), len(batch))


def predict_fn(model: Any, batch: Any) -> jax.Array:
    return model(batch)


def mesh_of(name: str, kind: str) -> Mesh:
    """Returns the mesh of a context, as ``jax.make_mesh`` makes it."""
    shape, axes = CONTEXTS[name]
    return jax.make_mesh(shape, axes, axis_types=(KINDS[kind],) * len(axes))


def within(context: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if context is None else jax.set_mesh(context)


class Program:
    """A user's program: its FSDP, its state, its compiled steps."""

    def __init__(self, kind: str):
        policy = jshard.Policy(min_shard_elements=0)
        self.fsdp = jshard.FSDP(mesh_of("own", kind), policy)
        self.train_step = self.fsdp.train_step(loss_fn, TX)
        self.eval_step = self.fsdp.eval_step(loss_fn)
        self.predict_step = self.fsdp.predict_step(predict_fn)
        self.state = self.init()
        self.abstract = self.fsdp.abstract_state(Net, TX)

    def init(self) -> jshard.TrainState:
        return self.fsdp.init(Net, TX)

    def results(
        self, folder: Path, batch: Any, *, init: bool = True, read: bool = False
    ) -> dict[str, Any]:
        """Returns what each function computes here, or the line that refuses it.

        Results are computed with, as a program would, or only ``read``.
        """
        to_host = np.asarray if read else lambda x: x
        batch = self.fsdp.shard_batch(batch)

        def train() -> Any:
            state, metrics = self.train_step(self.state.copy(), batch)
            return float(to_host(metrics["loss"]) + 0), self.fsdp.fetch(state.params)

        def evaluate() -> Any:
            means = self.eval_step(self.state, batch)
            return (means + means).compute()

        def predict() -> Any:
            logits = to_host(self.predict_step(self.state, batch))
            return np.asarray(logits.argmax(axis=-1))

        def save() -> Any:
            with jshard.Checkpointer(folder) as checkpoints:
                checkpoints.save(self.state)
            return checkpoints.steps()

        def restore() -> Any:
            abstract = self.abstract if not init else self.fsdp.abstract_state(Net, TX)
            return self.fsdp.fetch(jshard.Checkpointer(folder).restore(abstract).params)

        def call() -> Any:
            model = self.fsdp.model(self.state)
            model.eval()
            return np.asarray(model(BATCH)).round(5)

        functions = (
            (lambda: self.fsdp.fetch(self.init().params)) if init else None,
            *((train, evaluate, predict, save, restore, call)),
        )
        pairs = zip(FUNCTIONS, functions, strict=True)
        return {name: _outcome(fn) for name, fn in pairs if fn is not None}


def _outcome(fn: Callable[[], Any]) -> Any:
    try:
        return fn()
    except jshard.UserError as error:
        return str(error)


def same(found: Any, alone: Any) -> bool:
    """Returns whether results are the same, to the last bit."""
    leaves, wanted = jax.tree.leaves(found), jax.tree.leaves(alone)
    return len(leaves) == len(wanted) and all(map(np.array_equal, leaves, wanted))


def table(folder: Path) -> str:
    """Returns a row for each mesh and context: "=" is the result without a context."""
    head = ("mesh", "`jax.set_mesh`", *FUNCTIONS)
    rows = [head, ("---",) * len(head)]
    alone = Program("Auto").results(folder / "alone", BATCH)
    named = [(name, kind) for name in CONTEXTS for kind in KINDS]
    for own in KINDS:
        for name, kind in [("none", ""), *named]:
            with within(mesh_of(name, kind) if kind else None):
                here = folder / f"{own}{name}{kind}"
                read = name == "other devices"
                found = Program(own).results(here, BATCH, read=read)
            cells = ["=" if same(x, alone[f]) else "refused" for f, x in found.items()]
            rows.append((own, f"{name} {kind}".strip(), *cells))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
