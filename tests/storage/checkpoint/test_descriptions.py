"""What a description may say of arrays: at each bound, and one beyond it."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jshard.storage.checkpoint import metadata
from jshard.storage.checkpoint.metadata import (
    ALPHA,
    STABILIZED,
    array_name,
    checked,
    itemsize,
)
from jshard.system.errors import UserError
from jshard.system.files import untrusted
from jshard.system.files.untrusted import parse_json, read_json, read_text


def described(name: str = "opt.w", **of_array: Any) -> dict[str, Any]:
    """A description of one array."""
    array = {"shape": [2, 3], "dtype": "float32"} | of_array
    return {
        "step": 3, "processes": 1, "created": "now", "stacks": ["", "blocks"],
        "versions": {}, "mesh": {}, "metrics": {"loss": 1}, "config": {},
        "arrays": {name: array},
    }  # fmt: skip


OF_MODEL = {"layer_dims": 0, "random": False}
FINE: dict[str, tuple[str, dict[str, Any]]] = {
    "a scalar": ("opt.w", {"shape": []}),
    "as many dimensions as NumPy has": ("opt.w", {"shape": [1] * 32}),
    "as many bytes as there can be": (
        "opt.w",
        {"shape": [7 * 7, 73 * 127 * 337 * 92737 * 649657], "dtype": "int8"},
    ),
    "padding": ("opt.w", {"stored_shape": [2, 8]}),
    "no padding": ("opt.w", {"stored_shape": [2, 3]}),
    "as many layers as there can be": ("opt.w", {"shape": [2**20, 1], "layer_dims": 1}),
    "layers alone": ("opt.w", {"layer_dims": 2}),
    "a parameter": ("params.w", OF_MODEL),
    "a random key": ("model_state.k", OF_MODEL | {"random": True, "dtype": "key<fry>"}),
    "an adapter": ("params.a", OF_MODEL | {ALPHA: 2.0, STABILIZED: True}),
    "an adapter of another kind": (
        "params.a",
        OF_MODEL | {ALPHA: None, STABILIZED: None},
    ),
}
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "33 dimensions": ("opt.w", {"shape": [1] * 33}, "has shape [1, 1"),
    "no shape": ("opt.w", {"shape": None}, "has shape None"),
    "a size of 0": ("opt.w", {"shape": [0]}, "has shape [0]"),
    "a size of true": ("opt.w", {"shape": [True]}, "has shape [True]"),
    "a byte too many": (
        "opt.w",
        {"shape": [2**63], "dtype": "int8"},
        "too many bytes",
    ),
    "more bytes than that by the dtype": (
        "opt.w",
        {"shape": [2**60], "dtype": "float64"},
        "too many bytes",
    ),
    "more bytes than that by padding": (
        "opt.w",
        {"shape": [2], "stored_shape": [2**62]},
        "too many bytes",
    ),
    "less than it has": ("opt.w", {"stored_shape": [2, 2]}, "stored_shape [2, 2]"),
    "other dimensions": (
        "opt.w",
        {"stored_shape": [2, 3, 1]},
        "stored_shape [2, 3, 1]",
    ),
    "padding by halves": ("opt.w", {"stored_shape": [2, 3.5]}, "stored_shape [2, 3.5]"),
    "padding of another kind": ("opt.w", {"stored_shape": "ab"}, "stored_shape 'ab'"),
    "no dtype": ("opt.w", {"dtype": None}, "dtype None"),
    "an empty dtype": ("opt.w", {"dtype": ""}, "dtype ''"),
    "a layer too many": (
        "opt.w",
        {"shape": [2**20 + 1, 1], "layer_dims": 1},
        "its arrays have 1,048,577 layers",
    ),
    "more layers than dimensions": ("opt.w", {"layer_dims": 3}, "layer_dims 3"),
    "layers below none": ("opt.w", {"layer_dims": -1}, "layer_dims -1"),
    "layers by halves": ("opt.w", {"layer_dims": 1.0}, "layer_dims 1.0"),
    "a parameter that lacks layers": (
        "frozen.w",
        {"random": False},
        "no layer_dims or random",
    ),
    "a parameter that lacks randomness": (
        "params.w",
        {"layer_dims": 0},
        "no layer_dims or random",
    ),
    "randomness by numbers": ("opt.w", {"random": 1}, "random 1"),
    "a scale in words": (
        "params.a",
        OF_MODEL | {ALPHA: "2"},
        "params.a.lora_alpha is '2', no num",
    ),
    "stabilized by words": (
        "params.a",
        OF_MODEL | {STABILIZED: "yes"},
        "lora_rank_stabilized 'yes'",
    ),
}


@pytest.mark.parametrize("case", FINE)
def test_what_can_be_is_read(case):
    name, array = FINE[case]
    about = described(name, **array)
    read = checked(about)
    assert read == about
    assert type(read["metrics"]["loss"]) is float


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_said(case):
    name, array, said = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(said)):
        checked(described(name, **array))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step": True}, "step is not a whole number"),
        ({"processes": 1.0}, "processes is not a whole number"),
        ({"created": 3}, "created is not a text"),
        ({"mesh": []}, "mesh is not a JSON object"),
        ({"arrays": None}, "arrays is not a JSON object"),
        ({"arrays": {"a": 3}}, "array 'a' is not a JSON object"),
        ({"stacks": "blocks"}, "stacks is not a list of names"),
        ({"stacks": ["a", 3]}, "stacks is not a list of names"),
        ({"metrics": {"loss": None}}, "loss is None, no number"),
        ({"metrics": {"loss": True}}, "loss is True, no number"),
        ({"frozen_from": {"path": "", "bit_sums": {}}}, "frozen_from has no path"),
        ({"frozen_from": {"path": "a\ud800"}}, "frozen_from has no path"),
        ({"frozen_from": {"path": "/a", "bit_sums": []}}, "has no sums of bits"),
        (
            {"frozen_from": {"path": "/a", "bit_sums": {"x": "a b c"}}},
            "no sums of bits",
        ),
        ({"frozen_from": {"path": "/a", "bit_sums": {"x": 3}}}, "has no sums of bits"),
        ({"frozen_from": {"path": "http://a/b", "bit_sums": {}}}, "is a URL"),
    ],
)
def test_what_is_beside_the_arrays_has_its_form(change, said):
    with pytest.raises(ValueError, match=said):
        checked(described() | change)


@pytest.mark.parametrize("path", ["/base", "s3://bucket/run", "hf://owner/name@main"])
def test_frozen_parameters_may_be_wherever_a_run_reads_them(path):
    source = {"path": path, "bit_sums": {"frozen.w": "float32 123"}}
    assert checked(described() | {"frozen_from": source})["frozen_from"] == source
    assert checked(described() | {"metrics": {"a": 1.5}})["metrics"] == {"a": 1.5}


def test_all_layers_of_all_arrays_are_counted():
    about = described(shape=[2**10, 2**9, 3], layer_dims=2)
    about["arrays"]["opt.v"] = {**about["arrays"]["opt.w"]}
    about["arrays"]["opt.u"] = {"shape": [9], "dtype": "bool"}
    assert checked(about) == about
    about["arrays"]["opt.u"]["layer_dims"] = 1
    with pytest.raises(ValueError, match="1,048,585 layers"):
        checked(about)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("bool", 1), ("uint16", 2), ("bfloat16", 2), ("float8_e4m3fn", 1), ("key<fry>", 8),
     ("float64", 8), ("complex128", 16)],
)  # fmt: skip
def test_an_element_has_bytes(dtype, size):
    assert itemsize(dtype) == size


@pytest.mark.parametrize("dtype", ["int99", "float31", "f4", "str", "float8_none"])
def test_what_is_no_dtype_has_none(dtype):
    with pytest.raises(ValueError, match="no dtype of an array"):
        itemsize(dtype)


def test_long_values_are_shortened():
    assert metadata._shortened("x" * 78) == f"'{'x' * 78}'"
    assert metadata._shortened("x" * 79) == f"'{'x' * 79}..."


def test_characters_are_whole():
    assert metadata._is_unicode("a\ud7ff\ue000")
    assert not metadata._is_unicode("\ud800")
    assert not metadata._is_unicode("\udfff")


def test_names_of_arrays_leave_out_the_node_of_a_variable():
    def name(*keys: str) -> str:
        return array_name(tuple(map(jax.tree_util.DictKey, keys)))

    assert name("params", "w", "value") == "params.w"
    assert name("params", "value", "w") == "params.value.w"
    assert name("value") == "value"
    assert name("opt", "0") == "opt.0"
    field = jax.tree_util.GetAttrKey("value")
    assert array_name((jax.tree_util.DictKey("w"), field)) == "w"
    of_line_search = jax.tree_util.GetAttrKey("opt_state"), field
    assert array_name(of_line_search) == "opt_state.value"


def test_arrays_of_one_name_are_refused_and_empty_ones_left_out():
    state: Any = {"a": {"b": jnp.ones(2)}, "c": jnp.ones((0, 3)), "d": jnp.ones(())}
    assert [*metadata.arrays_by_name(state)] == ["a.b", "d"]
    twice: Any = {"a.b": jnp.ones(2), "a": {"b": jnp.ones(2)}}
    with pytest.raises(ValueError, match=r"two arrays of the state are named 'a\.b'"):
        metadata.arrays_by_name(twice)


def test_a_description_is_written_for_people_too(tmp_path):
    metadata.write(tmp_path, described() | {"config": {"path": Path("/a")}})
    text = (tmp_path / metadata.FILE).read_text()
    assert text.startswith('{\n "step": 3,\n')
    assert metadata.read(tmp_path)["config"] == {"path": "/a"}
    (tmp_path / metadata.FILE).write_text("{")
    with pytest.raises(UserError, match=r"is damaged: description\.json is not JSON"):
        metadata.read(tmp_path)


# JSON within limits.


def nested(levels: int) -> str:
    return "[" * (levels - 1) + "3" + "]" * (levels - 1)


def test_json_may_have_a_hundred_levels():
    parse_json(nested(100))
    assert parse_json('{"a": [1, {"b": "text"}]}') == {"a": [1, {"b": "text"}]}
    for levels in (101, 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(nested(levels))


def test_a_file_may_be_as_large_as_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(untrusted, "MOST_JSON", 8)
    file = tmp_path / "a.json"
    file.write_text(json.dumps("123456"))
    assert read_json(file) == "123456"
    assert read_text(file) == '"123456"'
    file.write_text(json.dumps("1234567"))
    with pytest.raises(ValueError, match="9 bytes, more than 8"):
        read_json(file)
    with pytest.raises(OSError, match="not a regular file"):
        read_text(Path("/dev/null"))
    monkeypatch.undo()
    with pytest.raises(IsADirectoryError):
        read_text(tmp_path)
