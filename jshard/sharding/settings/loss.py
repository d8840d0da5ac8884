"""Mean: a sum and its count, divided only after both are summed over all devices."""

import dataclasses
import functools
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jshard.sharding.settings.callers_mesh import own_mesh
from jshard.sharding.settings.count import Count, add_up, as_float, exact
from jshard.sharding.settings.maximum import Max, is_max
from jshard.sharding.settings.mesh import manual_axes
from jshard.sharding.settings.precision import at_least_float32
from jshard.system.errors import UserError


class _Sum:
    """The operators of weighted sums of Means."""

    def __mul__(self, weight: Any) -> "Loss":
        if isinstance(weight, _Sum):
            self._refuse("multiplies a Mean by another")
        return Loss(tuple((weight * w, mean) for w, mean in as_loss(self).terms))

    def __rmul__(self, weight: Any) -> "Loss":
        return self * weight

    def __truediv__(self, divisor: Any) -> "Loss":
        if isinstance(divisor, _Sum):
            raise UserError(
                f"loss_fn divides by a {type(divisor).__name__}, whose counts are not "
                "global yet; divide by a number"
            )
        return self * (1 / divisor)

    def __pow__(self, exponent: Any) -> "Loss":
        self._refuse(f"raises a Mean to the power {exponent}")

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(
            f"loss_fn {what}, whose total and count are not global yet; do that with "
            "what the step returns (metrics['loss'] ** 0.5), or train on a function of "
            "jshard.pmean((total, count)) as jshard.Mean(value, 1)"
        )

    def __neg__(self) -> "Loss":
        return self * -1.0

    def __add__(self, other: Any) -> "Loss":
        loss = as_loss(self)
        if isinstance(other, numbers.Number) and other == 0:  # the start of sum()
            return loss
        return Loss(loss.terms + as_loss(other, "loss_fn adds to a Mean").terms)

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Loss":
        return self + (-other if isinstance(other, _Sum) else other)

    def __rsub__(self, other: Any) -> "Loss":
        return -self + other


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean(_Sum):
    """A total over this device's examples, and the number of terms in it.

    A loss is a Mean or a weighted sum of Means (``ce + 0.01 * router``, ``ce - z``).
    Each Mean is divided by its own count over the entire global batch, so that a device
    with fewer tokens weighs less, exactly as on one device.

    Attributes:
      total: scalar, the sum over this device's part of the batch.
      count: scalar, how many terms (tokens, examples) the sum has; not negative. Whole
        numbers add up exactly. One that depends on what is trained (a sum of learned
        weights, the denominator of a Dice loss) has its part of the gradient.
    """

    total: Any
    count: Any

    def compute(self) -> Any:
        """Returns the mean; 0 if nothing was counted."""
        return divide(self.total, self.count)


def divide(total: Any, count: Any) -> jax.Array:
    """Returns ``total / count``; 0 if nothing was counted, nan below that."""
    total, count = exact(total), exact(count)
    dtypes = [x.dtype for x in (total, count) if not isinstance(x, Count)]
    dtype = jnp.result_type(*(dtypes or [float]))
    total, count = as_float(total, dtype), as_float(count, dtype)
    some = count != 0
    mean = jnp.where(some, total / jnp.where(some, count, 1), 0)
    return jnp.where(count < 0, jnp.nan, mean)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Loss(_Sum):
    """A weighted sum of Means: ``terms`` holds (weight, Mean) pairs."""

    terms: tuple[tuple[Any, Mean], ...]

    def compute(self) -> Any:
        """Returns the weighted sum; nan, not 0, if no term counted anything."""
        value = sum(weight * mean.compute() for weight, mean in self.terms)
        counts = [as_float(exact(mean.count)) for _, mean in self.terms]
        counted = functools.reduce(operator.or_, (count != 0 for count in counts))
        return jnp.where(counted, value, jnp.nan)


