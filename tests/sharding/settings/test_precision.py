"""Precision and overrides: which dtypes travel, and which a layer sees."""

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
from runs import loss_fn
from zoo import UnitInStack
from zoo_layers import EXAMPLES, WIDTH, make_stack


class Recording(nnx.Module):
    """Notes the dtypes that its parts see."""

    seen: dict[str, Any] = {}  # noqa: RUF012

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.norm: Any = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            normed = self.norm(x)
            y = self.dense(normed)
            kernel, scale = self.dense.kernel[...], self.norm.scale[...]
            assert kernel.shape == (WIDTH, WIDTH)
            Recording.seen |= {"norm": normed.dtype, "dense": y.dtype}
            Recording.seen |= {"kernel": kernel.dtype, "scale": scale.dtype}
            return x + y.astype(x.dtype)

    def __init__(self, rngs):
        self.blocks = make_stack(self.Layer, rngs)

    def __call__(self, x):
        return self.blocks(x)


def trace(policy: jshard.Policy, *, train: bool = True) -> tuple[dict[str, Any], str]:
    """(dtypes seen, the jaxpr of a step); an evaluation's is sooner traced."""
    Recording.seen.clear()
    jaxpr = jaxpr_of(Recording, policy, train)
    return {name: str(dtype) for name, dtype in Recording.seen.items()}, jaxpr


def jaxpr_of(make_model: Any, policy: jshard.Policy, train: bool) -> str:
    fsdp, tx = jshard.FSDP(jshard.make_mesh(), policy), optax.sgd(0.1)
    state = fsdp.abstract_state(make_model, tx)
    x = jax.ShapeDtypeStruct((EXAMPLES, WIDTH), jnp.float32)
    step = fsdp.train_step(loss_fn, tx) if train else fsdp.eval_step(loss_fn)
    return str(step.trace(state, x).jaxpr)


BF16 = jshard.Precision(compute="bfloat16", reduce="float32")
FULL = {"precision": jshard.Precision()}


def results(jaxpr: str, primitive: str) -> set[str]:
    """Dtypes of what ``primitive`` returns."""
    lines = [line for line in jaxpr.splitlines() if f"= {primitive}[" in line]
    assert lines
    return {line.split("[")[0].split(":")[-1] for line in lines}


def test_without_a_precision_everything_is_as_declared():
    seen, jaxpr = trace(jshard.Policy(min_shard_elements=0))
    assert set(seen.values()) == {"float32"}
    assert results(jaxpr, "all_gather") == {"f32"}
    assert results(jaxpr, "reduce_scatter") == {"f32"}


@pytest.mark.core
def test_a_compute_dtype_is_that_of_the_wire_and_of_the_layer():
    seen, jaxpr = trace(jshard.Policy(min_shard_elements=0, precision=BF16))
    assert set(seen.values()) == {"bfloat16"}
    assert results(jaxpr, "all_gather") == {"bf16"}
    assert results(jaxpr, "reduce_scatter") == {"f32"}


def test_gradients_are_reduced_in_the_compute_dtype_by_default():
    dtypes = jshard.Precision(compute="bfloat16")
    _, jaxpr = trace(jshard.Policy(min_shard_elements=0, precision=dtypes))
    assert results(jaxpr, "reduce_scatter") == {"bf16"}


@pytest.mark.core
def test_a_wire_dtype_of_its_own_leaves_the_computation_alone():
    dtypes = jshard.Precision(gather="bfloat16", compute="float32")
    policy = jshard.Policy(min_shard_elements=0, precision=dtypes)
    seen, jaxpr = trace(policy, train=False)
    assert set(seen.values()) == {"float32"}
    assert results(jaxpr, "all_gather") == {"bf16"}


