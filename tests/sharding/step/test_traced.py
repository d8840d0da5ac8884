"""Which values of a step's program may differ by device, and over which axes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jshard
from jshard.sharding.layout.state_layout import Layout
from jshard.sharding.settings.state import ModelArrays
from jshard.sharding.step.program.refusals import names_in
from jshard.sharding.step.program.traced import differing
from jshard.system.errors import UserError

PAIRS = [[0, 1], [2, 3]]
BOTH = ("replica", "fsdp")


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.unit = jshard.Unit(nnx.Linear(8, 8, use_bias=False, rngs=rngs))


@functools.cache
def layout_and_arrays() -> tuple[Layout, ModelArrays]:
    """Of one parameter, which is sharded over "fsdp", on 2 x 4 devices."""
    policy = jshard.Policy(min_shard_elements=0)
    fsdp = jshard.FSDP(jshard.make_mesh(replica=2), policy)
    state = fsdp.abstract_state(Model, optax.identity())
    return Layout.of(state, policy, fsdp.mesh), state.model_arrays


def differs(fn: Any, *inputs: Any) -> list[bool]:
    """Whether the results of ``fn(shard, *inputs)`` may differ by device."""
    found: list[list[bool]] = []
    layout, arrays = layout_and_arrays()

    def local(*inputs: Any) -> None:
        traced = jax.make_jaxpr(fn)(jnp.zeros((8, 2)), *inputs)
        found.append(differing(traced.jaxpr, layout, arrays, inputs))

    specs = tuple(P(BOTH) if np.ndim(x) else P() for x in inputs)
    run = jax.shard_map(
        local, mesh=layout.mesh, in_specs=specs, out_specs=None, check_vma=False
    )
    jax.eval_shape(run, *inputs)
    return found[0]


X = np.ones(16, np.float32)
RESULTS = {
    "a sum of its own": (lambda w, x: jnp.sum(x), True),
    "a scalar": (lambda w, x: 2.0 * jnp.ones(()), False),
    "a sum over all": (lambda w, x: lax.psum(x, BOTH), False),
    "a sum over one axis": (lambda w, x: lax.psum(x, "fsdp"), True),
    "a sum over the other, too": (
        lambda w, x: lax.psum(lax.psum(x, "fsdp"), "replica"),
        False,
    ),
    "the largest": (lambda w, x: lax.pmax(x, BOTH), False),
    "all of them": (lambda w, x: lax.all_gather(x, BOTH), False),
    "a sum in groups": (
        lambda w, x: lax.psum(lax.pmax(x, "replica"), "fsdp", axis_index_groups=PAIRS),
        True,
    ),
    "a gather in groups": (
        lambda w, x: lax.all_gather(
            lax.pmax(x, "replica"), "fsdp", axis_index_groups=PAIRS
        ),
        True,
    ),
    "a part of the sum": (lambda w, x: lax.psum_scatter(x[:4], "fsdp"), True),
    "a place in the mesh": (lambda w, x: lax.axis_index("replica"), True),
    "its part of what is equal": (
        lambda w, x: jnp.arange(4)[lax.axis_index("fsdp")],
        True,
    ),
    "a shard": (lambda w, x: w, True),
    "a gathered shard": (lambda w, x: lax.all_gather(w, "fsdp"), False),
    "a shard, summed over replicas": (lambda w, x: lax.psum(w, "replica"), True),
    "beside what differs": (
        lambda w, x: lax.optimization_barrier((x, lax.psum(x, BOTH)))[1],
        False,
    ),
    "a number that the host gives": (
        lambda w, x: jax.pure_callback(
            lambda: np.float32(0), jax.ShapeDtypeStruct((), np.float32)
        ),
        True,
    ),
}


@pytest.mark.parametrize("what", RESULTS)
def test_a_result_differs_unless_it_is_computed_from_what_all_have(what):
    fn, expected = RESULTS[what]
    assert differs(fn, X.repeat(4)) == [expected]


def test_arrays_of_a_batch_differ_and_its_numbers_do_not():
    found = differs(lambda w, x, number: (x, number), X, np.float32(1))
    assert found == [True, False]


def equal(x: jax.Array) -> jax.Array:
    return lax.psum(jnp.sum(x), BOTH) > 0


def by_fsdp(x: jax.Array) -> jax.Array:
    return lax.psum(jnp.sum(x), "replica") > 0


def sums(x: jax.Array) -> jax.Array:
    return lax.psum(x, BOTH)


def exchanges(x: jax.Array) -> jax.Array:
    return lax.all_to_all(x, "replica", 0, 0)


def in_branch(condition: Any, runs: Any = sums) -> Any:
    return lambda w, x: lax.cond(condition(x), runs, lambda x: x, x)


def in_loop(condition: Any, runs: Any = sums) -> Any:
    goes_on = lambda s: s[0] & (s[1] < 3)

    def loop(w: Any, x: jax.Array) -> jax.Array:
        body = lambda s: (s[0], s[1] + 1, runs(s[2]))
        return lax.while_loop(goes_on, body, (condition(x), 0, x))[2]

    return loop


@pytest.mark.parametrize("where", [in_branch, in_loop])
def test_collectives_wait_only_under_a_condition_that_all_have(where):
    assert differs(where(equal), X) == [True]
    for condition in (by_fsdp, lambda x: x[0] > 0):
        with pytest.raises(UserError, match=r"test_traced.py:.*: a branch or loop"):
            differs(where(condition), X)
    apart = lambda w, x: lax.cond(x[0] > 0, lambda x: x, lambda x: -x, x)
    assert differs(apart, X) == [True]  # no collective waits


@pytest.mark.parametrize("where", [in_branch, in_loop])
def test_devices_that_exchange_must_agree_and_others_need_not(where):
    assert differs(where(by_fsdp, exchanges), X) == [True]
    # All else may have a backward that sums over further axes, as a gather has.
    of_one_axis = lambda x: lax.psum(x, "replica")
    others = lambda x: exchanges(of_one_axis(x))
    for condition, runs in (
        (lambda x: x[0] > 0, exchanges),
        (lambda x: lax.psum(jnp.sum(x), "fsdp") > 0, exchanges),
        (by_fsdp, of_one_axis),
        (by_fsdp, others),
    ):
        with pytest.raises(UserError, match=r"test_traced.py:.*: a branch or loop"):
            differs(where(condition, runs), X)


def test_a_gather_under_a_condition_is_refused_by_the_name_of_what_it_gathers():
    def branch(w, x):
        gathers = lambda w: lax.all_gather(w * 1, "fsdp").sum()
        return lax.cond(x[0] > 0, gathers, lambda w: 0.0, w)

    message = r"a branch or loop has collectives inside"
    with pytest.raises(UserError, match=message):
        differs(branch, X)

    def of_shard(w, x):
        gathers = lambda w: lax.all_gather(w.reshape(16), "fsdp").sum()
        return lax.cond(x[0] > 0, gathers, lambda w: 0.0, w)

    with pytest.raises(UserError, match=r"which gathers 'unit\.kernel' with all"):
        differs(of_shard, X)


def test_names_of_activations_are_found_in_loops_and_branches():
    def fn(x):
        x = checkpoint_name(x, "first")
        inner = lambda x: checkpoint_name(x, "second")
        x = lax.cond(x > 0, inner, lambda x: x, x)
        named = lambda c, _: (checkpoint_name(c, "third"), None)
        return lax.scan(named, x, None, length=2)[0]

    assert {*names_in(jax.make_jaxpr(fn)(1.0).jaxpr)} == {"first", "second", "third"}
