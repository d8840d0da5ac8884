"""Stack and Unit outside a mesh: ordinary modules. What they refuse, everywhere."""

# Layers take and return what they like.
# pyright: reportIncompatibleMethodOverride=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from runs import call, check_close
from zoo_layers import (
    EXAMPLES,
    LAYERS,
    WIDTH,
    Dense,
    Residual,
    Stateful,
    Toolbox,
    example,
    make_stack,
)


def layers_of(stack: Any, layer: Any) -> list[Any]:
    """The layers of a Stack as modules of their own."""
    modules = [nnx.eval_shape(lambda: layer(nnx.Rngs(0))) for _ in range(LAYERS)]
    state = jax.device_get(nnx.state(stack))  # JAX compiles a program for each index
    for i, module in enumerate(modules):
        nnx.update(module, jax.tree.map(lambda v, i=i: jnp.asarray(v[i]), state))
    return modules


@nnx.jit
def call_all(modules: Any, x: jax.Array) -> jax.Array:
    return functools.reduce(lambda x, module: module(x), modules, x)


def stacked_states(layers: Any) -> Any:
    states = jax.device_get([nnx.state(layer) for layer in layers])
    return jax.tree.map(lambda *v: np.stack(v), *states)


@pytest.mark.usefixtures("x64")
def test_a_stack_is_a_loop_over_its_layers_state_included():
    stack = filled(lambda: make_stack(Stateful, nnx.Rngs(0)))
    layers = nnx.List(layers_of(stack, Stateful))
    x = y = example()
    for _ in range(2):
        x, y = call_all([stack], x), call_all(layers, y)
        check_close(x, y)
    assert stack.calls[...].tolist() == [2] * LAYERS
    stacked = stacked_states(layers)
    check_close(jax.tree.leaves(nnx.state(stack)), jax.tree.leaves(stacked))


@pytest.mark.usefixtures("x64")
def test_a_stack_has_the_gradients_of_a_loop():
    stack = filled(lambda: make_stack(Residual, nnx.Rngs(0)))
    layers = nnx.List(layers_of(stack, Residual))
    x = example()

    def loop(layers, x):
        return jnp.sum(functools.reduce(lambda x, layer: layer(x), layers, x) ** 2)

    of_stack = nnx.grad(lambda s, x: jnp.sum(s(x) ** 2), argnums=(0, 1))
    got, got_x = nnx.jit(of_stack)(stack, x)
    want, want_x = jax.device_get(nnx.jit(nnx.grad(loop, argnums=(0, 1)))(layers, x))
    check_close(got_x, want_x)
    for name in ("kernel", "bias"):
        of_layers = [want[i][name].get_value() for i in range(LAYERS)]
        check_close(got[name][...], np.stack(of_layers))


def test_a_stack_returns_aux_stacked():
    class WithAux(Residual):
        def __call__(self, x):
            return super().__call__(x), {"mean": x.mean(0), "none": None, "n": 2}

    stack = filled(lambda: make_stack(WithAux, nnx.Rngs(0)))
    y, aux = nnx.jit(lambda stack, x: stack(x))(stack, example())
    assert y.shape == (EXAMPLES, WIDTH)
    assert aux["mean"].shape == (LAYERS, WIDTH)
    assert aux["none"] is None
    assert aux["n"].tolist() == [2] * LAYERS
    first = np.asarray(aux["mean"])[0]
    check_close(first, np.asarray(example()).mean(0), 1e-6)


def test_stacked_batch_norm_keeps_statistics_of_its_own_a_layer():
    class Normed(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.linear(x))

    stack = filled(lambda: make_stack(Normed, nnx.Rngs(0)))
    stack.norm.var.set_value(jnp.ones((LAYERS, WIDTH)))
    layers = nnx.List(layers_of(stack, Normed))
    x = y = example(jnp.float32)
    for mode in ("train", "eval"):
        for module in (stack, *layers):
            getattr(module, mode)()
        y = call_all(layers, y)
        check_close(call_all([stack], x), y, 1e-5)
        x = y
    means = np.stack([layer.norm.mean.get_value() for layer in layers])
    check_close(stack.norm.mean[...], means, 1e-5)
    assert np.all(means[0] != means[1])


def test_unit_and_stack_add_nothing_to_parameter_paths():
    class Plain(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed = nnx.Embed(4, WIDTH, rngs=rngs)
            self.block = nnx.Sequential(Dense(rngs), Dense(rngs))

    class Wrapped(Plain):
        def __init__(self, rngs: nnx.Rngs):
            super().__init__(rngs)
            self.embed = jshard.Unit(self.embed)
            self.block = jshard.Stack(
                lambda rngs: nnx.Sequential(Dense(rngs), jshard.Unit(Dense(rngs))),
                LAYERS,
                rngs=rngs,
            )

    plain, wrapped = (
        dict(nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda m=m: m(nnx.Rngs(0))))))
        for m in (Plain, Wrapped)
    )
    assert plain.keys() == wrapped.keys()
    for path, variable in plain.items():
        layers = (LAYERS,) if path[0] == "block" else ()
        assert wrapped[path].get_value().shape == (*layers, *variable.get_value().shape)


