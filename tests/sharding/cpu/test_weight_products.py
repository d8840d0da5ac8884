"""XLA:CPU gets the gradients of weights as products that it multiplies fast."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jshard.sharding.cpu.order import in_order

WIDE, NARROW = (2, 5, 12), (2, 5, 4)  # examples, positions, features
# Equation of the weight, shapes of inputs and outputs, shape of the weight.
LAYERS = {
    "wider outputs": ("btd,df->btf", NARROW, (4, 12)),
    "wider inputs": ("btf,fd->btd", WIDE, (12, 4)),
    "matrices": ("bd,df->bf", (10, 4), (4, 12)),
    "heads": ("btd,dnk->btnk", NARROW, (4, 3, 2)),
    "out of heads": ("btnk,nkd->btd", (2, 5, 3, 2), (3, 2, 4)),
    "experts": ("btd,bdf->btf", NARROW, (2, 4, 12)),
}


def gradients(equation, precision=None):
    """Makes (x, w, step) -> gradients of both."""

    def loss(x, w):
        y = jnp.einsum(equation, x, w, precision=precision)
        return jnp.sum(jnp.sin(y))

    return lambda x, w, step: (*jax.grad(loss, (0, 1))(x, w), step)


def mapped(fn):
    """Maps over one device: within that, programs are read."""
    mesh = jax.make_mesh((1,), ("fsdp",), devices=jax.devices()[:1])
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def operands(name):
    _, x_shape, w_shape = LAYERS[name]
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape)) for shape in (x_shape, w_shape))
    return x, w, jnp.int32(7)


@pytest.mark.quick("wider inputs", "experts")
@pytest.mark.parametrize("precision", [None, ("highest", "default")])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_stay_the_same(name, precision):
    fn = gradients(LAYERS[name][0], precision)
    with jax.enable_x64(True):
        args = operands(name)
        expected = jax.jit(fn)(*args)
        got = jax.jit(in_order(mapped(fn)))(*args)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["wider outputs", "wider inputs", "matrices"])
def test_no_product_reads_both_operands_along_the_wrong_dimension(name):
    fn = mapped(gradients(LAYERS[name][0]))
    wrong = r" dot\(.*lhs_contracting_dims=\{0\}"

    def wrong_ones(fn):
        text = str(jax.jit(fn).lower(*operands(name)).compile().as_text())
        return re.findall(wrong, text)

    assert wrong_ones(fn)  # else this test, or the code, is not needed any more
    assert not wrong_ones(in_order(fn))


def test_a_product_is_multiplied_once():
    fn = in_order(mapped(gradients(LAYERS["wider outputs"][0])))
    text = str(jax.make_jaxpr(fn)(*operands("wider outputs")))
    assert text.count("dot_general") == 3


def test_a_product_that_is_read_elsewhere_is_not_computed_twice():
    def fn(x, y, step):
        product = jnp.einsum("bi,bo->oi", x, y)
        return product, product.T, step

    text = str(
        jax.make_jaxpr(in_order(mapped(fn)))(jnp.ones((3, 4)), jnp.ones((3, 5)), 1)
    )
    assert text.count("dot_general") == 1
