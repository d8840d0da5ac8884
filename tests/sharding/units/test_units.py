"""Stack and Unit on a hybrid mesh: values and gradients of the ordinary modules."""

# Layers take and return what they like.
# pyright: reportIncompatibleMethodOverride=false

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jshard
import zoo
from jshard.sharding.units.model import make_sharded
from jshard.sharding.units.modules import is_unit
from parity import every_pair
from runs import call, check_close, check_run, plain_run, run
from zoo_layers import WIDTH, Dense, Residual, make_stack


class SharedAndStates(nnx.Module):
    """Shared parameters and states in one model, whose step is sooner compiled."""

    def __init__(self, rngs):
        self.shared, self.states = zoo.SharedParameters(rngs), zoo.States(rngs)

    def __call__(self, x):
        return self.states(self.shared(x))


@pytest.mark.quick("SharedAndStates")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "model", [*zoo.MODELS, SharedAndStates], ids=lambda m: m.__name__
)
def test_inside_a_mesh_a_model_does_what_it_does_outside(model):
    check_run(model)


@pytest.mark.slow  # test_parity.py and test_rngs.py have some of each
@pytest.mark.usefixtures("x64")
@every_pair(
    model=(zoo.Aux, zoo.Closures, zoo.UnitInStack, zoo.StackInStack),
    remat=("full", "dots", "none"),
    reshard_after_forward=(True, False),
)
def test_so_it_does_with_every_remat_and_reshard(case):
    policy = {name: value for name, value in case.items() if name != "model"}
    check_run(case["model"], jshard.Policy(**policy, min_shard_elements=0))


@pytest.mark.slow  # test_keyword_arguments.py and test_parity.py do
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "model",
    zoo.MODELS,
    ids=lambda m: m.__name__,
)
def test_so_it_does_with_transfers_beside_other_layers(model):
    check_run(model, jshard.Policy(prefetch=True, min_shard_elements=0))


@pytest.mark.slow  # test_rngs.py trains such units
@pytest.mark.usefixtures("x64")
def test_units_turns_submodules_into_units_and_leaves_units_alone():
    knobs: Any = {"remat": "dots", "reshard_after_forward": False}
    policy = jshard.Policy(min_shard_elements=0, **knobs)
    got = run(zoo.UnitInStack, policy, units=(Dense, Residual))
    check_close(jax.tree.leaves(got), jax.tree.leaves(plain_run(zoo.UnitInStack)), 1e-9)


class Nested(nnx.Module):
    """Units in a Stack and in a Unit, and a Stack beside them."""

    def __init__(self, rngs):
        layer = lambda rngs: nnx.Sequential(make_stack(Dense, rngs), Dense(rngs))
        self.outer = make_stack(layer, rngs)
        self.unit = jshard.Unit(layer(rngs))
        self.outermost = make_stack(Dense, rngs)


def test_a_stack_within_a_unit_does_not_prefetch():
    model = nnx.eval_shape(lambda: Nested(nnx.Rngs(0)))
    make_sharded(model, jshard.Policy(prefetch=True), {})
    modules: list[tuple[Any, Any]] = list(nnx.iter_modules(model))
    found = {path: m.unit_policy.prefetch for path, m in modules if is_unit(m)}
    outside = {("outer",): True, ("unit",): True, ("outermost",): True}
    inside = {("outer", "layers", 0): False, ("unit", "layers", 0): False}
    assert found == outside | inside


# State that differs by device.


class Watching(nnx.Module):
    """Keeps statistics of its device's examples alone, in a Stack and in a Unit."""

    class Layer(Dense):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.mean = nnx.BatchStat(jnp.zeros(WIDTH, dtype=float))

        def __call__(self, x):
            self.mean.set_value(x.mean(0))
            return super().__call__(x)

    def __init__(self, rngs):
        self.blocks = make_stack(self.Layer, rngs)
        self.unit = jshard.Unit(self.Layer(rngs))

    def __call__(self, x):
        return self.unit(self.blocks(x))


def test_state_that_would_differ_by_device_is_refused():
    message = r"model state 'blocks.mean' may end the step different on each device"
    with pytest.raises(jshard.UserError, match=message) as error:
        run(Watching)
    assert "\n" not in str(error.value)
    assert "jshard.pmean" in str(error.value)


class Drawing(nnx.Module):
    """Passes a random stream to what draws from it."""

    class Layer(Dense):
        def __call__(self, x, rngs):
            return super().__call__(x) * jax.random.uniform(rngs.noise(), x.shape)

    def __init__(self, rngs):
        self.rngs = nnx.Rngs(noise=rngs.params())
        self.unit = jshard.Unit(self.Layer(rngs))

    def __call__(self, x):
        return self.unit(x, self.rngs) - self.unit(x, self.rngs)


@pytest.mark.slow  # fsdp/test_steps.py counts draws
def test_draws_from_a_stream_that_is_passed_to_a_unit_count():
    (first, second), _, state = run(Drawing)
    assert first[0] > 0  # the two calls drew different numbers
    assert first[0] != second[0]
    assert int(state["rngs"]["noise"]["count"].get_value()) == 4


@pytest.mark.parametrize("inside", [True, False])
def test_a_stack_refuses_layers_that_draw_from_a_stream_they_all_share(inside):
    class Stacked(Drawing):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.unit = make_stack(self.Layer, rngs)

    with pytest.raises(
        jshard.UserError, match=r"changes its argument 'rngs'.*nnx.Rngs"
    ):
        call(Stacked, inside=inside)
