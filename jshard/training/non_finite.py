"""Ends a run whose loss is not finite, with the cause, and tells what is skipped."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from jshard.system.errors import RunFailed


def check_finite(
    step: int,
    metrics: Mapping[str, float],
    find_cause: Callable[[int], str] = lambda step: "",
) -> None:
    """Checks that the loss of a step is finite, unless its update was skipped.

    With a loss scale, the run fails when the scale cannot fall further.

    `find_cause` returns why the loss of a step is not finite, or "".

    Raises:
      RunFailed: A loss is not finite; names the step, and the cause if it is known.
    """
    loss, norm = metrics["loss"], metrics["grad_norm"]
    if np.isnan(loss) and norm == 0:  # a loss that overflows has nan gradients
        raise RunFailed(
            f"the loss of step {step} counts nothing: the counts of all its Means are "
            "0; look at what loss_fn counts, and at the weights in that step's batch"
        )
    rejects = "loss_scale" in metrics or metrics.get("skipped")
    if not np.isfinite(loss) and not rejects:
        cause = find_cause(step) or (
            "lower the learning rate, clip gradients, or look at that step's data"
        )
        raise RunFailed(f"the loss is {loss} at step {step}: {cause}")
    if metrics.get("loss_scale", np.inf) <= 1 and not np.isfinite(norm):
        raise RunFailed(
            f"the loss scale fell to 1 at step {step}, and gradients are still not "
            "finite: lower the learning rate, clip gradients, or use bfloat16"
        )


def describe_skipped(step: int, metrics: Mapping[str, float]) -> str:
    """Says that the update of a step was skipped, and why; "" if it was not."""
    if not metrics.get("skipped"):
        return ""
    loss, norm = metrics["loss"], metrics["grad_norm"]
    if np.isfinite(loss) and np.isfinite(norm):
        why = f"grad_norm {norm:.4g}"
        if "loss_limit" in metrics:
            limits = metrics["loss_limit"], metrics["grad_norm_limit"]
            why = f"loss {loss:.4g} of at most {limits[0]:.4g}, grad_norm {norm:.4g} "
            why = f"{why}of at most {limits[1]:.4g}"
        return f"step {step}: the optimizer skipped its update, {why}"
    scale = metrics.get("loss_scale")
    with_scale = f", with a loss scale of {scale:g}" if scale else ""
    return (
        f"step {step}: its gradients are not finite (loss {loss:.4g}{with_scale}); the "
        "update was skipped"
    )


def too_many_spikes(step: int, metrics: Mapping[str, float], most: int) -> str:
    """Says that the last ``most`` steps were skipped as spikes; "" if they were not.

    Of a longer row it says so every ``most`` steps, so that a run that is resumed has
    as many again.
    """
    in_a_row = int(metrics.get("spikes_in_a_row", 0))
    if not in_a_row or in_a_row % most:
        return ""
    return (
        f"skip_spikes skipped the last {in_a_row} steps, up to step {step}: look at "
        "loss, grad_norm and their limits in metrics.jsonl, and at the data of these "
        "steps; if they are as they should be, raise k (optimizer.skip_spikes)"
    )


def beyond_vocabulary(batch: Any, model: nnx.Module) -> str:
    """Describes a token of a batch that the model's embedding has no row for, or ""."""
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
                "correct the tokens"
            )
    return ""
