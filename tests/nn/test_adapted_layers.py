"""What each kind of layer computes with an adapter: its formula, written out."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.nn import adapted

pytestmark = pytest.mark.usefixtures("x64")

RANK, ALPHA = 3, 5.0
EXPERTS = np.array([1, 0, 1, 1])  # of each row


class Experts(nnx.Module):
    """Two matrices, of which each row of the input has one."""

    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jnp.zeros((2, 6, 5)))

    def product(self, x: jax.Array, kernel: jax.Array, expert: Any) -> jax.Array:
        return jnp.einsum("bi,bio->bo", x, kernel[expert])

    def __call__(self, x: jax.Array, expert: Any) -> jax.Array:
        return self.product(x, self.kernel[...], expert)


class Doubled(nnx.Module):
    """In place of a dropout whose masks are random."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return 2 * x


linear = functools.partial(nnx.Linear, 6, 5, param_dtype=float)
plain = functools.partial(linear, use_bias=False)
table = functools.partial(nnx.Embed, 7, 5, param_dtype=float)
DORA, STABLE = {"dora": True}, {"rank_stabilized": True}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear": (plain, {}),
    "bias": (linear, {}),
    "stabilized": (plain, STABLE),
    "dropout": (linear, {"dropout": 0.1}),
    "dora": (plain, DORA),
    "stabilized dora with a bias": (linear, DORA | STABLE),
    "dora with dropout": (linear, DORA | {"dropout": 0.1}),
    "table": (table, {}),
    "stabilized table": (table, STABLE),
    "experts": (Experts, {}),
}


def _abstract() -> nnx.Module:
    model: Any = nnx.Module()
    for name, (layer, options) in KINDS.items():
        setattr(model, name, layer(rngs=nnx.Rngs(0)))
        jshard.nn.add_lora(
            model,
            **{"rank": RANK, "alpha": ALPHA, "param_dtype": float} | options,
            targets=(name,),
            rngs=nnx.Rngs(0),
        )
        if "dropout" in options:
            getattr(model, name).lora_dropout = Doubled()
    return model


@functools.cache
def make() -> Any:
    """A model that has all of these layers, with adapters of any values."""
    model: Any = nnx.eval_shape(_abstract)
    rng = np.random.default_rng(0)
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        variable.set_value(jax.device_put(rng.normal(size=variable.get_value().shape)))
    for variable in (model.dora.kernel, model.dora.lora_b):
        values = np.array(variable[...])
        values[:, 2] = 0  # as padding
        variable.set_value(jax.device_put(values))
    return model


def inputs() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(1)
    return jax.device_put(rng.normal(size=(4, 6))), jax.device_put(
        np.asarray([6, 0, 3, 3])
    )


def defined(layer: Any, options: dict[str, Any], x: jax.Array, ids: Any) -> jax.Array:
    """The output of one of the layers, from its parameters."""
    a, b = layer.lora_a[...], layer.lora_b[...]
    scale = ALPHA / (np.sqrt(RANK) if "rank_stabilized" in options else RANK)
    product = scale * jnp.einsum("...ir,...ro->...io", a, b)
    if isinstance(layer, nnx.Embed):
        return (layer.embedding[...] + product)[ids]
    weight = layer.kernel[...] + product
    if isinstance(layer, Experts):
        return jnp.stack([x[i] @ weight[EXPERTS[i]] for i in range(4)])
    noisy = 2 * x if "dropout" in options else x
    y = x @ layer.kernel[...] + noisy @ product
    if "dora" in options:
        norms = jax.lax.stop_gradient(jnp.sqrt(jnp.sum(weight**2, axis=0)))
        empty = norms == 0
        ratio = jnp.where(empty, 1, layer.lora_m[...] / jnp.where(empty, 1, norms))
        y = x @ layer.kernel[...] + noisy @ (ratio * weight - layer.kernel[...])
    return y if layer.bias is None else y + layer.bias[...]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Of each kind: outputs, gradients by adapters and input, as computed and defined.

    All in one program, which takes as long to compile as one of them.
    """
    with jax.enable_x64(True):
        graphdef, params, rest = nnx.split(make(), nnx.LoRAParam, ...)

        def run(own: bool, params: Any, x: jax.Array) -> tuple[Any, Any]:
            model, ids, outputs = nnx.merge(graphdef, params, rest), inputs()[1], {}
            for name, (_, options) in KINDS.items():
                layer = getattr(model, name)
                args: Any = (ids,) if isinstance(layer, nnx.Embed) else (x,)
                args += (EXPERTS,) if isinstance(layer, Experts) else ()
                outputs[name] = layer(*args) if own else defined(layer, options, x, ids)
            return sum(jnp.sum(jnp.sin(y)) for y in outputs.values()), outputs

        grads = jax.grad(run, argnums=(1, 2), has_aux=True)
        both = jax.jit(lambda *args: (grads(True, *args), grads(False, *args)))
        (got, got_outputs), (want, want_outputs) = both(params, inputs()[0])
        return {
            name: (
                (got_outputs[name], got[0][name]),
                (want_outputs[name], want[0][name]),
            )
            for name in KINDS
        } | {"inputs": (got[1], want[1])}


@pytest.mark.parametrize("name", [*KINDS, "inputs"])
def test_a_layer_with_an_adapter_is_its_formula(name, results):
    got, want = (jax.tree.leaves(x) for x in results[name])
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-11)


def test_the_kernel_of_a_layer_is_what_it_multiplies_with():
    model: Any = make()
    names = ("linear", "stabilized", "dora")

    @nnx.jit
    def both(model: Any, x: jax.Array) -> Any:
        layers = [getattr(model, name) for name in names]
        return [(x @ jshard.nn.kernel_of(layer), layer(x)) for layer in layers]

    for got, want in both(model, inputs()[0]):
        np.testing.assert_allclose(got, want, rtol=1e-9)
    alone = plain(rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(jshard.nn.kernel_of(alone), alone.kernel[...])


def test_with_adapters_off_layers_are_the_base_and_then_themselves_again():
    model: Any = make()
    x, ids = inputs()
    for layer, given in ((model.dora, x), (model.table, ids)):
        before, base = layer(given), type(layer).__bases__[0].__call__
        with jshard.nn.adapters_off(model):
            np.testing.assert_array_equal(layer(given), base(layer, given))
            if layer is model.dora:
                kernel = jshard.nn.kernel_of(layer)
                np.testing.assert_array_equal(kernel, layer.kernel[...])
        with pytest.raises(KeyError), jshard.nn.adapters_off(model):
            raise KeyError
        np.testing.assert_array_equal(layer(given), before)
        assert not np.array_equal(before, base(layer, given))
    message, base = "the model has no adapters", plain(rngs=nnx.Rngs(0))
    with pytest.raises(jshard.UserError, match=message), jshard.nn.adapters_off(base):
        pass


def test_norms_of_columns_are_in_float32_or_wider():
    kernel = jnp.full((2, 300, 2), 16, jnp.float16)  # whose squares' sum is 76800
    norms = adapted.column_norms(kernel)
    assert norms.dtype == jnp.float32
    np.testing.assert_allclose(norms, np.full((2, 2), 16 * np.sqrt(300)), rtol=1e-5)
    assert adapted.column_norms(jnp.ones((2, 2), float)).dtype == float
