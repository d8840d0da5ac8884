"""The keys of ``config.policy``, as a recipe or the command line gives them."""

import pytest
from ml_collections import ConfigDict

import jshard
from jshard.recipe.config.overrides import override, read_words
from jshard.recipe.config.policy_keys import make_policy
from jshard.recipe.config.run_config import complete


def policy(**given: str) -> jshard.Policy:
    """The policy of a recipe with nothing but keys from the command line."""
    config = complete(ConfigDict({"steps": 1, "batch_size": 8}), "r.py")
    keys = {f"policy.{key.replace('__', '.')}": text for key, text in given.items()}
    override(config, read_words(config, keys, "r.py"), "r.py")
    return make_policy(config)


def test_the_defaults_of_the_command_line_are_those_of_the_library():
    assert policy() == jshard.Policy()


@pytest.mark.parametrize("text", ["True", "False", "4"])
@pytest.mark.parametrize("key", ["reshard_after_forward", "reshard_root"])
def test_reshard_takes_a_boolean_or_a_group(key, text):
    value = getattr(policy(**{key: text}), key)
    assert (str(value), type(value)) == (text, int if text == "4" else bool)


def test_a_recipe_may_give_a_group_where_the_default_is_a_boolean():
    given = {"steps": 1, "batch_size": 8, "policy": {"reshard_after_forward": 4}}
    assert make_policy(complete(ConfigDict(given), "r.py")).reshard_after_forward == 4
    assert policy().reshard_after_forward is True  # the defaults are not shared


@pytest.mark.parametrize(
    ("text", "remat"),
    [
        ("dots", "dots"),
        ("names:qkv+hidden", jshard.Names("qkv", "hidden")),
        ("offload:qkv", jshard.Offload("qkv")),
    ],
)
def test_remat_takes_names_of_activations(text, remat):
    assert policy(remat=text).remat == remat


def test_overrides_take_patterns_of_module_paths():
    half = jshard.Precision(compute="bfloat16")
    got = policy(
        precision__compute="bfloat16",
        overrides="blocks.norm*:compute=float32,blocks.norm*:gather=float32,"
        "head:reshard_after_forward=2,blocks:remat=names:a+b,blocks:first_k=3",
    )
    assert got.precision == half
    assert got.overrides == {
        "blocks.norm*": {"precision": jshard.Precision(None, "float32", "float32")},
        "head": {"reshard_after_forward": 2},
        "blocks": {"remat": jshard.Names("a", "b"), "first_k": 3},
    }


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("remat", "most", "full, attention, dots, none"),
        ("remat", "qkv", "with names of activations (names:qkv keeps 'qkv')"),
        ("remat", "names:", "full, attention, dots, none, names:A"),
        ("remat", "nmaes:a", "full, attention, dots, none, names:A"),
        ("reshard_after_forward", "-1", "True, False or the size of a group"),
        ("reshard_root", "some", "True, False or the size of a group"),
        ("first_k", "-1", "None or a number of layers"),
        ("first_k", "half", "None or a number of layers"),
        ("precision__compute", "flaot", "float32, bfloat16"),
        ("precision__reduce", "int8", "float32, bfloat16"),
        ("overrides", "blocks", "PATTERN:KEY=VALUE"),
        ("overrides", "blocks:dtype=float32", "remat, first_k, reshard_after_forward"),
        ("overrides", "blocks:remat=most", "full, attention, dots, none"),
        ("overrides", "blocks:compute=flaot32", "float32, bfloat16"),
    ],
)
def test_a_wrong_value_is_an_error_that_says_what_is_possible(key, text, message):
    with pytest.raises(jshard.UserError) as error:
        policy(**{key: text})
    assert message in str(error.value)
    assert "\n" not in str(error.value)