@pytest.mark.parametrize("gather", ["bfloat16", "int8"])
def test_without_a_compute_dtype_a_layer_sees_the_one_it_declares(gather):
    dtypes = jshard.Precision(gather=gather)
    policy = jshard.Policy(min_shard_elements=0, precision=dtypes)
    seen, jaxpr = trace(policy, train=False)
    assert set(seen.values()) == {"float32"}
    assert results(jaxpr, "all_gather") >= {{"bfloat16": "bf16", "int8": "i8"}[gather]}


class Scale(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x):
        return jnp.sum(x * self.scale[...].astype(jnp.float32), axis=-1)


@pytest.mark.quick("float32-2", "None-8")  # two replicas of four shards have both sums
@pytest.mark.parametrize("replica", [8, 2, 1])
@pytest.mark.parametrize("dtype", ["float32", None])
def test_gradients_are_summed_in_the_dtype_asked_for_over_replicas_too(replica, dtype):
    # A device's gradient of 2 is below the spacing of bfloat16 at 1024.
    x = np.full((8, WIDTH), 2, np.float32)
    x[0] = 1024
    precision = jshard.Precision(reduce="bfloat16", sum=dtype)
    policy = jshard.Policy(min_shard_elements=0, precision=precision)
    fsdp = jshard.FSDP(jshard.make_mesh(replica=replica), policy, units=(Scale,))
    tx = optax.sgd(1.0)
    state = fsdp.from_model(nnx.Sequential(Scale(nnx.Rngs(0))), tx)
    loss = lambda model, x: jshard.Mean(jnp.sum(model(x)), 1 / 8)
    state, _ = fsdp.train_step(loss, tx)(state, fsdp.shard_batch(x))
    (scale,) = jax.tree.leaves(fsdp.fetch(state.params))
    exact = 1 - (1024 + 7 * 2)
    assert np.all(scale == exact) == (dtype == "float32")


class Waves(nnx.Module):
    """A complex parameter beside a real one."""

    def __init__(self, rngs):
        self.waves = nnx.Param(jnp.full(WIDTH, 0.5 + 0.25j))
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return jnp.abs(self.waves[...] * self.dense(x)) ** 2


@pytest.mark.quick("int8")
@pytest.mark.parametrize("gather", ["bfloat16", "int8"])
def test_complex_parameters_keep_their_imaginary_part(gather):
    precision = jshard.Precision(gather=gather, compute="bfloat16", sum="float32")
    policy = jshard.Policy(min_shard_elements=0, precision=precision)
    fsdp = jshard.FSDP(jshard.make_mesh(replica=2), policy, units=(Waves,))
    tx = optax.sgd(0.1)
    model: Any = filled(lambda: nnx.Sequential(Waves(nnx.Rngs(0))))
    model.layers[0].waves.set_value(jnp.full(WIDTH, 0.5 + 0.25j))
    state = fsdp.from_model(model, tx)
    x = np.linspace(-1, 1, 16 * WIDTH, dtype=np.float32).reshape(16, WIDTH)
    loss = lambda model, x: jshard.Mean(jnp.sum(model(x)), len(x))
    state, _ = fsdp.train_step(loss, tx)(state, fsdp.shard_batch(x))
    got = fsdp.fetch(state.params)["layers"][0]["waves"].get_value()
    graphdef, params = nnx.split(model)
    plain = lambda params: loss(nnx.merge(graphdef, params), x).compute()
    grad = jax.jit(jax.grad(plain))(params)["layers"][0]["waves"].get_value()
    np.testing.assert_allclose(got, 0.5 + 0.25j - 0.1 * grad, rtol=0.02)


def test_parameters_and_optimizer_state_have_the_parameter_dtype():
    fsdp = jshard.FSDP(
        jshard.make_mesh(), jshard.Policy(precision=jshard.Precision(param="bfloat16"))
    )
    state = fsdp.abstract_state(Recording, optax.sgd(0.1, momentum=0.9))
    leaves = jax.tree.leaves((state.params, state.opt_state))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("bfloat16")}


