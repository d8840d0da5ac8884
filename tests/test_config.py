"""A recipe's config, and how the command line sets it."""

import copy
import pickle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ml_collections import ConfigDict, config_dict

from jshard.errors import UserError
from jshard.training.command_line import (
    help_text,
    override,
    parse_arguments,
    parse_value,
)
from jshard.training.config import check, complete, declarations, flatten
from jshard.training.keys import Key


@pytest.fixture
def config():
    return complete(
        ConfigDict(
            {
                "steps": 10,
                "batch_size": 8,
                "optimizer": {"learning_rate": 1e-3, "betas": (0.9, 0.95)},
                "model": {"dropout": False, "widths": (8, 8), "name": "mlp"},
                "limit": config_dict.placeholder(int),
                "files": ("a.txt",),
            }
        ),
        "mlp.py",
    )


# The command line's words.


def test_values_follow_after_an_equals_sign_or_as_the_next_word():
    for words in (
        ["--config=gpt.py", "--config.a.b=-1", "--workdir=x=y"],
        ["--config", "gpt.py", "--config.a.b", "-1", "--workdir", "x=y"],
    ):
        arguments = parse_arguments(words)
        assert arguments.recipe == "gpt.py"
        assert arguments.overrides == {"a.b": "-1"}
        assert arguments.options["workdir"] == "x=y"
        assert not arguments.help


@pytest.mark.parametrize("word", ["gpt.py", "--confg=gpt.py", "-config=gpt.py", "--x"])
def test_an_unknown_argument_is_an_error_that_names_it(word):
    with pytest.raises(UserError, match=f"unknown argument '{word}'"):
        parse_arguments([word])


@pytest.mark.parametrize("word", ["--config", "--workdir", "--config.steps"])
def test_an_option_without_a_value_is_an_error_that_names_it(word):
    with pytest.raises(UserError, match=f"{word} needs a value"):
        parse_arguments([word])


def test_help_lists_every_key_with_its_default(config):
    text = help_text(config, "mlp.py")
    for key, value in flatten(config).items():
        assert f"--config.{key}={value}\n" in text


def test_help_says_what_each_key_means_and_what_it_may_be():
    own = {"width": Key(8, "of the residual stream", at_least=1), "name": "mlp"}
    config = complete(
        ConfigDict({"steps": 10, "batch_size": 8, "model": own}), "mlp.py"
    )
    text = help_text(config, "mlp.py")
    assert (
        "  --config.model.width=8\n          of the residual stream (at least 1)\n"
        in text
    )
    assert "--config.steps=10\n          updates of the parameters (at least 1)" in text
    assert "optimizer or all)" in text  # policy.offload
    assert text.index("model.name") < text.index("checkpoint.every")  # its own first
    assert max(map(len, text.splitlines())) <= 88


# The config.


def test_a_config_gets_the_shared_keys_that_its_recipe_leaves_out(config):
    assert config.seed == 0
    assert config.mesh.to_dict() == {"fsdp": -1, "replica": 1, "cpu_devices": 8}
    assert config.policy.precision.compute is None


def test_a_recipes_own_value_of_a_shared_key_stays():
    own = ConfigDict({"steps": 1, "batch_size": 1, "mesh": {"replica": 2}})
    completed = complete(own, "mlp.py")
    assert (completed.mesh.replica, completed.mesh.fsdp) == (2, -1)


@pytest.mark.parametrize("key", ["steps", "batch_size"])
def test_a_config_that_lacks_a_required_key_is_an_error_that_names_it(key):
    own = {"steps": 1, "batch_size": 1}
    del own[key]
    with pytest.raises(UserError, match=f"lacks the key '{key}'"):
        complete(ConfigDict(own), "mlp.py")


def test_a_config_that_is_no_config_dict_is_an_error_that_says_what_it_is():
    with pytest.raises(UserError, match="returns dict; it must return"):
        complete({"steps": 1}, "mlp.py")


def test_overrides_set_keys_by_the_type_of_their_default(config):
    override(
        config,
        {
            "steps": "20",
            "optimizer.learning_rate": "1e-4",
            "optimizer.betas": "0.8,1",
            "model.dropout": "true",
            "model.widths": "[4, 4, 4]",
            "model.name": "3",
            "limit": "7",
            "mesh.fsdp": "-1",
            "policy.precision.compute": "bfloat16",
            "checkpoint.accept": "model.dropout,batch_size",
            "files": "b.txt, 2/c-d.txt",
        },
        "mlp.py",
    )
    assert config.steps == 20
    assert config.optimizer.learning_rate == 1e-4
    assert config.optimizer.betas == (0.8, 1.0)
    assert config.model.dropout is True
    assert config.model.widths == (4, 4, 4)
    assert config.model.name == "3"
    assert config.limit == 7
    assert config.policy.precision.compute == "bfloat16"
    assert config.checkpoint.accept == ("model.dropout", "batch_size")
    assert config.files == ("b.txt", "2/c-d.txt")
    override(config, {"checkpoint.accept": "", "files": "('e,f',)"}, "mlp.py")
    assert (config.checkpoint.accept, config.files) == ((), ("e,f",))


def test_an_unknown_key_is_an_error_that_names_the_nearest(config):
    with pytest.raises(
        UserError,
        match=r"--config\.optimizer\.learning_rat in recipe mlp\.py; "
        r"did you mean optimizer\.learning_rate\?",
    ):
        override(config, {"optimizer.learning_rat": "1"}, "mlp.py")


def test_a_group_as_a_key_is_an_error_that_lists_its_members(config):
    with pytest.raises(UserError, match=r"a group: mesh\.cpu_devices, mesh\.fsdp"):
        override(config, {"mesh": "3"}, "mlp.py")


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("steps", "1e3", "a whole number"),
        ("steps", "", "a whole number"),
        ("steps", "None", "a whole number"),
        ("limit", "many", "a whole number"),
        ("optimizer.learning_rate", "fast", "a finite number"),
        ("model.dropout", "1", "true or false"),
        ("model.widths", "8,8.5", "tuple such as"),
        ("optimizer.betas", "(0.9,", "tuple such as"),
        ("optimizer.betas", "a,b", "tuple such as"),
        ("files", "['b.txt'", "tuple such as"),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error_that_says_what_was_expected(
    key, text, expected, config
):
    with pytest.raises(UserError) as error:
        override(config, {key: text}, "mlp.py")
    assert str(error.value).startswith(f"--config.{key}={text}: expected {expected}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", 0),
        ("batch_size", -8),
        ("log_every", 0),
        ("mesh.cpu_devices", 0),
        ("checkpoint.every", -1),
        ("checkpoint.keep", 0),
        ("checkpoint.keep_every", -1),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_key_and_minimum(
    key, value, config
):
    override(config, {key: str(value)}, "mlp.py")
    with pytest.raises(UserError, match=rf"--config\.{key}={value}: must be at least"):
        check(config)


def test_the_limit_of_a_stuck_process_is_learned_or_seconds(config):
    assert config.watch.stuck == "auto"
    for value in ("auto", "0", "90", "0.5"):
        override(config, {"watch.stuck": value}, "mlp.py")
        check(config)
    for value in ("-1", "nan", "True", "soon"):
        with pytest.raises(UserError, match=r"watch\.stuck=.*: must be "):
            _checked(config, "watch.stuck", value)


def _checked(config, key, value):
    override(config, {key: value}, "mlp.py")
    check(config)
