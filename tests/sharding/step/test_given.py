"""What is given to FSDP and is no model, no optimizer, no module type: one line."""

import re
import warnings
from typing import Any

import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx

import jshard
from filled import filled
from parity import make_mesh
from zoo_layers import Dense, Residual, make_stack

TX = optax.sgd(0.1)
existing = Dense(nnx.Rngs(0))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Residual(rngs)])
        self.stack = make_stack(Residual, rngs)


class Configured(nnx.Module):
    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        pass


@pytest.mark.parametrize("method", ["init", "abstract_state"])
@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (existing, r"a model that exists, a Dense; pass it to fsdp\.from_model\("),
        (lambda rngs: existing, r"existed before it was called; .* fsdp\.from_model\("),
        (linen.Dense(8), r"is a Flax Linen module; .*jshard\.linen\.Model \(docs/h"),
        (lambda rngs: linen.Dense(8), r"returned a Flax Linen module; .*linen\.Model"),
        ({"kernel": jnp.ones(8)}, r"is a dict; .*function of nnx\.Rngs .* lambda rngs"),
        (None, r"make_model is None; it must be a function"),
        (lambda rngs: None, r"returned None; it must return an nnx\.Module"),
        (lambda rngs: (existing,), r"returned a tuple; it must return"),
        (Configured, r"Configured cannot be: missing .*'rngs'; pass lambda rngs: "),
        (lambda: Model(nnx.Rngs(0)), r"nnx\.Rngs alone, .*too many positional"),
    ],
)
def test_what_makes_no_model_is_refused_in_one_line(method, make_model, message):
    fsdp = jshard.FSDP(make_mesh(1, 8))
    with pytest.raises(jshard.UserError, match=message) as error:
        getattr(fsdp, method)(make_model, TX)
    assert "\n" not in str(error.value)


def test_a_linen_module_is_no_model_for_shard_either():
    fsdp = jshard.FSDP(make_mesh(1, 8))
    with pytest.raises(jshard.UserError, match=r"model is a Flax Linen .*linen\.Model"):
        fsdp.from_model(linen.Dense(8), TX)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("method", ["init", "from_model"])
@pytest.mark.parametrize("optimizer", [None, 1e-3, optax.adam])
def test_what_is_no_optimizer_is_refused_in_one_line(method, optimizer):
    fsdp = jshard.FSDP(make_mesh(1, 8))
    model: Any = existing if method == "from_model" else Dense
    with pytest.raises(jshard.UserError, match=r"optimizer is .* an optax transf"):
        getattr(fsdp, method)(model, optimizer)


@pytest.mark.parametrize("method", ["init", "train_step"])
def test_an_nnx_optimizer_is_refused_in_one_line_that_names_its_transformation(method):
    fsdp, model = jshard.FSDP(make_mesh(1, 8)), Dense(nnx.Rngs(0))
    first: Any = {"init": Dense, "train_step": len}[method]
    message = (
        r"is an nnx\.Optimizer; pass optimizer\.tx, .* fsdp\.from_model\(model, op"
    )
    with pytest.raises(jshard.UserError, match=message):
        getattr(fsdp, method)(first, nnx.Optimizer(model, TX, wrt=nnx.Param))


def test_an_fsdp_is_shown_with_its_mesh_units_and_policy():
    policy = jshard.Policy(remat="dots")
    shown = repr(jshard.FSDP(make_mesh(1, 8), policy, units=(Residual, nnx.Embed)))
    assert shown == f"FSDP(replica=1 x fsdp=8; units: Residual, Embed; {policy!r})"
    assert "remat='dots'" in shown
    assert "; units: none named; " in repr(jshard.FSDP(make_mesh(1, 8)))


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ((nnx.Linear,), r"the model has no Linear; .* of types List, Residual$"),
        ((Residual, nnx.Embed), r"the model has no Embed"),
        ((Model,), r"only the model itself is a Model, .* of types List, Residual"),
        ({nnx.Embed: 1}, r"the model has no Embed"),
    ],
)
def test_units_that_match_no_submodule_are_refused(units, message):
    fsdp = jshard.FSDP(make_mesh(1, 8), units=units)
    with pytest.raises(jshard.UserError) as error:
        fsdp.abstract_state(Model, TX)
    assert re.search(message, str(error.value))
    assert "\n" not in str(error.value)
    with pytest.raises(jshard.UserError, match="units: "):
        fsdp.from_model(filled(lambda: Model(nnx.Rngs(0))), TX)


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (Residual, r"units is the type Residual; it must be a tuple"),
        (("Residual",), r"units holds a str; it must hold types"),
        ((existing,), r"units holds a Dense; it must hold types"),
        ((linen.Dense,), r"the type Dense; .* Linen module; .*linen\.Model"),
    ],
)
def test_units_that_are_no_module_types_are_refused(units, message):
    with pytest.raises(jshard.UserError, match=message) as error:
        jshard.FSDP(make_mesh(1, 8), units=units)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_one_line(seed):
    fsdp = jshard.FSDP(jshard.make_mesh())
    with pytest.raises(jshard.UserError, match=f"seed={seed}: give a whole number"):
        fsdp.init(lambda rngs: nnx.Linear(2, 2, rngs=rngs), optax.sgd(1.0), seed=seed)


def test_a_state_that_is_shaped_twice_costs_one_warning():
    """A run shapes it before it makes it, and a notebook would show both warnings."""
    fsdp = jshard.FSDP(make_mesh(1, 8), jshard.Policy(min_shard_elements=1))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            fsdp.abstract_state(lambda rngs: nnx.Linear(8, 64, rngs=rngs), TX)
    (one,) = said
    assert "100% of the parameters are in no Stack or Unit" in str(one.message)
