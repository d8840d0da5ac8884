"""However model code reaches a weight, it is the whole one: the numbers of one device.

Every way to reach a weight, for every place that a module can have in a model.
"""

# Layers take and return what they like.
# pyright: reportIncompatibleMethodOverride=false

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jshard
from filled import filled
from parity import make_mesh
from reach import PLACES, WAYS, called, called_as_set, indexed, leaves, values
from zoo_layers import WIDTH, Dense, Residual, example

pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.filterwarnings("ignore:parameter .* is read outside of its unit"),
    pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit"),
]

POLICY = jshard.Policy(min_shard_elements=0)

# Programs.


def make_model(place: str) -> Callable[[nnx.Rngs], nnx.Module]:
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.module, self.last = PLACES[place](rngs), jshard.Unit(Dense(rngs))

    return Model


def made(place: str) -> nnx.Module:
    return filled(lambda: make_model(place)(nnx.Rngs(0)))


def loss_fn(ways: list[Callable], model: Any, x: jax.Array) -> Any:
    """A loss that depends on every way's value, and the sum of these values.

    Each has a weight of its own, so that the mistakes of two do not cancel.
    """
    count, weights = x.shape[0], np.linspace(1, 2, len(ways))
    values = (w * way(model.module, x) for w, way in zip(weights, ways, strict=True))
    all_ways = jshard.Mean(sum(values) * count, count)
    loss = jshard.Mean(jnp.sum(jnp.sin(model.last(x)) ** 2), count)
    return loss + 0.1 * all_ways, {"all ways": all_ways}


def plain(place: str, ways: list[Callable]) -> tuple[dict, Any]:
    """(values, gradients) of the ordinary module."""
    graphdef, state, rest = nnx.split(made(place), nnx.Param, ...)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(state):
        model = nnx.merge(graphdef, state, rest, copy=True)
        loss, named = loss_fn(ways, model, example())
        total = sum(weight * mean.compute() for weight, mean in loss.terms)
        return total, {name: mean.compute() for name, mean in named.items()}

    (total, named), grads = loss(state)
    return named | {"loss": total}, grads


def check(
    place: str,
    ways: list[Callable],
    policy: jshard.Policy = POLICY,
    mesh: tuple[int, int] = (2, 4),
    units: Any = None,
) -> None:
    """One step gives the values and the gradients of the ordinary module."""
    want, want_grads = plain(place, ways)
    if units is None:
        model = nnx.eval_shape(lambda: make_model(place)(nnx.Rngs(0)))
        modules = nnx.iter_modules(model)
        units = {Residual} & {type(module) for path, module in modules if path}
    fsdp = jshard.FSDP(make_mesh(*mesh), policy, units=units)
    tx = optax.sgd(1.0)
    state = fsdp.from_model(made(place), tx)
    before = fsdp.fetch(state.params)
    step = fsdp.train_step(functools.partial(loss_fn, ways), tx)
    state, metrics = step(state, fsdp.shard_batch(np.asarray(example())))
    for name, value in want.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-9, err_msg=name)
    grads = jax.tree.map(np.subtract, before, fsdp.fetch(state.params))
    for (path, got), grad in zip(
        jax.tree_util.tree_leaves_with_path(grads),
        jax.tree.leaves(want_grads),
        strict=True,
    ):
        bound = 1e-9 * np.abs(grad).max() + 1e-15
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(got, grad, rtol=0, atol=bound, err_msg=name)


@pytest.mark.quick("unit")
@pytest.mark.parametrize("place", ["unit", "opaque stack", "unit in opaque unit"])
def test_a_weight_is_whole_however_it_is_reached(place):
    check(place, WAYS)


@pytest.mark.slow  # test_written_weights.py has a teacher
@pytest.mark.filterwarnings("ignore:loss_fn changes parameter")
@pytest.mark.parametrize("place", ["unit", "unit in stack"])
def test_a_weight_that_is_set_from_outside_its_unit_is_that_of_one_device(place):
    check(place, [called_as_set])


# What is told of a read.


def read(place: str, way: Callable) -> None:
    """Traces a step: of training for a Unit, and of an evaluation in other places."""
    fsdp = jshard.FSDP(make_mesh(1, 2), POLICY)
    tx = optax.identity()
    state = fsdp.abstract_state(make_model(place), tx)
    loss = functools.partial(loss_fn, [way])
    train = place == "unit"
    step = fsdp.train_step(loss, tx) if train else fsdp.eval_step(loss)
    step.trace(state, example())


@pytest.mark.parametrize(("place", "more"), [("unit", 1), ("opaque stack", 7)])
def test_a_step_tells_once_of_what_it_reads_outside_units_and_names_the_line(
    place, more
):
    with pytest.warns(UserWarning, match="is read outside") as told:
        read(place, indexed)
    (message,) = (str(warning.message) for warning in told)
    first = r"parameter 'module\.\S*bias' is read .* \(\S*reach\.py:\d+ \(indexed"
    others = rf"jshard\.gathered\(unit\); so are {more} more: 'module\.\S*kernel'"
    assert re.match(f"{first}.*{others}", message), message


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("place", ["unit", "unit in opaque unit", "opaque stack"])
def test_a_unit_that_is_called_is_not_told_of(place):
    read(place, called)