class Routed(nnx.Module):
    """Routers of dtypes of their own beside layers that leave theirs open."""

    seen: dict[str, Any] = {}  # noqa: RUF012

    class Layer(nnx.Module):
        def __init__(self, dtypes, rngs):
            self.routers: Any = nnx.List(
                [nnx.Linear(WIDTH, 2, dtype=dtype, rngs=rngs) for dtype in dtypes]
            )
            self.dense: Any = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            y = self.dense(x)
            weights = {"dense kernel": self.dense.kernel[...], "dense": y}
            for i, router in enumerate(self.routers):
                chosen = router(x)
                weights[f"router {i}"] = chosen
                weights[f"router {i} kernel"] = router.kernel[...]
                y = y * jax.nn.sigmoid(chosen[..., :1])
            Routed.seen |= {name: str(w.dtype) for name, w in weights.items()}
            return x + y.astype(x.dtype)

    def __init__(self, dtypes, rngs):
        self.embed = jshard.Unit(nnx.Embed(8, WIDTH, rngs=rngs))
        self.blocks = make_stack(lambda rngs: self.Layer(dtypes, rngs), rngs)

    def __call__(self, x):
        embedded = self.embed(jnp.arange(8))
        Routed.seen["embed"] = str(embedded.dtype)
        return self.blocks(x + embedded[0].astype(x.dtype))


WIDER = (jnp.float32, "float32")
OPEN = (None, jnp.bfloat16, jnp.float16)  # or none that is wider


@functools.cache
def trace_dtypes(
    precision: jshard.Precision, train: bool
) -> tuple[dict[str, Any], str]:
    """(dtypes seen, the jaxpr of a step) with a router of each dtype."""
    return trace_routed(*WIDER, *OPEN, precision=precision, train=train)


def trace_routed(*dtypes: Any, train: bool, **knobs: Any) -> tuple[dict[str, Any], str]:
    """(dtypes seen, the jaxpr of a step)."""
    Routed.seen.clear()
    policy = jshard.Policy(min_shard_elements=0, **knobs)
    jaxpr = jaxpr_of(lambda rngs: Routed(dtypes, rngs), policy, train)
    return dict(Routed.seen), jaxpr


ROUTER, DENSE = ("router 0", "router 0 kernel"), ("dense", "dense kernel", "embed")


def test_a_wider_dtype_of_its_own_is_kept():
    for gather in (None, "float32"):
        precision = jshard.Precision(compute="bfloat16", gather=gather)
        seen, jaxpr = trace_dtypes(precision, train=gather is None)
        wider = {*ROUTER, "router 1", "router 1 kernel"}
        assert {seen[name] for name in wider} == {"float32"}
        assert {seen[name] for name in seen.keys() - wider} == {"bfloat16"}
        assert {*DENSE, "router 4"} < seen.keys()
        if gather is None:  # its weights and gradients travel in it, too
            for primitive in ("all_gather", "reduce_scatter"):
                assert results(jaxpr, primitive) == {"f32", "bf16"}


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_an_open_dtype_and_one_that_is_not_wider_follow_the_policy(compute):
    precision = jshard.Precision(compute=compute)
    seen, _ = trace_dtypes(precision, train=compute == "bfloat16")  # traced above
    routers = range(len(WIDER), len(WIDER + OPEN))
    names = {f"router {i}{part}" for i in routers for part in ("", " kernel")}
    assert {seen[name] for name in names | {*DENSE}} == {compute}


def test_an_override_that_names_a_module_changes_its_own_dtype():
    bf16 = jshard.Precision(compute="bfloat16")
    for pattern in ("blocks.routers.0", "*"):
        overrides = {pattern: {"precision": bf16}}
        seen, _ = trace_routed(
            jnp.float32, precision=bf16, overrides=overrides, train=False
        )
        assert set(seen.values()) == {"bfloat16"}
    # Of another field it is none of the dtype's.
    overrides = {"blocks*": {"remat": "full"}}
    seen, _ = trace_routed(
        jnp.float32, precision=bf16, overrides=overrides, train=False
    )
    assert {seen[name] for name in ROUTER} == {"float32"}


