"""Mean: a sum and its count, divided only when both are global."""

import dataclasses
import functools
import math
import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jshard.errors import UserError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A total and the number of things it sums over, on this device's examples.

    A loss is a Mean, or a weighted sum of Means (``ce + 0.01 * router``, ``ce - z``),
    each divided by its own count over the whole global batch: a device with fewer
    tokens weighs less, as it would on one device.

    Attributes:
      total: scalar, sum over this device's part of the batch.
      count: scalar, how many terms the sum has (tokens, examples).
    """

    total: Any
    count: Any

    def __mul__(self, weight: Any) -> "Loss":
        if isinstance(weight, Tracer):  # it may be learned: keep its gradient
            return as_loss(Mean(weight * self.total, self.count))
        return Loss(((weight, self),))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "Loss":
        return self * _inverse(divisor)

    def __neg__(self) -> "Loss":
        return self * -1.0

    def __add__(self, other: Any) -> "Loss":
        return as_loss(self) + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Loss":
        return as_loss(self) - other

    def __rsub__(self, other: Any) -> "Loss":
        return -self + other

    def compute(self) -> Any:
        """The mean; 0 where nothing was counted."""
        return divide(self.total, self.count)


def divide(total: Any, count: Any) -> jax.Array:
    """``total / count``; 0 where nothing was counted."""
    some = jnp.asarray(count) > 0
    return jnp.where(some, total / jnp.where(some, count, 1), 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Loss:
    """A weighted sum of Means: ``terms`` holds (weight, Mean) pairs."""

    terms: tuple[tuple[Any, Mean], ...]

    def __mul__(self, weight: Any) -> "Loss":
        scaled = (mean * (weight * w) for w, mean in self.terms)
        return Loss(tuple(term for loss in scaled for term in loss.terms))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "Loss":
        return self * _inverse(divisor)

    def __neg__(self) -> "Loss":
        return self * -1.0

    def __add__(self, other: Any) -> "Loss":
        if isinstance(other, numbers.Number) and other == 0:  # the start of sum()
            return self
        return Loss(self.terms + as_loss(other).terms)

    __radd__ = __add__

    def compute(self) -> Any:
        """The weighted sum; nan, and not 0, where no term counted anything."""
        value = sum(weight * mean.compute() for weight, mean in self.terms)
        counted = functools.reduce(operator.or_, (m.count > 0 for _, m in self.terms))
        return jnp.where(counted, value, jnp.nan)

    def __sub__(self, other: Any) -> "Loss":
        if isinstance(other, numbers.Number) and other == 0:
            return self
        return self + -as_loss(other)

    def __rsub__(self, other: Any) -> "Loss":
        return -self + other


def _inverse(divisor: Any) -> Any:
    if isinstance(divisor, (Mean, Loss)):
        raise UserError(
            f"loss_fn divides by a {type(divisor).__name__}, whose counts are not "
            "global yet; divide by a number"
        )
    return 1 / divisor


def as_loss(value: Any) -> Loss:
    """``value`` as a Loss.

    Raises:
      UserError: it is neither a Mean nor a sum of Means.
    """
    if isinstance(value, Mean):
        return Loss(((1.0, value),))
    if isinstance(value, Loss):
        return value
    raise UserError(
        f"loss_fn returned {type(value).__name__}; it must return "
        "jshard.Mean(total, count), a weighted sum of Means, or "
        "(that, {'name': Mean, ...})"
    )


def split_result(result: Any) -> tuple[Loss, dict[str, Mean]]:
    """Takes what ``loss_fn`` returned apart, as (loss, named Means)."""
    metrics: dict[str, Mean] = {}
    if isinstance(result, tuple) and len(result) == 2:
        result, metrics = result
    if not isinstance(metrics, dict):
        raise UserError(
            "loss_fn returned a pair whose second part is a "
            f"{type(metrics).__name__}; it must be a dict of name to jshard.Mean"
        )
    for name, value in metrics.items():
        if not isinstance(value, Mean):
            raise UserError(
                f"loss_fn: metric {name!r} is a {type(value).__name__}; "
                "it must be a jshard.Mean(total, count)"
            )
        if name in ("loss", "grad_norm"):
            raise UserError(f"loss_fn: metric name {name!r} is taken; choose another")
    return as_loss(result), metrics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Means:
    """An evaluation's result: ``a + b`` pools two batches, count by count.

    Attributes:
      loss: the loss's terms with global totals and counts.
      metrics: the named Means of ``loss_fn``.
    """

    loss: Loss
    metrics: dict[str, Mean]

    def __add__(self, other: Any) -> "Means":
        if not isinstance(other, Means) and other == 0:
            return self
        pairs = zip(self.loss.terms, other.loss.terms, strict=True)
        return Means(
            Loss(tuple((weight, _pool(a, b)) for (weight, a), (_, b) in pairs)),
            {k: _pool(mean, other.metrics[k]) for k, mean in self.metrics.items()},
        )

    __radd__ = __add__

    def scaled(self, factor: float) -> "Means":
        """As if each example had come ``factor`` times, which may be a negative one."""

        def scale(mean: Mean) -> Mean:
            return Mean(factor * mean.total, factor * mean.count)

        return Means(
            Loss(tuple((weight, scale(mean)) for weight, mean in self.loss.terms)),
            {name: scale(mean) for name, mean in self.metrics.items()},
        )

    def counted(self) -> bool:
        """Whether any term of the loss counted anything."""
        return any(float(mean.count) > 0 for _, mean in self.loss.terms)

    def compute(self) -> dict[str, float]:
        """Floats by name, "loss" first, which is nan where nothing was counted."""
        loss = sum(float(w * mean.compute()) for w, mean in self.loss.terms)
        return {"loss": loss if self.counted() else math.nan} | {
            k: float(m.compute()) for k, m in self.metrics.items()
        }


def _pool(a: Mean, b: Mean) -> Mean:
    return Mean(a.total + b.total, a.count + b.count)
