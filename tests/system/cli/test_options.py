"""A command line becomes typed values, by its options' declarations."""

from pathlib import Path

import pytest

from jshard.recipe.recipe_path import RECIPE_OPTIONS
from jshard.system.cli.options import Command, Option
from jshard.system.errors import UserError

COMMAND = Command(
    "try",
    "Tries options.",
    {
        "PATH": Option((), "files", kind=Path, repeats=True),
        **RECIPE_OPTIONS,
        "workdir": Option(None, "a folder", kind=Path, shown="DIR"),
        "count": Option(None, "how many", kind=int, at_least=1, at_most=9),
        "rate": Option(0.5, "how fast"),
        "prompt": Option(None, "a text", kind=str),
        "dtype": Option("int", "of what", choices=("int", "float")),
        "ema": Option(False, "the averages"),
        "token": Option((), "ids", kind=int, repeats=True, at_least=0),
        "search": Option((), "knobs", kind=str, repeats=True, bare=""),
    },
    notes=("A last remark.",),
)
RECIPE = "--config=gpt.py"


def test_values_follow_after_an_equals_sign_or_as_the_next_word():
    for words in (
        ["--config=gpt.py", "--config.a.b=-1", "--workdir=x=y"],
        ["--config", "gpt.py", "--config.a.b", "-1", "--workdir", "x=y"],
    ):
        arguments = COMMAND.parse(words)
        assert arguments.config == Path("gpt.py")
        assert arguments.config_keys == {"a.b": "-1"}
        assert arguments.workdir == Path("x=y")
        assert not arguments.help


def test_values_have_the_types_of_their_declarations():
    words = [
        "--count=3",
        "a.txt",
        "--rate=2",
        "--ema",
        "b",
        "--token=7",
        "--token",
        "0",
    ]
    found = vars(COMMAND.parse([RECIPE, *words, "--search", "--search=mesh"]))
    assert found["PATH"] == (Path("a.txt"), Path("b"))
    assert (found["count"], found["token"], found["ema"]) == (3, (7, 0), True)
    assert (found["rate"], type(found["rate"])) == (2.0, float)
    assert (found["dtype"], found["prompt"], found["workdir"]) == ("int", None, None)
    assert found["search"] == ("", "mesh")


def test_a_text_and_a_key_may_be_empty():
    found = COMMAND.parse([RECIPE, "--prompt=", "--config.a="])
    assert (found.prompt, found.config_keys) == ("", {"a": ""})
    assert COMMAND.parse([RECIPE, "--prompt=--help"]).prompt == "--help"


@pytest.mark.parametrize(
    "word", ["--confg=gpt.py", "-config=gpt.py", "--x", "--ema.a=1"]
)
def test_an_unknown_argument_is_an_error_that_names_it(word):
    with pytest.raises(UserError, match=f"unknown argument '{word}'"):
        COMMAND.parse([word])


def test_an_unknown_argument_is_an_error_that_names_the_nearest():
    with pytest.raises(UserError, match=r"did you mean --config\?; see --help"):
        COMMAND.parse(["--confg=gpt.py"])


def test_a_key_of_the_recipe_without_its_prefix_is_told_apart():
    with pytest.raises(
        UserError, match=r"'--steps=5'; .*--config\.steps\?; see --help"
    ):
        COMMAND.parse(["--steps=5"])


def test_a_word_too_many_is_unknown():
    one = Command("try", "", {"PATH": Option(None, "a file", kind=Path)})
    assert Path("a") == one.parse(["a"]).PATH
    with pytest.raises(UserError, match="unknown argument 'b'"):
        one.parse(["a", "b"])


@pytest.mark.parametrize(
    "words",
    [
        ["--config"],
        ["--config="],
        ["--workdir"],
        ["--workdir="],
        ["--workdir", "--ema"],
        ["--config.steps"],
        ["--prompt"],
        ["--count="],
    ],
)
def test_an_option_without_a_value_is_an_error_that_names_it(words):
    option = words[0].removesuffix("=")
    with pytest.raises(UserError, match=f"^{option} needs a value: {option}=..."):
        COMMAND.parse(words)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--count=many", "must be a whole number, at least 1 and at most 9"),
        ("--count=10", "must be a whole number, at least 1 and at most 9"),
        ("--count=None", "must be a whole number"),
        ("--rate=nan", "must be a finite number"),
        ("--dtype=str", "must be int or float"),
        ("--ema=perhaps", "must be True or False"),
        ("--token=-1", "must be a whole number, at least 0"),
        ("--workdir=gs://a/b", "is a URL"),
    ],
)
def test_an_impossible_value_is_an_error_that_says_what_is_possible(word, said):
    with pytest.raises(UserError) as error:
        COMMAND.parse([RECIPE, word])
    assert str(error.value).startswith(f"{word}: {said}")


def test_what_is_required_and_missing_is_named():
    with pytest.raises(UserError, match=r"^--config=FILE is missing; see --help"):
        COMMAND.parse([])


def test_help_lists_the_options_and_ends_but_waits_for_a_recipes_keys(capsys):
    with pytest.raises(SystemExit) as end:
        COMMAND.parse(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert text == COMMAND.help()
    for row in (
        "usage: python -m jshard.try --config=FILE [OPTIONS]\n\nTries options.\n",
        "  --workdir=DIR\n          a folder\n",
        "  --rate=N\n          how fast; by default 0.5\n",
        "  --dtype=int|float\n          of what; by default int\n",
        "  --ema\n          the averages\n",
        "  --search[=TEXT]\n          knobs\n",
        "\n\nA last remark.\n",
    ):
        assert row in text
    assert max(map(len, text.splitlines())) <= 88
    assert COMMAND.parse([RECIPE, "-h"]).help