def test_a_policy_that_changes_few_parameters_is_told():
    class Wide(nnx.Module):
        def __init__(self, rngs):
            linear = nnx.Linear(WIDTH, WIDTH, dtype=jnp.float32, rngs=rngs)
            self.dense = jshard.Unit(linear)

        def __call__(self, x):
            return self.dense(x)

    policy = jshard.Policy(precision=jshard.Precision(compute="bfloat16"))
    with pytest.warns(UserWarning, match="100% of the parameters.*dense.kernel, dense"):
        jshard.FSDP(jshard.make_mesh(), policy).abstract_state(Wide, optax.sgd(0.1))


@pytest.mark.quick("blocks.norm", "*norm*")
@pytest.mark.parametrize("pattern", ["blocks.norm", "blocks.n*", "*norm*", "*.norm"])
def test_an_override_keeps_a_norm_in_full_precision(pattern):
    policy = jshard.Policy(
        min_shard_elements=0, precision=BF16, overrides={pattern: FULL}
    )
    seen, _ = trace(policy, train=False)
    assert seen == {
        "norm": "float32",
        "scale": "float32",
        "dense": "bfloat16",
        "kernel": "bfloat16",
    }


def test_the_first_override_that_matches_wins():
    overrides = {"blocks.norm": FULL, "blocks*": {"precision": BF16}}
    policy = functools.partial(jshard.Policy, min_shard_elements=0)
    seen, _ = trace(policy(overrides=overrides), train=False)
    assert (seen["norm"], seen["dense"]) == ("float32", "bfloat16")
    overrides = dict(reversed(overrides.items()))
    seen, _ = trace(policy(overrides=overrides), train=False)
    assert (seen["norm"], seen["dense"]) == ("bfloat16", "bfloat16")


def test_an_override_of_remat_and_reshard_reaches_its_unit_alone():
    def gathers(*patterns: str) -> int:
        overrides = {pattern: {"reshard_after_forward": False} for pattern in patterns}
        policy = jshard.Policy(min_shard_elements=0, overrides=overrides)
        fsdp = jshard.FSDP(jshard.make_mesh(), policy)
        tx = optax.sgd(0.1)
        args = (
            fsdp.abstract_state(UnitInStack, tx),
            jax.ShapeDtypeStruct((EXAMPLES, WIDTH), jnp.float32),
        )
        text = str(fsdp.train_step(loss_fn, tx).trace(*args).jaxpr)
        return text.count("= all_gather[")

    # The Unit has two layers of kernel and bias; the backward reads no bias.
    all_of_them, without_the_units = gathers(), gathers("unit")
    assert without_the_units < all_of_them
    assert all_of_them - gathers("*") == 2 * (all_of_them - without_the_units)


def test_an_override_that_matches_nothing_is_an_error():
    policy = jshard.Policy(overrides={"blocks.nrom": FULL})
    with pytest.raises(jshard.UserError, match=r"'blocks.nrom' matches no module"):
        jshard.FSDP(jshard.make_mesh(), policy).init(Recording, optax.sgd(0.1))


@pytest.mark.parametrize("field", ["param", "compute", "reduce", "sum"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float99", 7])
def test_only_gathers_take_types_of_one_byte(field, dtype):
    message = (
        rf"precision.{field}: .*is not one of float32, bfloat16, float16, float64$"
    )
    with pytest.raises(jshard.UserError, match=message):
        jshard.Precision(**{field: dtype})


@pytest.mark.parametrize("dtype", ["int16", "float8_e4m3b11fnuz", "float99"])
def test_gathers_take_no_other_type(dtype):
    with pytest.raises(jshard.UserError, match=rf"{dtype}.*int8, float8_e4m3fn"):
        jshard.Precision(gather=dtype)
    assert jshard.Precision(gather=jnp.int8).gather == jnp.int8
