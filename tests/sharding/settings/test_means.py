"""Arithmetic of Mean: sums, differences, quotients, and what is pooled."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard import Mean
from jshard.sharding.settings.count import exact
from jshard.sharding.settings.loss import Loss, seeds
from jshard.sharding.settings.maximum import Max


def terms(loss: Any) -> list[tuple[float, float, float]]:
    return [(float(w), float(m.total), float(m.count)) for w, m in loss.terms]


@pytest.mark.parametrize(
    "weight",
    [0.5, np.float32(0.5), np.array(0.5), jnp.float32(0.5)],
    ids=["float", "numpy scalar", "numpy array", "jax array"],
)
def test_a_mean_times_a_number_is_a_weighted_loss(weight):
    mean = Mean(6.0, 3.0)
    assert terms(weight * mean) == terms(mean * weight) == [(0.5, 6, 3)]
    assert terms(weight * (2 * mean)) == [(1, 6, 3)]


def test_sums_of_means_keep_every_term():
    a, b, c = Mean(1.0, 2.0), Mean(3.0, 4.0), Mean(5.0, 6.0)
    want = [(1, 1, 2), (0.1, 3, 4), (2, 5, 6)]
    assert terms(a + 0.1 * b + 2 * c) == want
    assert terms(a + (0.1 * b + 2 * c)) == want
    assert terms(sum([a, 0.1 * b, 2 * c])) == want
    assert terms(2 * (a + 0.1 * b)) == [(2, 1, 2), (0.2, 3, 4)]


def test_differences_and_quotients_of_means_are_weighted_sums():
    a, b = Mean(1.0, 2.0), Mean(3.0, 4.0)
    assert terms(-a) == terms(0 - a) == [(-1, 1, 2)]
    assert terms(a / 4) == [(0.25, 1, 2)]
    assert terms(a - b) == terms(a - 0 - b) == [(1, 1, 2), (-1, 3, 4)]
    assert terms(a - 2 * b) == terms(-(2 * b - a))[::-1] == [(1, 1, 2), (-2, 3, 4)]
    assert terms((a - b / 2) / 2) == [(0.5, 1, 2), (-0.25, 3, 4)]


@pytest.mark.parametrize("divide", [lambda a: a / a, lambda a: (2 * a) / (2 * a)])
def test_dividing_by_a_mean_is_an_error(divide):
    with pytest.raises(jshard.UserError, match="divide by a number"):
        divide(Mean(1.0, 2.0))


@pytest.mark.parametrize("misuse", [lambda m: m**0.5, lambda m: m * m])
def test_what_is_no_sum_says_what_to_write(misuse):
    with pytest.raises(jshard.UserError, match=r"metrics\['loss'\] \*\* 0\.5"):
        misuse(Mean(1.0, 2.0))


def test_means_and_losses_are_values():
    for value in (Mean(1.0, 2), 2 * Mean(1.0, 2)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, 0)


def test_adding_a_plain_number_to_a_loss_is_an_error():
    with pytest.raises(jshard.UserError, match="float"):
        _ = Mean(1.0, 2.0) + 1.5


@pytest.mark.parametrize(
    ("total", "count", "mean"),
    [(6.0, 3, 2.0), (0.0, 0, 0.0), (5.0, 0, 0.0), (0.3, 0.5, 0.6), (3.0, 1e-3, 3e3)],
)
def test_a_mean_divides_by_any_positive_count_and_is_zero_without_one(
    total, count, mean
):
    assert float(Mean(total, count).compute()) == pytest.approx(mean)


def test_means_pool_over_batches_by_count():
    def batch(total, count, hits):
        means = {"accuracy": Mean(hits, count)}
        return jshard.Means(Mean(total, count) + 0.5 * Mean(hits, 1.0), means)

    first, second = batch(10.0, 1.0, 1.0), batch(2.0, 3.0, 0.0)
    pooled = (first + second).compute()
    assert sum([second, first]).compute() == pooled  # pyright: ignore
    assert pooled == {"loss": 12 / 4 + 0.5 * (1 / 2), "accuracy": 1 / 4}
    assert list(pooled) == ["loss", "accuracy"]


def test_means_that_do_not_count_add_nothing_whatever_they_hold():
    loss = Mean(jnp.nan, 3.0) + 0.5 * Mean(4.0, exact(2))
    means = jshard.Means(loss, {"hits": Mean(jnp.inf, 4), "most": Max(7.0)})
    nothing = means.where(jnp.asarray(False))
    assert terms(nothing.loss) == [(1, 0, 0), (0.5, 0, 0)]
    assert not nothing.counted()
    one = jshard.Means(
        Mean(1.0, 2.0) + 0.5 * Mean(4.0, exact(2)),
        {
            "hits": Mean(1.0, 4),
            "most": Max(-3.0),
        },
    )
    kept = one.where(jnp.asarray(True))
    assert (kept + nothing).compute() == one.compute()


def test_the_seed_of_a_total_is_its_weight_by_its_global_count():
    low = Mean(jnp.float16(3), jnp.float16(1))
    loss = Loss(((2.0, Mean(jnp.ones(()), 1.0)), (3.0, low)))
    counts, trained = [jnp.asarray(8.0), jnp.asarray(0.0)], [None, None]
    found, none = seeds(loss, counts, trained, None)
    assert (list(map(float, found)), none) == ([0.25, 0], [])
    scaled, _ = seeds(loss, [counts[0], exact(6)], trained, jnp.asarray(4.0))
    assert list(map(float, scaled)) == [1, 2]
    assert [x.dtype for x in scaled] == [jnp.float32, jnp.float16]


def test_the_seed_of_a_trained_count_is_that_of_a_quotient():
    loss = Loss(((1.0, Mean(jnp.ones(()), 1)), (3.0, Mean(jnp.ones(()), 1.0))))
    counts, totals = [exact(2), jnp.asarray(4.0)], [None, jnp.asarray(8.0)]
    of_totals, of_counts = seeds(loss, counts, totals, jnp.asarray(2.0))
    assert list(map(float, of_totals)) == [1, 1.5]
    assert list(map(float, of_counts)) == [-3]  # -2 * 3 * 8 / 4**2


def test_means_of_nothing_are_no_loss_of_zero():
    nothing = jshard.Means(Mean(0.0, 0) + 0.5 * Mean(3.0, 0.0), {"hits": Mean(0.0, 0)})
    assert not nothing.counted()
    want = {"loss": pytest.approx(np.nan, nan_ok=True), "hits": 0}
    assert nothing.compute() == want
    some = nothing + jshard.Means(
        Mean(0.0, 1) + 0.5 * Mean(3.0, 0), {"hits": Mean(1, 1)}
    )
    assert some.compute() == {"loss": 0, "hits": 1}


def test_a_loss_is_a_pytree():
    loss = Mean(1.0, 2.0) + 0.5 * Mean(3.0, 4.0)
    doubled = jax.tree.map(lambda x: 2 * x, loss)
    assert isinstance(doubled, Loss)
    assert terms(doubled) == [(2, 2, 4), (1, 6, 8)]
