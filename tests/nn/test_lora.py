"""LoRA: adapters that start as nothing, train alone, and travel alone."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hlo
import jshard
from decoder import (
    REMATS,
    Decoder,
    Sizes,
    check_counts,
    loss_fn,
    lower_step,
    make_fsdp,
)
from filled import filled
from parity import make_update
from runs import check_close

TX = optax.adamw(1e-2)
SIZES = Sizes(layers=2, dtype=float)
ADAPTERS = {f"blocks.{layer}.lora_{side}" for layer in ("up", "down") for side in "ab"}


@functools.cache
def _made() -> Decoder:
    return adapted(plain(), nnx.Rngs(0))


@functools.cache
def _plain() -> Decoder:
    return filled(lambda: Decoder(SIZES, nnx.Rngs(0)))


def plain() -> Decoder:
    """The model without adapters, likewise."""
    return nnx.clone(_plain())


def made() -> Decoder:
    """A model of its own, of values that are made once."""
    return nnx.clone(_made())


def make(rngs: nnx.Rngs, **options: Any) -> Decoder:
    return adapted(Decoder(SIZES, rngs), rngs, **options)


def adapted(model: Decoder, rngs: nnx.Rngs, **options: Any) -> Decoder:
    given = {"rank": 3, "alpha": 6.0, "param_dtype": float, "rngs": rngs}
    jshard.nn.add_lora(model, **given | options)
    return model


def batch() -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, SIZES.vocab, (2, 32, SIZES.length))
    return {"tokens": tokens[0], "targets": tokens[1]}


@pytest.mark.slow  # test_adapted_layers.py has formulas
def test_with_new_adapters_the_model_is_what_it_was():
    adapted, before = made(), plain()
    rest = nnx.state(adapted, nnx.Not(nnx.LoRAParam))
    want = nnx.state(before, nnx.Param)
    assert jax.tree.structure(rest) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, rest, want)
    tokens = jnp.asarray(batch()["tokens"])
    run = nnx.jit(lambda adapted, before, tokens: (adapted(tokens), before(tokens)))
    np.testing.assert_array_equal(*run(adapted, before, tokens))
    a = adapted.blocks.up.lora_a.get_value()
    assert a.shape == (2, 16, 3)
    assert 0.2 < np.abs(a).max() <= 16**-0.5  # PEFT's range
    assert not np.array_equal(a[0], a[1])


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (("*",), ["blocks.down", "blocks.up"]),
        (("up",), ["blocks.up"]),
        (("blocks.d*", "up"), ["blocks.down", "blocks.up"]),
    ],
)
def test_targets_are_named_by_the_end_of_their_paths(targets, found):
    model = nnx.eval_shape(lambda: make(nnx.Rngs(0), targets=targets))
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))]
    assert sorted({".".join(map(str, path[:-1])) for path in paths}) == found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ("q",)}, r"'q' matches no layer .*; there are blocks\.down, "),
        ({"targets": ("embed",), "dora": True}, "linear layers, unlike 'embed'"),
        ({"rank": 0}, "rank=0 must be at least 1"),
        ({"targets": ("none",)}, r"blocks\.up, embed, head\b"),
    ],
)
def test_what_cannot_be_adapted_is_an_error_of_one_line(options, message):
    model = plain()
    given = {"rank": 3, "alpha": 6.0, "rngs": nnx.Rngs(0)} | options
    with pytest.raises(jshard.UserError, match=message) as error:
        jshard.nn.add_lora(model, **given)
    assert "\n" not in str(error.value)


def test_adapters_are_added_once():
    model = made()
    with pytest.raises(jshard.UserError, match=r"'blocks\.down' has an adapter"):
        jshard.nn.add_lora(model, rank=1, alpha=1.0, rngs=nnx.Rngs(0))


class Holder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        make = lambda: nnx.Linear(4, 4, use_bias=False, rngs=rngs)
        self.first = self.again = make()
        self.listed = nnx.List([make()])
        self.named = nnx.data({"a": (make(),)})


def test_layers_with_adapters_are_wherever_the_layers_were():
    model: Any = filled(lambda: Holder(nnx.Rngs(0)))  # whose layers' classes change
    jshard.nn.add_lora(model, rank=2, alpha=2.0, rngs=nnx.Rngs(1))
    assert model.first is model.again
    x = np.ones((1, 4), np.float32)
    for layer in (model.again, model.listed[0], model.named["a"][0]):
        before = layer(x)
        np.testing.assert_allclose(before, x @ layer.kernel[...], rtol=1e-6)
        layer.lora_b.set_value(np.ones((2, 4), np.float32))
        added = x @ np.asarray(layer.lora_a[...]) @ np.ones((2, 4))
        np.testing.assert_allclose(layer(x), before + added, rtol=1e-5)
    paths = {path[:-1] for path, _ in nnx.to_flat_state(nnx.state(model))}
    assert paths == {("again",), ("listed", 0), ("named", "a", 0)}
    with pytest.raises(jshard.UserError, match="the model is itself a layer"):
        jshard.nn.add_lora(model.first, rank=2, alpha=2.0, rngs=nnx.Rngs(1))


def merged(model: Any) -> Any:
    """The model without adapters, which are in its kernels."""
    copy = nnx.clone(model)
    for name in ("up", "down"):
        linear = getattr(copy.blocks, name)
        product = linear.lora_a.get_value() @ linear.lora_b.get_value()
        linear.kernel.set_value(linear.kernel.get_value() + 2 * product)
        linear.lora_b.set_value(jnp.zeros_like(linear.lora_b.get_value()))
    return copy


# By default test_existing_model.py trains adapters on a mesh.
@pytest.mark.slow
def test_only_adapters_train_as_they_do_in_merged_kernels(x64):
    policy = jshard.Policy(min_shard_elements=0)
    fsdp = jshard.FSDP(jshard.make_mesh(replica=2), policy)
    state = fsdp.init(make, TX, wrt=nnx.LoRAParam)
    names = {".".join(map(str, p)) for p, _ in nnx.to_flat_state(state.params)}
    assert names == ADAPTERS
    frozen = fsdp.fetch(state.frozen)

    graphdef, params, rest = nnx.split(
        make(nnx.Rngs(jax.random.key(0))), nnx.LoRAParam, ...
    )
    update, opt_state = make_update(TX), jax.jit(TX.init)(params)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        return loss_fn(merged(nnx.merge(graphdef, params, rest)), batch()).compute()

    step = fsdp.train_step(loss_fn, TX)
    for _ in range(3):
        state, metrics = step(state, fsdp.shard_batch(batch()))
        value, grads = loss(params)
        params, opt_state = update(grads, opt_state, params)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
    leaves = lambda tree: [np.asarray(x) for x in jax.tree.leaves(tree)]
    check_close(leaves(state.params), leaves(params), 1e-5)  # float32
    jax.tree.map(np.testing.assert_array_equal, fsdp.fetch(state.frozen), frozen)


@pytest.mark.slow
def test_dropout_of_adapters_is_the_same_on_every_mesh():
    def losses(mesh: Any) -> list[float]:
        fsdp = jshard.FSDP(mesh, jshard.Policy(min_shard_elements=0))
        noisy = lambda rngs: make(rngs, dropout=0.5)
        state = fsdp.init(noisy, TX, wrt=nnx.LoRAParam)
        step, found = fsdp.train_step(loss_fn, TX), []
        for _ in range(3):
            state, metrics = step(state, fsdp.shard_batch(batch()))
            found.append(float(metrics["loss"]))
        return found

    one, eight = (losses(jshard.make_mesh(devices=jax.devices()[:n])) for n in (1, 8))
    np.testing.assert_allclose(one, eight, rtol=1e-6)
    assert losses(jshard.make_mesh())[2] != losses_without_dropout()


def losses_without_dropout() -> float:
    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(min_shard_elements=0))
    state = fsdp.init(make, TX, wrt=nnx.LoRAParam)
    step = fsdp.train_step(loss_fn, TX)
    for _ in range(2):
        state, _ = step(state, fsdp.shard_batch(batch()))
    return float(step(state, fsdp.shard_batch(batch()))[1]["loss"])


@pytest.mark.slow  # test_collectives.py has frozen parameters
@pytest.mark.parametrize(
    ("remat", "replica", "accumulate"),
    [
        ("full", 1, 1),
        pytest.param("full", 2, 2, marks=pytest.mark.slow),
        pytest.param("none", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_the_base_is_gathered_and_never_scattered(remat, replica, accumulate):
    reads = REMATS[remat][1] | ADAPTERS
    policy = jshard.Policy(
        min_shard_elements=0, remat=REMATS[remat][0], accumulate=accumulate
    )
    check_counts(policy, reads, replica=replica, sizes=Sizes(rank=8), wrt=nnx.LoRAParam)


@pytest.mark.slow  # test_products.py has frozen weights beside adapters
def test_a_base_gathered_in_int8_leaves_adapters_in_float32():
    sizes = Sizes(width=64, hidden=128, vocab=192, rank=8)  # whole blocks
    precision = jshard.Precision(gather="int8")
    fsdp = make_fsdp(jshard.Policy(precision=precision, min_shard_elements=0))
    lowered, state = lower_step(fsdp, sizes, wrt=nnx.LoRAParam)
    found = hlo.collectives(hlo.compile(lowered).as_text())
    of_kind = lambda kind: [c for c in found if c.kind == kind]
    in_int8 = {
        c.results[0].size for c in of_kind("all-gather") if c.results[0].dtype == "s8"
    }
    assert 64 * 128 in in_int8
    sizes_of = lambda tree: {
        int(np.prod(np.shape(x)[1:])) for x in jax.tree.leaves(tree)
    }
    adapters = sizes_of(state.params)
    assert adapters == {64 * 8, 128 * 8}
    gathered = {
        c.results[0].size for c in of_kind("all-gather") if c.results[0].dtype == "f32"
    }
    assert adapters <= gathered
    assert not adapters & in_int8
    assert {c.operands[0].size for c in of_kind("reduce-scatter")} == adapters


def test_layers_that_are_left_out_get_no_gradients_and_others_have_their_scale():
    given: dict[str, Any] = {"rank": 3, "alpha": 6.0, "param_dtype": float}
    given |= {"ranks": {"blocks.up": 2}, "alphas": {"blocks.up": 5.0}}
    model: Any = plain()
    jshard.nn.add_lora(model, **given, layers={"blocks.down": (1,)}, rngs=nnx.Rngs(0))
    up, down = model.blocks.up, model.blocks.down
    assert up.lora_a.get_value().shape == (2, 16, 2)
    rng = np.random.default_rng(0)
    for layer in (up, down):
        value = 0.1 * rng.normal(size=layer.lora_b.get_value().shape)
        if layer is down:
            value[0] = 0  # as it starts, and stays
        layer.lora_b.set_value(jax.device_put(value))
    graphdef, params, rest = nnx.split(model, nnx.LoRAParam, ...)

    def loss(params):
        return loss_fn(nnx.merge(graphdef, params, rest), batch()).compute()

    def loss_of_kernels(params):
        own: Any = plain()
        for name, scale in (("up", 5 / 2), ("down", 6 / 3)):
            kernel = getattr(own.blocks, name).kernel
            adapter = params["blocks"][name]
            a, b = (adapter[f"lora_{x}"].get_value() for x in "ab")
            added = scale * jnp.einsum("lir,lro->lio", a, b)
            kernel.set_value(kernel.get_value() + added)
        return loss_fn(own, batch()).compute()

    losses = (loss, loss_of_kernels)
    both = jax.jit(lambda params: [jax.value_and_grad(f)(params) for f in losses])
    (got, grads), (want, wanted) = both(params)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    leaves = lambda tree: [np.asarray(x) for x in jax.tree.leaves(tree)]
    check_close(leaves(grads), leaves(wanted), 1e-5)
    for side in "ab":
        left_out, trained = grads["blocks"]["down"][f"lora_{side}"].get_value()
        assert not np.any(left_out)
        assert np.any(trained)
