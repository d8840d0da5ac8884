"""Errors of the user's own code show the user's lines alone, and exit 1."""

import re

import jax
import pytest

from jshard.recipe.load import open_recipe
from jshard.system.cli.command import run_command
from jshard.system.cli.user_code import describe_user_error
from jshard.system.jobs.peers import _describe

RECIPE = """\
import jax
import jax.numpy as jnp

def get_config():
    return inner({})

def inner(config):
    return config["missing"]

def make_model(config, rngs):
    return jax.eval_shape(lambda x: x + jnp.ones(3), jnp.ones(2))

def make_optimizer(config):
    raise ValueError("first\\nsecond")

def loss_fn(model, batch): ...

def make_data(config, split):
    def example(i):
        return 1 / i
    return example
"""


@pytest.fixture
def raised(tmp_path):
    """The error that a call with the recipe ends with, without this file's frame."""
    (tmp_path / "mine.py").write_text(RECIPE)

    def run(call, *args) -> Exception:
        with open_recipe(tmp_path / "mine.py") as recipe:
            try:
                call(getattr(recipe, args[0]))(*args[1:])
            except Exception as error:
                return without_first_frame(error)
        raise AssertionError("nothing was raised")

    return run


def without_first_frame(error: Exception) -> Exception:
    assert error.__traceback__ is not None
    return error.with_traceback(error.__traceback__.tb_next)


def itself(function):
    return function


@pytest.mark.parametrize(
    ("args", "told", "frames"),
    [
        (
            ["get_config"],
            "get_config() failed at {file}:8: KeyError: 'missing'",
            ["5, in get_config", "8, in inner"],
        ),
        (
            ["make_model", None, None],
            "make_model() failed at {file}:11: TypeError: add got incompatible shapes",
            ["11, in make_model", "11, in <lambda>"],
        ),
        (
            ["make_optimizer", None],
            "make_optimizer() failed at {file}:14: ValueError: first second",
            ["14, in make_optimizer"],
        ),
    ],
)
def test_an_error_shows_the_users_lines_and_names_the_function(
    args, told, frames, raised, tmp_path
):
    file = str(tmp_path / "mine.py")
    line, lines = describe_user_error(raised(itself, *args)) or ("", "")
    assert line.startswith(told.format(file=file))
    shown = [text for text in lines.splitlines() if text.startswith("  File ")]
    assert shown == [f'  File "{file}", line {frame}' for frame in frames]


def test_jaxs_frames_around_the_users_are_not_shown(raised):
    error = raised(itself, "get_config")
    inside = raised(lambda function: jax.jit(lambda: function()), "get_config")
    for each in (error, inside):
        _, lines = describe_user_error(each) or ("", "")
        assert "return inner({})" in lines
        assert "site-packages" not in lines


def test_a_long_message_is_cut_in_the_line_and_whole_below(tmp_path):
    (tmp_path / "long.py").write_text("raise ValueError('x ' * 999)")
    with (
        pytest.raises(ValueError, match="x x") as caught,
        open_recipe(tmp_path / "long.py"),
    ):
        pass
    line, lines = describe_user_error(caught.value) or ("", "")
    assert len(line) < 900
    assert line.endswith(" ...")
    assert "x " * 999 in lines


def test_an_error_outside_of_the_users_code_is_not_described(raised):
    with pytest.raises(re.error) as caught:
        re.compile("(")
    assert describe_user_error(without_first_frame(caught.value)) is None


def test_all_frames_are_shown_where_jax_is_asked_to(raised):
    error = raised(itself, "get_config")
    before = jax.config.jax_traceback_filtering  # pyright: ignore
    jax.config.update("jax_traceback_filtering", "off")
    try:
        assert describe_user_error(error) is None
    finally:
        jax.config.update("jax_traceback_filtering", before)


def test_a_command_prints_the_lines_and_then_one_line_and_exits_1(raised, capsys):
    error = raised(itself, "make_optimizer", None)

    def command(argv):
        raise error

    with pytest.raises(SystemExit) as ended:
        run_command(command)
    assert ended.value.code == 1
    *_, exception, more, last = capsys.readouterr().err.splitlines()
    assert (exception, more) == ("ValueError: first", "second")
    assert last.startswith("jshard: error: ")
    assert "ValueError: first second" in last


def test_other_processes_are_told_the_users_lines(raised):
    code, text = _describe(raised(itself, "make_optimizer", None))
    assert code == 1
    assert text.startswith("error: make_optimizer() failed at ")
    assert 'raise ValueError("first\\nsecond")' in text
