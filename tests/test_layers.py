"""Stack and Unit: ordinary modules outside a step, gathers inside, paths unchanged."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard

D, LAYERS = 8, 3


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(D, D, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x, scale=1.0):
        self.calls.set_value(self.calls.get_value() + 1)
        return jnp.tanh(self.linear(x)) * scale

    def twice(self, x, *, shift: bool):
        return 2 * self.linear(x) + (1 if shift else 0)


class WithAux(Layer):
    def __call__(self, x, scale=1.0):
        y = super().__call__(x, scale)
        return y, {"norm": jnp.sum(y**2)}


def stack_of(cls: type = Layer) -> Any:
    return jshard.Stack(cls, LAYERS, rngs=nnx.Rngs(0))


def layers_of(stack: Any, cls: type = Layer) -> list:
    """The stack's layers as plain modules with their own copies of the values."""
    state = nnx.state(stack)
    layers = []
    for i in range(LAYERS):
        layer = cls(nnx.Rngs(0))
        nnx.update(layer, jax.tree.map(lambda x, i=i: x[i], state))
        layers.append(layer)
    return layers


def x_of(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def make_fsdp(units: tuple = (), **policy: Any) -> jshard.FSDP:
    policy = {"min_shard_elements": 0} | policy
    return jshard.FSDP(
        jshard.make_mesh(replica=2), jshard.Policy(**policy), units=units
    )


def run(make_model: Any, forward: Any, batch: Any, fsdp: jshard.FSDP | None = None):
    """One SGD step at rate 1 in a jshard step: (loss, gradients by path, state)."""
    fsdp = fsdp or make_fsdp()

    def loss_fn(model, batch):
        y = forward(model, batch)
        return jshard.Mean(jnp.sum(y), 1.0 * len(y))

    state = fsdp.init(make_model, optax.sgd(1.0))
    before = by_path(fsdp.unshard(state.params))
    state, metrics = fsdp.train_step(loss_fn, optax.sgd(1.0))(
        state, fsdp.shard_batch(batch)
    )
    after = by_path(fsdp.unshard(state.params))
    return metrics["loss"], {k: before[k] - after[k] for k in before}, state


def reference(make_model: Any, forward: Any, batch: Any):
    """The same without jshard: (loss, gradients by path)."""
    model = make_model(nnx.Rngs(0))

    def mean(model):
        return jnp.mean(forward(model, batch).reshape(len(batch), -1).sum(1))

    loss, grads = nnx.value_and_grad(mean)(model)
    return loss, by_path(grads)


def by_path(state: Any) -> dict[str, Any]:
    flat = nnx.to_flat_state(state)
    return {".".join(map(str, path)): v.get_value() for path, v in flat}


def check(make_model: Any, forward: Any, batch: Any, fsdp: Any = None) -> Any:
    loss, grads, state = run(make_model, forward, batch, fsdp)
    want_loss, want_grads = reference(make_model, forward, batch)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    chex.assert_trees_all_close(grads, want_grads, rtol=1e-4, atol=1e-5)
    return state


def test_a_stack_outside_a_step_is_a_loop_over_its_layers():
    stack, x = stack_of(), x_of(4, D)
    want = x
    for layer in layers_of(stack):
        want = layer(want, 0.5)
    np.testing.assert_allclose(stack(x, 0.5), want, rtol=1e-6)
    np.testing.assert_array_equal(stack.calls.get_value(), [1] * LAYERS)


def test_a_stack_returns_aux_stacked():
    stack, x = stack_of(WithAux), x_of(4, D)
    y, aux = stack(x)
    norms = []
    for layer in layers_of(stack, WithAux):
        x, layer_aux = layer(x)
        norms.append(layer_aux["norm"])
    np.testing.assert_allclose(y, x, rtol=1e-6)
    np.testing.assert_allclose(aux["norm"], norms, rtol=1e-6)


def test_units_and_stacks_keep_paths_types_and_attributes():
    linear = nnx.Linear(D, D, rngs=nnx.Rngs(0))
    kernel = linear.kernel
    unit = jshard.Unit(linear)
    assert isinstance(unit, nnx.Linear)
    assert isinstance(unit, jshard.Unit)
    assert unit.kernel is kernel
    assert unit.out_features == D
    assert set(by_path(nnx.state(unit))) == {"kernel", "bias"}
    stack = stack_of()
    assert isinstance(stack, jshard.Stack)
    assert set(by_path(nnx.state(stack, nnx.Param))) == {
        "linear.kernel",
        "linear.bias",
    }
    assert stack.linear.kernel.shape == (LAYERS, D, D)


def test_a_unit_outside_a_step_is_the_module():
    embed = nnx.Embed(5, D, rngs=nnx.Rngs(0))
    x = x_of(2, D)
    want = embed(jnp.arange(3)), embed.attend(x)
    unit = jshard.Unit(embed)
    chex.assert_trees_all_equal((unit(jnp.arange(3)), unit.attend(x)), want)
    assert jshard.gathered(unit) is unit


def test_wrapping_twice_and_gathering_a_stack_are_refused():
    with pytest.raises(jshard.UserError, match="already"):
        jshard.Unit(jshard.Unit(nnx.Linear(D, D, rngs=nnx.Rngs(0))))
    with pytest.raises(jshard.UserError, match="one layer at a time"):
        jshard.gathered(stack_of())
    with pytest.raises(jshard.UserError, match="num_layers=0"):
        jshard.Stack(Layer, 0, rngs=nnx.Rngs(0))


def test_state_that_layers_change_comes_out_of_a_step():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.stack = jshard.Stack(Layer, LAYERS, rngs=rngs)
            self.unit = jshard.Unit(Layer(rngs))

    state = check(Net, lambda m, x: m.unit(m.stack(x)), x_of(16, D))
    calls = by_path(state.model_state)
    np.testing.assert_array_equal(calls["stack.calls"], [1] * LAYERS)
    np.testing.assert_array_equal(calls["unit.calls"], 1)


@pytest.mark.parametrize("remat", ["full", "none"])
def test_methods_keywords_and_static_arguments_gather_too(remat):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.unit = jshard.Unit(Layer(rngs))
            self.embed = jshard.Unit(nnx.Embed(D, D, rngs=rngs))

    def forward(model, x):
        return model.embed.attend(model.unit.twice(x, shift=True))

    check(Net, forward, x_of(16, D), make_fsdp(remat=remat))


@pytest.mark.parametrize("remat", ["full", "dots", "none"])
def test_arguments_of_every_layer_and_closures_get_gradients(remat):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.scale = jshard.Unit(nnx.Linear(D, D, rngs=rngs))
            self.stack = jshard.Stack(WithAux, LAYERS, rngs=rngs)

    def forward(model, x):
        scale = model.scale(x)  # the same argument for every layer
        y, _ = model.stack(x, scale)
        return y + 0.01 * jnp.sum(scale, axis=1, keepdims=True)

    check(Net, forward, x_of(16, D), make_fsdp(remat=remat))


@pytest.mark.parametrize("remat", ["full", "none"])
def test_units_inside_stacks_and_stacks_inside_stacks_gather_for_themselves(remat):
    class Inner(nnx.Module):
        def __init__(self, rngs):
            self.unit = jshard.Unit(nnx.Linear(D, D, rngs=rngs))
            self.inner = jshard.Stack(Layer, 2, rngs=rngs)
            self.own = nnx.Linear(D, D, rngs=rngs)

        def __call__(self, x):
            return self.own(self.inner(jnp.tanh(self.unit(x))))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.stack = jshard.Stack(Inner, LAYERS, rngs=rngs)

    assert Net(nnx.Rngs(0)).stack.inner.linear.kernel.shape == (LAYERS, 2, D, D)
    check(Net, lambda m, x: m.stack(x), x_of(16, D), make_fsdp(remat=remat))


def test_gathered_inside_a_step_gives_full_weights_with_gradients():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.head = jshard.Unit(nnx.Linear(D, 24, rngs=rngs))

    def forward(model, x):
        head = jshard.gathered(model.head)
        assert head.kernel.shape == (D, 24)
        return jax.lax.map(head, x)

    check(Net, forward, x_of(16, D))


def test_a_layer_that_changes_shape_or_dtype_is_refused():
    class Wider(Layer):
        def __call__(self, x, scale=1.0):
            return jnp.concatenate([x, x], axis=-1)

    class Lower(Layer):
        def __call__(self, x, scale=1.0):
            return x.astype(jnp.bfloat16)

    for cls, message in ((Wider, r"into float32\[2, 16\]"), (Lower, "bfloat16")):

        class Net(nnx.Module):
            def __init__(self, rngs, cls=cls):
                self.stack = jshard.Stack(cls, LAYERS, rngs=rngs)

        with pytest.raises(jshard.UserError, match=message):
            run(Net, lambda m, x: m.stack(x), x_of(16, D))


def test_statistics_must_be_reduced_and_then_follow_the_one_device_run():
    class Net(nnx.Module):
        def __init__(self, rngs, axis_name=None):
            self.norm = jshard.Unit(nnx.BatchNorm(D, axis_name=axis_name, rngs=rngs))

    with pytest.raises(jshard.UserError, match=r"norm\.(mean|var).*jshard\.pmean"):
        run(Net, lambda m, x: m.norm(x), x_of(16, D))
    axes = ("replica", "fsdp")
    x = x_of(16, D)
    _, _, state = run(lambda r: Net(r, axes), lambda m, x: m.norm(x) ** 2, x)
    plain = Net(nnx.Rngs(0))
    plain.norm(x)
    got = by_path(state.model_state)
    np.testing.assert_allclose(got["norm.mean"], plain.norm.mean.get_value(), 1e-5)
    np.testing.assert_allclose(got["norm.var"], plain.norm.var.get_value(), 1e-5)


def test_pmean_is_the_identity_outside_a_mesh():
    np.testing.assert_array_equal(jshard.pmean(jnp.arange(3.0)), np.arange(3.0))


def dtypes_seen(policy: dict[str, Any]) -> dict[str, str]:
    """The dtypes in which a model's weights and values arrive in a step."""
    seen = {}

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm = jshard.Unit(nnx.LayerNorm(D, rngs=rngs))
            self.linear = jshard.Unit(nnx.Linear(D, D, rngs=rngs))

    def forward(model, x):
        seen["norm"] = model.norm(x).dtype.name
        seen["linear"] = model.linear(x).dtype.name
        seen["kernel"] = jshard.gathered(model.linear).kernel.get_value().dtype.name
        return model.linear(x).astype(jnp.float32)

    _, _, state = run(Net, forward, x_of(16, D), make_fsdp(**policy))
    stored = {x.dtype.name for x in jax.tree.leaves(state.params)}
    return seen | {"stored": "/".join(sorted(stored))}


def test_precision_sets_the_dtypes_of_weights_values_and_storage():
    low = jshard.Precision(compute="bfloat16", reduce="float32")
    assert dtypes_seen({"precision": low}) == {
        "norm": "bfloat16",
        "linear": "bfloat16",
        "kernel": "bfloat16",
        "stored": "float32",
    }
    assert dtypes_seen({"precision": jshard.Precision(param="bfloat16")})["stored"] == (
        "bfloat16"
    )


def test_overrides_apply_to_the_modules_they_match_first_match_first():
    low = {"precision": jshard.Precision(compute="bfloat16")}
    full = {"precision": jshard.Precision()}
    seen = dtypes_seen({**low, "overrides": {"norm*": full, "*": low}})
    assert (seen["norm"], seen["linear"]) == ("float32", "bfloat16")


def test_an_override_that_matches_nothing_is_refused_with_the_modules_there_are():
    with pytest.raises(jshard.UserError, match=r"'nrom\*' matches no module.*linear"):
        dtypes_seen({"overrides": {"nrom*": {"remat": "full"}}})
