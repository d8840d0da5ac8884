"""The counts of a loss, which its backward divides by, ahead of all micro-batches."""

from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import lax

from jshard.sharding.layout.microbatches import Micro
from jshard.sharding.layout.values.random_streams import merge_state
from jshard.sharding.settings.count import add_up, sum_of
from jshard.sharding.settings.loss import Means
from jshard.sharding.settings.mesh import manual_axes
from jshard.sharding.settings.state import ModelArrays
from jshard.sharding.step.program.traced import Forward
from jshard.system.compat.jaxprs import without_dead_code


class Counted(NamedTuple):
    """What is known of all micro-batches before the first of them runs.

    Attributes:
      counts: the global count of each term of the loss.
      totals: the global total of each term whose count is trained, which takes the
        whole forward; None for others.
      weights: of the terms; for stages alone.
      states: the model's state before each micro-batch; for stages alone.
      after: its state after all of them; for stages alone.
    """

    counts: list[Any]
    totals: list[Any]
    weights: list[jax.Array]
    states: nnx.State | None
    after: nnx.State


def count(
    forward: Forward, arrays: ModelArrays, micro: Micro, *, of_stages: bool = False
) -> Counted:
    """Runs micro-batches for their counts alone; for ``of_stages`` state, too.

    Arguments are as of ``micro_batches``.
    """
    needs, last = forward.needs, len(micro[1]) - 1
    stateful = needs.state or of_stages

    def chosen(means: Means, after: nnx.State) -> tuple:
        terms = [mean for _, mean in means.loss.terms]
        weights = [weight for weight, _ in means.loss.terms] if of_stages else []
        trained = zip(terms, needs.params, strict=True)
        totals = [mean.total if needed else None for mean, needed in trained]
        counts = [mean.count for mean in terms]
        return weights, counts, totals, after if stateful else None

    loss, metrics, _, state = forward.shapes
    structure = jax.tree.structure(chosen(Means(loss, metrics), state))

    def one(state, slices):
        leaves, tree = jax.tree.flatten((*arrays[:2], state, *slices))

        def of_leaves(*leaves):
            _, results = forward(*jax.tree.unflatten(tree, leaves))
            return jax.tree.leaves(chosen(*results))

        found = without_dead_code(of_leaves)(*leaves)
        *found, after = jax.tree.unflatten(structure, found)
        before = state if of_stages else None
        if stateful:
            state = merge_state(state, after, last=slices[1] == last)
        return state, (before, *found)

    def globally(x: Any) -> Any:
        return None if x is None else add_up(sum_of(x), manual_axes())

    after, (states, *found) = lax.scan(one, arrays.model_state, micro)
    weights, counts, totals = found
    counts, totals = list(map(globally, counts)), list(map(globally, totals))
    return Counted(counts, totals, [x[0] for x in weights], states, after)
