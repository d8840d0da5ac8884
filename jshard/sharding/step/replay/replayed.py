"""A train step that is computed a second time on other devices, and compared."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from jshard.sharding.layout.layer_dims import layer_dims
from jshard.sharding.layout.variables import array_name, is_variable
from jshard.sharding.settings.mesh import AXES
from jshard.sharding.settings.state import TrainState
from jshard.sharding.step.fsdp import FSDP
from jshard.sharding.step.program.together import Together
from jshard.sharding.step.replay.bits import hash_shards, on_host, spec_of
from jshard.sharding.step.replay.rolled import (
    distances,
    move,
    move_and_free,
    rolled_mesh,
)
from jshard.sharding.step.replay.sent import Event, Result, recorded
from jshard.sharding.step.replay.state_source import Source
from jshard.sharding.step.replay.verdict import Computation, Verdict, differs, judge
from jshard.system.errors import UserError

_LAST = 2**31  # a place after all those of the program


@dataclasses.dataclass(frozen=True)
class Difference:
    """A step whose computations have other bits.

    Attributes:
      verdict: who computed something else.
      events: what has hashes, in the order of the words of computations.
      computations: the first is that of the step, the second of the other devices.
    """

    verdict: Verdict
    events: tuple[Event, ...]
    computations: tuple[Computation, ...]


class Replay:
    """The train step of a loss, on the mesh of an FSDP and on the same mesh rolled.

    Each computation has hashes of all that devices send to each other, of their shards
    of gradients, and of the new state and the metrics.

    Args:
      fsdp: whose mesh has at least two devices.
      loss_fn: as of ``FSDP.train_step``, as are optimizer and seed.
      optimizer: the transformation that states are made with.
      seed: of ``rngs``.
      on_host: whether the state stays in host memory between computations, so that
        devices hold one; else a computation holds one more than a step does.

    Raises:
      UserError: there is one device, an axis that jshard does not know, or state in
        the host's memory.
    """

    def __init__(
        self,
        fsdp: FSDP,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        seed: int = 0,
        *,
        on_host: bool = False,
    ):
        self.mesh: Mesh = fsdp.mesh  # pyright: ignore[reportAttributeAccessIssue]
        if self.mesh.size == 1:
            raise UserError(
                "watch.replay computes steps again on other devices, and the mesh has "
                "one: use at least two, or watch.replay=0"
            )
        if other := [axis for axis in self.mesh.axis_names if axis not in AXES]:
            raise UserError(f"watch.replay: the mesh has an axis {other[0]!r}")
        if fsdp.policy.offload is not None:
            raise UserError(
                "watch.replay moves the state between devices, and policy.offload "
                "keeps it in host memory: use one of both"
            )
        self.distances = distances(self.mesh)
        self.events: list[Event] = []
        self._fsdp, self._train = fsdp, (loss_fn, optimizer, seed)
        self._on_host = on_host
        self._programs: dict[int, Any] = {}

    def source(self, state: TrainState) -> Source:
        """Returns the state before a step for what follows, which may delete it."""
        return Source(state, on_host=self._on_host)

    def elsewhere(self, source: Source, batch: Any, distance: int) -> Computation:
        """Computes the step on the mesh, rolled; keeps nothing but hashes."""
        moves = move_and_free if self._on_host else move
        state = moves(source.state(), self.mesh, distance)
        # An integer goes along, by which CPUs order what is sent.
        batch, _ = move((batch, jnp.int32(0)), self.mesh, distance)
        return self._compute(state, batch, distance)[1]

    def here(
        self, source: Source, batch: Any
    ) -> tuple[tuple[TrainState, dict[str, jax.Array]], Computation]:
        """Computes the step where the state is; returns its results, too."""
        return self._compute(source.state(), batch, 0)

    def explain(
        self, source: Source, batch: Any, *computations: Computation
    ) -> Difference:
        """Computes a step that differed again, on more devices and on the same."""
        more = [self.elsewhere(source, batch, x) for x in self.distances[1:]]
        more.append(self.here(source, batch)[1])
        if not self.distances[1:]:
            more.append(self.elsewhere(source, batch, self.distances[0]))
        found = (*computations, *more)
        return Difference(judge(self.events, found), tuple(self.events), found)

    def check(self, source: Source, batch: Any) -> Difference | None:
        """Computes a step twice on the same devices, and once on others."""
        first, again = self.here(source, batch)[1], self.here(source, batch)[1]
        other = self.elsewhere(source, batch, self.distances[0])
        if not differs(first, again) and not differs(first, other):
            return None
        return self.explain(source, batch, first, other, again)

    def program(self, distance: int) -> Callable[[TrainState, Any], Any]:
        """Returns the step with ``Hashes``, ``(state, metrics), hashes``, for a mesh.

        It takes the memory of its state, unless that is the run's own.
        """
        if distance not in self._programs:
            mesh = rolled_mesh(self.mesh, distance)
            fsdp = self._fsdp if distance == 0 else _on(self._fsdp, mesh)
            step = fsdp.train_step(*self._train)

            def train_step(state: TrainState, batch: Any) -> Any:
                gradients = _gradients(state.params)
                return recorded(step, gradients)(state, batch)

            jitted = jax.jit(
                train_step,
                donate_argnums=0 if distance or self._on_host else (),
                compiler_options=fsdp.compiler_options or None,
            )
            self._programs[distance] = Together(jitted, mesh)
        return self._programs[distance]

    def _compute(self, state: TrainState, batch: Any, distance: int) -> Any:
        results, hashes = self.program(distance)(state, batch)
        state, metrics = results
        after = [*named_arrays(state), *((k, x, 0) for k, x in metrics.items())]
        left = hash_shards([x for _, x, _ in after], [layers for *_, layers in after])
        found = np.concatenate([on_host(hashes.words), on_host(left)], axis=1)
        ends = [
            Event("state", name, (_LAST, place), tuple(x.shape[:layers]))
            for place, (name, x, layers) in enumerate(after)
        ]
        self.events = [*hashes.events, *ends]
        return results, Computation(distance, found)


def _on(fsdp: FSDP, mesh: Mesh) -> FSDP:
    """Returns what does the same on another mesh."""
    splits = {".".join(path): split for path, split in fsdp.tensor_splits.items()}
    return FSDP(
        mesh,
        fsdp.policy,
        units=fsdp.layer_dims or fsdp.units,
        tensor_splits=splits,
        sequences=fsdp.sequences,
        compiler_options=fsdp.compiler_options,
    )


def named_arrays(tree: Any) -> list[tuple[str, jax.Array, int]]:
    """Returns (name, array, layer dimensions) of what is in a state."""
    variables = jax.tree.leaves(tree, is_leaf=is_variable)
    arrays = jax.tree_util.tree_leaves_with_path(tree)
    found = []
    for variable, (path, x) in zip(variables, arrays, strict=True):
        layers = layer_dims(variable) if is_variable(variable) else 0
        if layers > x.ndim or any(spec_of(x)[:layers]):  # what an optimizer made of it
            layers = 0
        found.append((array_name(path), x, layers))
    return found


def _gradients(params: nnx.State) -> list[Result]:
    return [
        Result(".".join(map(str, path)), v.get_value().shape, layer_dims(v))
        for path, v in nnx.to_flat_state(params)
    ]
