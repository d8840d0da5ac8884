"""A loss that is not finite ends a run, with what can be said of its cause."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jshard.errors import RunFailed


def check_finite(
    history: Sequence[tuple[jax.Array, jax.Array]],
    step: int,
    metrics: Mapping[str, float],
    find_cause: Callable[[int], str] = lambda step: "",
) -> None:
    """Stops the run at its first loss that is not finite.

    With a loss scale, steps that are not finite are skipped, and what stops the run is
    a scale that cannot fall further.

    Args:
      history: The losses and gradient norms of the last steps.
      step: The step of the last one.
      metrics: Of that step.
      find_cause: Looks for the cause at a step, and may return "".

    Raises:
      RunFailed: Names the step, and the cause where it is known.
    """
    for index, (loss, norm) in enumerate(jax.device_get(history)):
        at = step - len(history) + 1 + index
        if np.isnan(loss) and norm == 0:  # gradients of a loss that overflows are nan
            raise RunFailed(
                f"the loss of step {at} counts nothing: the counts of all its Means "
                "are 0; look at what loss_fn counts, and at the weights in that step's "
                "batch"
            )
        if np.isfinite(loss) or "loss_scale" in metrics:
            continue
        cause = find_cause(at) or (
            "lower the learning rate, clip gradients, or look at that step's data"
        )
        raise RunFailed(f"the loss is {loss} at step {at}: {cause}")
    if metrics.get("loss_scale", np.inf) <= 1 and not np.isfinite(metrics["grad_norm"]):
        raise RunFailed(
            f"the loss scale fell to 1 at step {step}, and gradients are still not "
            "finite: lower the learning rate, clip gradients, or use bfloat16"
        )


def beyond_vocabulary(batch: Any, model: nnx.Module) -> str:
    """Tells of whole numbers in a batch that no embedding of a model has a row for.

    Args:
      batch: Of numpy arrays.
      model: The model, over abstract values, too.

    Returns:
      What is found, or "".
    """
    rows = {
        ".".join(map(str, path)): module.num_embeddings
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nnx.Embed)
    }
    if not rows:
        return ""
    largest = max(rows, key=lambda name: rows[name])
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        if np.issubdtype(x.dtype, np.integer) and x.size and x.max() >= rows[largest]:
            name = jax.tree_util.keystr(path, simple=True)
            return (
                f"its batch has token {x.max()} in {name!r}, and the model's embedding "
                f"{largest!r} has {rows[largest]} rows: make the vocabulary larger, or "
                "mend the tokens"
            )
    return ""
