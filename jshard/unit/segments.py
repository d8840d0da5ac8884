"""Runs of layers of a Stack that are treated alike."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax
from jax import lax

from jshard.comm.varying import varying
from jshard.layout.placement import Placement
from jshard.mesh import FSDP, manual_axes
from jshard.policy import Reshard, UnitPolicy
from jshard.unit.linearize import LinearizedLayer


@dataclasses.dataclass(frozen=True)
class Segment:
    """Neighbouring layers of a Stack that are treated alike, in loops of their own.

    XLA inlines a loop of one trip: a layer on its own is scheduled like a Unit.
    """

    start: int
    stop: int
    layer: LinearizedLayer  # in a loop
    alone: LinearizedLayer  # outside of one
    reshard: Reshard
    ahead: bool  # whether transfers run beside neighbouring layers

    @property
    def single(self) -> bool:
        """Whether it is one layer."""
        return self.stop - self.start == 1


def moves(
    places: Sequence[Placement],
    trained: Sequence[bool],
    shard_types: Sequence[jax.ShapeDtypeStruct],
) -> bool:
    """Whether a layer gathers weights, or sums gradients over devices.

    Where whole weights are gathered once a step (``defer_scatter``) it does neither.
    """
    sharded = lax.axis_size(FSDP) > 1
    return any(
        (sharded and place.dim is not None)
        or (moving and set(varying(shard)) != set(manual_axes()))
        for place, moving, shard in zip(places, trained, shard_types, strict=True)
    )


def spans(policy: UnitPolicy, length: int) -> list[tuple[int, int]]:
    """From which layer to before which others are treated like it."""
    first = length if policy.first_k is None else min(policy.first_k, length)
    last = length - min(policy.keep_last, length)
    return list(itertools.pairwise(sorted({0, first, last, length})))


def cut(
    policy: UnitPolicy,
    length: int,
    linearize: Callable[..., LinearizedLayer],
    prefetch: bool,
) -> list[Segment]:
    """The segments of so many layers.

    Args:
      policy: of the Stack.
      length: of the Stack.
      linearize: ``linearize(remat, prevent_cse=...)`` traces a layer.
      prefetch: whether transfers run beside neighbouring layers.
    """
    segments = []
    for start, stop in spans(policy, length):
        first = policy.first_k
        remat = policy.remat if first is None or start < first else "none"
        kept = start >= length - policy.keep_last
        reshard = False if kept else policy.reshard_after_forward
        single = stop - start == 1
        ahead = prefetch and not single
        layer = linearize(remat, prevent_cse=single)
        alone = linearize(remat, prevent_cse=True) if ahead else layer
        segments.append(Segment(start, stop, layer, alone, reshard, ahead))
    return segments