def as_loss(value: Any, what: str = "loss_fn returned") -> Loss:
    """Returns a Mean or a Loss as a Loss.

    Raises:
      UserError: ``value``, which ``what`` describes, is neither.
    """
    if isinstance(value, Mean):
        return Loss(((1.0, value),))
    if isinstance(value, Loss):
        return value
    instead = (
        "it must return jshard.Mean(total, count), a weighted sum of Means, or "
        "(that, {'name': Mean, ...})"
    )
    raise UserError(f"{what} {_kind(value)}; {_advice(value) or instead}")


def _advice(value: Any) -> str:
    """Says how a number becomes a Mean; empty for other values."""
    if not isinstance(value, (jax.Array, np.ndarray, numbers.Number)):
        return ""
    return (
        "for jnp.mean(x) write jshard.Mean(jnp.sum(x), x.size), a sum and its count; "
        "for a number x that is the same on every device, jshard.Mean(x, 1)"
    )


_OF_EXAMPLES = "what each example has (logits) comes from fsdp.predict_step"


def _kind(value: Any) -> str:
    """Describes a value that is no Mean, for error messages."""
    if value is None:
        return "None"
    if isinstance(value, (jax.Array, np.ndarray)):
        return f"an array of shape {value.shape}"
    return f"a value of type {type(value).__name__}"


# Metrics that a step adds; those of a loss scale are taken without one, too.
_OF_STEPS = (
    "loss", "grad_norm", "loss_scale", "optimizer_updates", "skipped", "skipped_steps",
    "loss_limit", "grad_norm_limit", "spikes_in_a_row",
)  # fmt: skip


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Means:
    """The result of an evaluation step; ``a + b`` pools the counts of two batches.

    Attributes:
      loss: the terms of the loss, with global totals and counts.
      metrics: what ``loss_fn`` names, each a Mean or a Max.
    """

    loss: Loss
    metrics: Mapping[str, Mean | Max]

    @own_mesh()
    def _map(
        self, fn: Callable[..., Mean], pick: Callable[..., Max], *others: "Means"
    ) -> "Means":
        """Applies ``fn`` to each Mean, and ``pick`` to each Max; weights stay."""

        def choose(x: Any, *more: Any) -> Any:
            if isinstance(x, Mean):
                return fn(x, *more)
            return pick(x, *more) if is_max(x) else x

        is_leaf = lambda x: isinstance(x, Mean | Max)
        return jax.tree.map(choose, self, *others, is_leaf=is_leaf)

    def __add__(self, other: Any) -> "Means":
        if not isinstance(other, Means) and other == 0:  # the start of sum()
            return self
        add = lambda a, b: exact(a) + exact(b)
        return self._map(
            lambda a, b: Mean(add(a.total, b.total), add(a.count, b.count)),
            Max.larger,
            other,
        )

    __radd__ = __add__

    def where(self, counts: jax.Array | None) -> "Means":
        """Returns these Means, or ones of nothing if ``counts`` is a bool and False."""
        if counts is None:
            return self
        return self._map(
            lambda mean: jax.tree.map(lambda x: jnp.where(counts, x, 0), mean),
            lambda largest: Max(jnp.where(counts, largest.value, -jnp.inf)),
        )

    def counted(self) -> bool:
        """Returns whether any term of the loss counted anything."""
        return any(float(mean.count) > 0 for _, mean in self.loss.terms)

    @own_mesh()
    def compute(self) -> dict[str, float]:
        """Returns floats by name: first "loss", which is nan if nothing was counted."""
        means = {"loss": self.loss, **self.metrics}
        return {name: float(mean.compute()) for name, mean in means.items()}


