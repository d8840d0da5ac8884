"""Values of a config's keys: given in Python, or read from the words of a command."""

from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import example
from hypothesis import strategies as st

from jshard.recipe.config.overrides import override
from jshard.recipe.config.run_config import check, flatten
from jshard.system.cli.knob import Knob
from jshard.system.errors import UserError

# Values in Python.


@pytest.mark.parametrize(
    ("key", "value", "kept"),
    [
        ("steps", np.int64(20), 20),
        ("optimizer.learning_rate", 1, 1.0),
        ("optimizer.learning_rate", np.float32(0.5), 0.5),
        ("optimizer.betas", [0.8, 0.9], (0.8, 0.9)),
        ("checkpoint.restore", Path("runs/x"), "runs/x"),
        ("model.name", "100", "100"),
        ("limit", None, None),
        ("mesh.replica", "hosts", "hosts"),
    ],
)
def test_a_value_in_python_is_kept_in_its_keys_type(key, value, kept, config):
    override(config, {key: value}, "mlp.py")
    check(config)
    found = flatten(config)[key]
    assert (found, type(found)) == (kept, type(kept))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", "20"),
        ("steps", 20.0),
        ("steps", True),
        ("steps", None),
        ("optimizer.learning_rate", "1e-3"),
        ("model.dropout", "true"),
        ("model.dropout", 1),
        ("model.widths", "8,8"),
        ("model.name", 3),
        ("policy.remat", 3),
        ("policy.precision.compute", "float31"),
    ],
)
def test_a_value_in_python_is_never_read_as_text(key, value, config):
    with pytest.raises(UserError, match=rf"--config\.{key}=.*: must be "):
        override(config, {key: value}, "mlp.py")


# Words.

# Hypothesis' own characters begin with a table that takes seconds to make.
characters = st.one_of(
    st.integers(0, 127), st.integers(0, 0xD7FF), st.integers(0xE000, 0x10FFFF)
).map(chr)
texts = st.text(characters)
scalars = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), texts)
sequences = st.one_of(
    st.lists(st.integers(), min_size=1),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1),
    st.lists(texts, min_size=1),
)


@hypothesis.given(scalars | sequences | sequences.map(tuple))
def test_every_value_is_read_back_from_its_text(value):
    parsed = Knob(value, "").read(str(value))
    assert parsed == value
    assert type(parsed) is type(value)


@hypothesis.given(texts, scalars | sequences | st.just(()) | st.none())
@example("9" * 5000, 0)  # Python reads no more than 4300 digits
@example("(" * 1000, (1,))
@example("1" + "+1" * 10000, (1,))
@example("{[]}", (1,))
def test_any_text_gives_a_value_of_the_defaults_type_or_a_value_error(text, default):
    try:
        value = Knob(default, "").read(text)
    except ValueError:
        return
    if default is None:
        assert value is None or type(value) in (int, float, bool, str)
    else:
        assert value is None or type(value) is type(default)


@hypothesis.given(st.integers(-(2**53), 2**53))
def test_a_whole_number_is_accepted_where_the_default_is_a_float(value):
    parsed = Knob(0.5, "").read(str(value))
    assert type(parsed) is float
    assert parsed == float(value)