def test_a_unit_is_still_the_module_it_wraps():
    module = filled(lambda: Toolbox(nnx.Rngs(0)))
    unit = jshard.Unit(filled(lambda: Toolbox(nnx.Rngs(0))))
    assert isinstance(unit, Toolbox)
    assert isinstance(unit, jshard.Unit)
    assert isinstance(filled(lambda: make_stack(Toolbox, nnx.Rngs(0))), Toolbox)
    x = example()
    methods = ("__call__", "transposed", "compiled", "forgotten", "double", "scale")
    for name in methods:
        np.testing.assert_array_equal(getattr(unit, name)(x), getattr(module, name)(x))
    assert unit.rows == module.rows == WIDTH
    assert unit.factor == 2
    assert "compiled" in dir(unit)


def test_gathered_outside_a_mesh_is_the_unit_itself():
    dense = filled(lambda: Dense(nnx.Rngs(0)))
    unit = jshard.Unit(filled(lambda: Dense(nnx.Rngs(0))))
    assert jshard.gathered(unit) is unit
    assert jshard.gathered(dense) is dense
    x = example()
    module, same = jshard.gathered(unit, before=x)
    assert module is unit
    assert same is x
    blocks = filled(lambda: make_stack(Dense, nnx.Rngs(0)))
    module, out = jshard.gathered(unit, during=(blocks, x))
    assert module is unit
    np.testing.assert_array_equal(out, blocks(x))


# Errors.


@pytest.mark.quick("tree-True", "dtype-False", "shape-True", "triple-False")
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.astype(jnp.bfloat16), r"turns float32\[\d+, 8\] into bfloat16"),
        (lambda x: x[:, :4], r"turns float32\[\d+, 8\] into float32\[\d+, 4\]"),
        (lambda x: {"x": x}, r"must return its first argument's tree, or a pair"),
        (lambda x: (x, x, x), r"must return its first argument's tree, or a pair"),
    ],
    ids=["dtype", "shape", "tree", "triple"],
)
def test_a_layer_that_does_not_return_what_it_takes_is_refused(inside, change, message):
    class Changing(nnx.Module):
        class Layer(Dense):
            def __call__(self, x):
                return change(super().__call__(x))

        def __init__(self, rngs):
            self.blocks = make_stack(self.Layer, rngs)

        def __call__(self, x):
            return self.blocks(x)

    with pytest.raises(jshard.UserError, match=message):
        call(Changing, inside=inside)


def test_what_is_a_unit_already_is_refused():
    abstract = lambda make: nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    dense, stack = abstract(Dense), abstract(lambda rngs: make_stack(Dense, rngs))
    with pytest.raises(jshard.UserError, match="is a Unit or a Stack already"):
        jshard.Unit(jshard.Unit(abstract(Dense)))
    with pytest.raises(jshard.UserError, match="is a Unit or a Stack already"):
        jshard.Unit(stack)
    with pytest.raises(jshard.UserError, match="layers are Units or Stacks already"):
        abstract(lambda rngs: make_stack(lambda rngs: jshard.Unit(Dense(rngs)), rngs))
    with pytest.raises(jshard.UserError, match="layers are Units or Stacks already"):
        abstract(lambda rngs: make_stack(lambda rngs: make_stack(Dense, rngs), rngs))
    with pytest.raises(jshard.UserError, match="num_layers=0 must be at least 1"):
        jshard.Stack(Dense, 0, rngs=nnx.Rngs(0))
    with pytest.raises(jshard.UserError, match=r"a Module has no arrays.* call one 3"):
        jshard.Stack(lambda rngs: nnx.Module(), 3, rngs=nnx.Rngs(0))
    with pytest.raises(jshard.UserError, match="gathers one layer at a time"):
        jshard.gathered(stack)
    with pytest.raises(jshard.UserError, match="gathered: mask= needs during="):
        jshard.gathered(dense, mask=1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(jshard.UserError, match="before= or during=, not both"):
        jshard.gathered(dense, before=1, during=(dense, 1))  # pyright: ignore[reportCallIssue]


# A gradient that waits.


@pytest.mark.parametrize("before", [True, False])
def test_features_wait_for_the_gradient_of_the_head_gathered_before_them(before):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.blocks, self.head = make_stack(Dense, rngs), jshard.Unit(Dense(rngs))

        def __call__(self, x):
            x = self.blocks(x)
            if not before:
                return jshard.gathered(self.head)(x)
            head, x = jshard.gathered(self.head, before=x)
            return head(x)

    def loss_fn(model, x):
        return jshard.Mean(jnp.sum(model(x)), x.size)

    optimizer = optax.sgd(0.1)
    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(min_shard_elements=0))
    state = fsdp.abstract_state(Model, optimizer)
    step = fsdp.train_step(loss_fn, optimizer).trace(state, example(jnp.float32))
    (inside,) = [e for e in step.jaxpr.eqns if e.primitive.name == "shard_map"]
    scattered = set()
    waits = False
    for eqn in inside.params["jaxpr"].eqns:
        if eqn.primitive.name == "reduce_scatter":
            scattered.update(eqn.outvars)
        if eqn.primitive.name == "optimization_barrier":
            waits |= any(v in scattered for v in eqn.invars)
    assert scattered
    assert waits == before