def terms_of(result: Any) -> tuple[Loss, dict[str, Mean | Max], list[jax.Array]]:
    """Returns the loss, the named metrics, and the weights that the step computes.

    Weights that a step computes, and may learn, are multiplied into their totals; those
    of the loss are constants.

    Raises:
      UserError: ``loss_fn`` returned something else, or Means of no scalars.
    """
    metrics: dict[str, Any] = {}
    if isinstance(result, tuple) and len(result) == 2:
        result, metrics = result
    if not isinstance(metrics, dict):
        raise UserError(
            f"loss_fn returned (loss, aux), and aux is {_kind(metrics)}; return ("
            "jshard.Mean(jnp.sum(losses), losses.size), {'accuracy': jshard.Mean("
            f"...)}}), a dict of name to jshard.Mean; {_OF_EXAMPLES}"
        )
    for name, value in metrics.items():
        if not isinstance(value, Mean | Max):
            instead = (
                "it must be a jshard.Mean(total, count), or a jshard.nn.Max(value)"
            )
            raise UserError(
                f"loss_fn: metric {name!r} is {_kind(value)}; "
                f"{_advice(value) or instead}"
                + (f"; {_OF_EXAMPLES}" if getattr(value, "ndim", 0) else "")
            )
        if name in _OF_STEPS:
            raise UserError(f"loss_fn: metric name {name!r} is taken; choose another")
    terms, computed = [], []
    for weight, mean in as_loss(result).terms:
        if isinstance(weight, Tracer):
            computed.append(jnp.asarray(weight))
            weight, mean = 1.0, Mean(weight * mean.total, mean.count)
        mean = _of_scalars(mean)
        mean = Mean(as_float(mean.total), mean.count)  # it has a gradient
        terms.append((jnp.asarray(weight), mean))
    named = {name: _of_scalars(mean) for name, mean in metrics.items()}
    return Loss(tuple(terms)), named, computed


def _of_scalars(mean: Any) -> Any:
    if is_max(mean):
        if jnp.shape(mean.value):
            raise UserError(
                f"loss_fn: a Max needs a scalar, got shape {jnp.shape(mean.value)}; "
                "take jnp.max of it first"
            )
        value = jnp.asarray(mean.value)
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            value = value.astype(float)
        return Max(at_least_float32(value))
    shapes = jnp.shape(mean.total), jnp.shape(mean.count)
    if any(shapes):
        raise UserError(
            f"loss_fn: a Mean needs scalars, got total of shape {shapes[0]} and count "
            f"of shape {shapes[1]}; sum them first"
        )
    if isinstance(mean.count, (numbers.Real, np.ndarray)) and mean.count < 0:
        raise UserError(
            f"loss_fn: a Mean has the count {mean.count}; it is the number of terms in "
            "the total, which cannot be negative"
        )
    return Mean(exact(mean.total), exact(mean.count))


def seeds(
    loss: Loss, counts: list[Any], totals: list[Any], scale: jax.Array | None
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the cotangents of this device's totals, and of the counts that train.

    Of ``weight * total / count``, by its derivatives, times scale.

    Args:
      loss: its weights, and the dtypes of its terms.
      counts: the global count of each term.
      totals: the global total of each term whose count depends on what is trained, and
        None for others.
      scale: None is 1.
    """
    of_totals, of_counts = [], []
    for (weight, mean), count, total in zip(loss.terms, counts, totals, strict=True):
        seed = divide(weight, count)
        seed = seed if scale is None else seed * scale
        of_totals.append(seed.astype(mean.total.dtype))
        if total is not None:
            of_counts.append((-seed * divide(total, count)).astype(count.dtype))
    return of_totals, of_counts


def over_devices(means: Means, counts: Sequence[Any] | None = None) -> Means:
    """Sums totals and counts over all devices; a Max is the largest of theirs.

    Args:
      means: a device's.
      counts: the global counts of the loss, if these are known already.
    """
    if counts is not None:
        terms = zip(means.loss.terms, counts, strict=True)
        summed = [(w, Mean(add_up(m.total, manual_axes()), x)) for (w, m), x in terms]
        rest = over_devices(dataclasses.replace(means, loss=Loss(())))
        return dataclasses.replace(rest, loss=Loss(tuple(summed)))
    axes = manual_axes()
    return means._map(
        lambda mean: Mean(add_up(mean.total, axes), add_up(mean.count, axes)),
        lambda largest: largest.over(axes),
    )
