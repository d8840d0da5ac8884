"""Policies that cannot be meant: refused in one line, with what is possible."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jshard
from decoder import Sizes, make_decoder, make_fsdp

GROUPS = "must be True, False or the size of a group of devices"
FIELDS = "remat, first_k, reshard_after_forward, prefetch, unroll, precision"
OVERRIDABLE = f"possible: {FIELDS}"
FLOATING = "is not one of float32, bfloat16, float16, float64"


def check(error: pytest.ExceptionInfo, *parts: str) -> None:
    """It is one line that says all ``parts``."""
    line = str(error.value)
    assert "\n" not in line
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("knobs", "where", "what"),
    [
        (
            {"remat": "some"},
            "remat: 'some'",
            "is not one of full, attention, dots",
        ),
        pytest.param(
            {"remat": None},
            "remat: None",
            "is not one of full, attention",
            marks=pytest.mark.core,
        ),
        (
            {"remat": ["full"]},
            "remat: ['full']",
            "is not one of full, attention",
        ),
        ({"remat": jshard.Names}, "remat: ", "jshard.Names(...)"),
        ({"first_k": -1}, "first_k: -1", "must be None or a number of layers"),
        ({"first_k": 1.5}, "first_k: 1.5", "must be None or a number of layers"),
        ({"first_k": True}, "first_k: True", "must be None or a number of layers"),
        ({"first_k": "3"}, "first_k: '3'", "must be None or a number of layers"),
        ({"reshard_after_forward": 0}, "reshard_after_forward: 0", GROUPS),
        ({"reshard_after_forward": -2}, "reshard_after_forward: -2", GROUPS),
        ({"reshard_after_forward": 2.0}, "reshard_after_forward: 2.0", GROUPS),
        ({"reshard_after_forward": "yes"}, "reshard_after_forward: 'yes'", GROUPS),
        ({"reshard_after_forward": None}, "reshard_after_forward: None", GROUPS),
        ({"reshard_root": 0}, "reshard_root: 0", GROUPS),
        (
            {"accumulate": 0},
            "accumulate: 0",
            "must be a number of micro-batches, at least 1",
        ),
        (
            {"accumulate": 2.0},
            "accumulate: 2.0",
            "must be a number of micro-batches, at least 1",
        ),
        (
            {"accumulate": True},
            "accumulate: True",
            "must be a number of micro-batches, at least 1",
        ),
        ({"defer_scatter": "no"}, "defer_scatter: 'no'", "must be True or False"),
        ({"defer_scatter": 4}, "defer_scatter: 4", "must be True or False"),
        ({"loss_scale": 1024.0}, "loss_scale: 1024.0", "must be True or False"),
        ({"min_shard_elements": -1}, "min_shard_elements: -1", "number of elements"),
        ({"precision": "bfloat16"}, "precision: 'bfloat16'", "jshard.Precision(...)"),
        ({"precision": {"compute": "bfloat16"}}, "precision: {", "jshard.Precision("),
        ({"overrides": ["blocks"]}, "overrides: ['blocks']", "must be a mapping, like"),
        ({"overrides": {"norm": "full"}}, "overrides['norm']: 'full'", "precision"),
        (
            {"overrides": {"a": {"rematt": 1}}},
            "overrides['a']: unknown rematt",
            OVERRIDABLE,
        ),
        (
            {"overrides": {"a": {"accumulate": 2}}},
            "overrides['a']: unknown accumulate",
            OVERRIDABLE,
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_policy_names_the_knob_its_value_and_what_is_possible(knobs, where, what):
    with pytest.raises(jshard.UserError) as error:
        jshard.Policy(**knobs)
    check(error, f"policy.{where}", what)


@pytest.mark.parametrize(
    "knobs",
    [
        {"remat": "some"},
        {"first_k": -1},
        {"reshard_after_forward": 0},
        {"precision": "bfloat16"},
    ],
    ids=str,
)
def test_an_override_is_checked_like_the_policy(knobs):
    with pytest.raises(jshard.UserError) as error:
        jshard.Policy(overrides={"blocks": knobs})
    ((name, value),) = knobs.items()
    check(error, f"policy.{name}: {value!r}")


@pytest.mark.parametrize("field", ["param", "gather", "compute", "reduce", "sum"])
@pytest.mark.parametrize("dtype", ["float33", "int32", 3, bool, "float4_e2m1fn"])
def test_a_precision_names_the_field_its_value_and_what_is_possible(field, dtype):
    with pytest.raises(jshard.UserError) as error:
        jshard.Precision(**{field: dtype})
    one_byte = ", int8, float8_e4m3fn, float8_e5m2" if field == "gather" else ""
    check(error, f"precision.{field}: {dtype!r} {FLOATING}{one_byte}")


@pytest.mark.parametrize("field", ["param", "compute", "reduce", "sum"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", jnp.float8_e5m2])
def test_only_gathers_are_in_one_byte(field, dtype):
    with pytest.raises(jshard.UserError) as error:
        jshard.Precision(**{field: dtype})
    check(error, f"precision.{field}: ", FLOATING)
    assert jshard.Precision(gather=dtype).gather == jnp.dtype(dtype)


@pytest.mark.parametrize("names", [(), (["attended", "hidden"],), (1,)])
@pytest.mark.parametrize("kind", [jshard.Names, jshard.Offload])
def test_names_are_strings_and_there_is_one(kind, names):
    with pytest.raises(jshard.UserError) as error:
        kind(*names)
    check(error, f"jshard.{kind.__name__}(", "like jshard.", "'attended', 'hidden')")


@pytest.mark.parametrize(
    ("knobs", "where"),
    [
        ({"reshard_after_forward": 3}, "policy.reshard_after_forward=3"),
        ({"reshard_after_forward": 16}, "policy.reshard_after_forward=16"),
        ({"reshard_root": 5}, "policy.reshard_root=5"),
        (
            {"overrides": {"a": {"reshard_after_forward": 8}}},
            "policy.overrides['a'].reshard_after_forward=8",
        ),
    ],
    ids=str,
)
def test_a_group_divides_the_fsdp_axis_and_the_error_lists_those_that_do(knobs, where):
    with pytest.raises(jshard.UserError) as error:
        jshard.FSDP(jshard.make_mesh(replica=2), jshard.Policy(**knobs))
    check(error, where, "does not divide the 4 devices", "True, False, 1, 2, 4")


def abstract_state(policy: jshard.Policy, *, plain: bool = False) -> Any:
    fsdp = make_fsdp(policy, plain=plain)
    return fsdp.abstract_state(make_decoder(Sizes(), plain=plain), optax.sgd(0.1))


@pytest.mark.parametrize("pattern", ["block", "blocks.nrom", "*.kernel", "norm.scale"])
def test_an_override_matches_a_module_and_the_error_lists_modules(pattern):
    overrides = {pattern: {"precision": jshard.Precision()}}
    with pytest.raises(jshard.UserError) as error:
        abstract_state(jshard.Policy(overrides=overrides))
    check(error, repr(pattern), "matches no module", "blocks, blocks.down, blocks.norm")


def test_layers_are_counted_where_there_is_a_stack():
    abstract_state(jshard.Policy(first_k=2))
    with pytest.raises(jshard.UserError) as error:
        abstract_state(jshard.Policy(first_k=2), plain=True)
    check(error, "policy.first_k counts the layers of a jshard.Stack", "overrides")


def test_more_layers_than_there_are_is_an_error():
    with pytest.raises(jshard.UserError) as error:
        abstract_state(jshard.Policy(first_k=99))
    check(error, "policy.first_k=99 is more layers than the model has", "largest Stack")
    with pytest.raises(jshard.UserError) as error:
        abstract_state(jshard.Policy(overrides={"blocks": {"first_k": 99}}))
    check(error, "policy.overrides['blocks'].first_k=99 is more layers")


@pytest.mark.parametrize(
    ("pattern", "fields", "said"),
    [
        ("blocks.norm", {"remat": "none"}, "remat applies to entire Stacks and Units"),
        ("head", {"first_k": 2}, "first_k applies to entire Stacks, and"),
        ("embed", {"first_k": 1}, "first_k applies to entire Stacks, and"),
    ],
)
def test_an_override_that_cannot_take_effect_is_an_error(pattern, fields, said):
    with pytest.raises(jshard.UserError) as error:
        abstract_state(jshard.Policy(overrides={pattern: fields}))
    check(error, repr(pattern), said, "matches none of blocks")


@pytest.mark.parametrize("of_step", [True, False])
def test_a_step_scales_the_loss_if_its_state_has_a_scale(of_step):
    fsdp = make_fsdp(jshard.Policy(loss_scale=of_step))
    state = abstract_state(jshard.Policy(loss_scale=not of_step))
    tokens = jax.ShapeDtypeStruct((8, 4), jnp.int32)
    step = fsdp.train_step(lambda model, batch: model, optax.sgd(0.1))
    with pytest.raises(jshard.UserError) as error:
        step.lower(state, tokens)
    has = "no scale" if of_step else "a scale"
    check(error, f"the state has {has}", f"policy.loss_scale is {of_step}")