@pytest.mark.filterwarnings("error")
def test_to_look_at_a_weights_shape_or_to_print_it_is_no_read():
    def scaled(module, x):
        kernel = module.kernel
        assert kernel.shape == kernel[...].shape == jnp.shape(kernel) == (WIDTH, WIDTH)
        assert (kernel.ndim, kernel.size, kernel.dtype) == (2, WIDTH**2, float)
        assert str(module)  # as JAX does, for the name of a branch
        return called(module, x)

    read("unit", scaled)


@pytest.mark.core
def test_a_weight_that_is_set_in_part_is_refused_by_name():
    def assign(module, x):
        module.kernel[0] = jnp.zeros(WIDTH)
        return leaves(module, x)

    with pytest.raises(jshard.UserError, match=r"'module.kernel' is changed in part"):
        read("unit", assign)


@pytest.mark.parametrize(
    "step", ["eval_step", pytest.param("predict_step", marks=pytest.mark.core)]
)
def test_evaluation_and_prediction_read_whole_weights_too(step):
    fsdp = jshard.FSDP(make_mesh(2, 4), POLICY)
    model = filled(lambda: make_model("unit")(nnx.Rngs(0)))
    state = fsdp.from_model(model, optax.identity())
    batch = fsdp.shard_batch(np.asarray(example()))
    params = jax.tree.leaves(jax.device_get(nnx.state(model, nnx.Param)))
    want = sum(np.sum(value**2) for value in params)
    if step == "eval_step":
        loss_fn = lambda model, x: jshard.Mean(values(model, x) * len(x), len(x))
        got = fsdp.eval_step(loss_fn)(state, batch).compute()["loss"]
    else:
        predict = lambda model, x: jnp.full(len(x), values(model, x))
        got = fsdp.predict_step(predict)(state, batch)
    np.testing.assert_allclose(got, want, rtol=1e-9)


# Layers that nnx.vmap stacked.


@pytest.mark.quick("dims-full")
@pytest.mark.parametrize("remat", ["full", "none"])
@pytest.mark.parametrize("units", [(Residual,), {Residual: 1}], ids=["type", "dims"])
def test_layers_stacked_by_vmap_are_those_of_one_device(units, remat):
    policy = jshard.Policy(remat=remat, min_shard_elements=0)
    check("stacked by vmap", [called, leaves], policy, (1, 8), units)


@pytest.mark.parametrize(
    ("small", "units", "kernel", "bias"),
    [
        (0, (Residual,), P("fsdp"), P("fsdp")),
        (0, {Residual: 1, Dense: 0}, P(None, "fsdp"), P(None, "fsdp")),
        (WIDTH + 1, {Residual: 1}, P(None, "fsdp"), P()),  # what a layer has counts
    ],
)
def test_the_layer_dimension_is_not_sharded_where_units_tells_of_it(
    small, units, kernel, bias
):
    policy = jshard.Policy(min_shard_elements=small)
    fsdp = jshard.FSDP(make_mesh(1, 8), policy, units=units)
    state = fsdp.abstract_state(make_model("stacked by vmap"), optax.adam(1e-3))
    blocks: Any = state.params["module"]["blocks"]
    assert blocks["kernel"].get_value().sharding.spec == kernel
    assert blocks["bias"].get_value().sharding.spec == bias


def test_per_layer_keeps_a_state_for_layers_that_units_tells_of():
    fsdp = jshard.FSDP(make_mesh(1, 8), POLICY, units={Residual: 1})
    optimizer = jshard.optim.per_layer(optax.scale_by_adam())
    state: Any = fsdp.abstract_state(make_model("stacked by vmap"), optimizer)
    (key,) = state.opt_state.stacked
    assert key == "module.blocks"
    assert state.opt_state.stacked[key].count.shape == (8,)


@pytest.mark.parametrize(
    ("place", "units", "shape"),
    [("stacked by vmap", {Residual: 3}, r"\(8, 8\)"), ("unit", {Dense: 2}, r"\(8,\)")],
)
def test_layer_dimensions_that_a_type_does_not_have_are_refused(place, units, shape):
    fsdp = jshard.FSDP(make_mesh(1, 8), POLICY, units=units)
    message = rf"units: '.*bias' of shape {shape} does not have the . leading"
    with pytest.raises(jshard.UserError, match=message):
        fsdp.abstract_state(make_model(place), optax.adam(1e-3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "mesh"), list(zip(PLACES, itertools.cycle([(1, 8), (2, 4), (4, 1)])))
)
def test_a_weight_is_whole_however_it_is_reached_in_every_place(place, mesh):
    check(place, WAYS, mesh=mesh)


@pytest.mark.slow
@hypothesis.settings(max_examples=5)
@hypothesis.given(
    place=st.sampled_from(list(PLACES)),
    ways=st.lists(st.sampled_from(WAYS), min_size=1, max_size=3, unique=True),
    remat=st.sampled_from(["full", "dots", "none"]),
    reshard=st.sampled_from([True, False, 2]),
    accumulate=st.sampled_from([1, 2]),
    defer_scatter=st.booleans(),
    reshard_root=st.sampled_from([True, False]),
    mesh=st.sampled_from([(1, 8), (2, 4), (1, 2)]),
)
def test_so_it_is_with_any_policy(
    place, ways, remat, reshard, accumulate, defer_scatter, reshard_root, mesh
):
    reshard = reshard if mesh[1] > 1 else True
    policy = jshard.Policy(
        remat=remat,
        reshard_after_forward=False if defer_scatter else reshard,
        accumulate=accumulate,
        defer_scatter=defer_scatter and accumulate > 1,
        reshard_root=reshard_root and not defer_scatter,
        min_shard_elements=0,
    )
    check(place, ways, policy, mesh)
