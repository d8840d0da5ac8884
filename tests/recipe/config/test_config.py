"""A recipe's config, and how the command line sets it."""

import copy
import pickle

import pytest
from ml_collections import ConfigDict

from jshard.recipe.config.keys import Key
from jshard.recipe.config.overrides import keys_help, override, read_words
from jshard.recipe.config.run_config import check, complete, declarations, flatten
from jshard.system.errors import UserError


def set_and_check(config, values):
    override(config, values, "mlp.py")
    check(config)


def given(config, **words):
    """Sets keys to words of the command line."""
    override(config, read_words(config, words, "mlp.py"), "mlp.py")


def test_help_lists_every_key_with_its_default(config):
    text = keys_help(config, "mlp.py")
    for key, value in flatten(config).items():
        assert f"--config.{key}={value}\n" in text


def test_help_says_what_each_key_means_and_what_it_may_be():
    own = {"width": Key(8, "of the stream", at_least=1), "name": "mlp"}
    config = complete(
        ConfigDict({"steps": 10, "batch_size": 8, "model": own}), "mlp.py"
    )
    text = keys_help(config, "mlp.py")
    meaning = "\n          of the stream (a whole number, at least 1)\n"
    assert f"  --config.model.width=8{meaning}" in text
    assert (
        "batch_size=8\n          global batch size, in examples (a whole number, at "
        "least 1)" in text
    )
    assert "optimizer or all)" in text  # policy.offload
    assert text.index("model.name") < text.index("checkpoint.every")  # its own first
    assert max(map(len, text.splitlines())) <= 88


# The config.


def test_a_config_gets_the_shared_keys_that_its_recipe_leaves_out(config):
    assert config.seed == 0
    sizes = {
        "fsdp": -1,
        "replica": 1,
        "context": 1,
        "tensor": 1,
        "expert": 1,
        "pipe": 1,
    }
    sizes["cpu_devices"] = 8
    assert config.mesh.to_dict() == sizes
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


def test_words_set_keys_by_the_type_of_their_default(config):
    given(
        config,
        **{
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
    given(config, **{"checkpoint.accept": "", "files": "('e,f',)"})
    assert (config.checkpoint.accept, config.files) == ((), ("e,f",))


def test_an_unknown_key_is_an_error_that_names_the_nearest(config):
    with pytest.raises(
        UserError,
        match=r"--config\.optimizer\.learning_rat in recipe mlp\.py; "
        r"did you mean optimizer\.learning_rate\?",
    ):
        override(config, {"optimizer.learning_rat": 1.0}, "mlp.py")


def test_a_key_unlike_all_of_its_group_is_an_error_that_lists_them(config):
    with pytest.raises(UserError, match=r"optimizer\.mu in .*; optimizer has betas, "):
        override(config, {"optimizer.mu": 1.0}, "mlp.py")


def test_a_group_as_a_key_is_an_error_that_lists_its_members(config):
    with pytest.raises(UserError, match=r"a group: mesh\.context, mesh\.cpu_devices, "):
        override(config, {"mesh": 3}, "mlp.py")


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("steps", "1e3", "a whole number"),
        ("steps", "", "a whole number"),
        ("steps", "None", "a whole number"),
        ("limit", "many", "None or a whole number"),
        ("optimizer.learning_rate", "fast", "a finite number"),
        ("model.dropout", "1", "True or False"),
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
        given(config, **{key: text})
    assert str(error.value).startswith(f"--config.{key}={text}: must be {expected}")


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
    message = rf"--config\.{key}={value}: must be .*at least"
    with pytest.raises(UserError, match=message):
        given(config, **{key: str(value)})
    with pytest.raises(UserError, match=message):
        override(config, {key: value}, "mlp.py")
    with config.ignore_type():
        config.update_from_flattened_dict({key: value})
    with pytest.raises(UserError, match=message):
        check(config)


def test_the_limit_of_a_stuck_process_is_learned_or_seconds(config):
    assert config.watch.stuck == "auto"
    for value in ("auto", "0", "90", "0.5"):
        given(config, **{"watch.stuck": value})
        check(config)
    for value in ("-1", "nan", "True", "soon"):
        with pytest.raises(
            UserError, match=r"watch\.stuck=.*: must be auto or a finite"
        ):
            given(config, **{"watch.stuck": value})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"best_is": "least"}, "best_is=least: must be lowest or highest"),
        ({"best": "loss"}, "best=loss: must be an evaluation metric"),
        ({"best": "eval_loss"}, "best=eval_loss: needs --config.eval_every above 0"),
        ({"restore_optimizer": True}, "from where? give --config.checkpoint.restore"),
        (
            {"restore_optimizer": True, "restore": "a.safetensors"},
            "a.safetensors has parameters only",
        ),
        ({"accept": ("model.droput",)}, "key or group; did you mean model.dropout?"),
        ({"accept": ("seed", 3)}, "accept=3: the recipe has no such key"),
        ({"accept": ("mode",)}, "accept=mode: the recipe has no such key"),
    ],
)
def test_checkpoint_options_that_are_wrong_or_at_odds_are_one_clear_line(
    values, said, config
):
    values = {f"checkpoint.{key}": value for key, value in values.items()}
    with pytest.raises(UserError) as error:
        set_and_check(config, values)
    assert said in str(error.value)


def test_the_best_checkpoint_needs_checkpoints(config):
    values = {"checkpoint.best": "eval_loss", "eval_every": 5}
    override(config, values, "mlp.py")
    check(config)
    override(config, {"checkpoint.every": 0}, "mlp.py")
    with pytest.raises(UserError, match=r"needs --config\.checkpoint\.every above 0"):
        check(config)


def test_keys_and_groups_of_the_recipe_can_be_accepted(config):
    accepted = ["model", "data", "optimizer.betas", "batch_size", "seed"]
    override(config, {"checkpoint.accept": accepted}, "mlp.py")
    check(config)


# Declarations.


def own_config(**keys):
    return complete(ConfigDict({"steps": 10, "batch_size": 8} | keys), "mlp.py")


def test_a_declared_key_is_read_and_set_like_a_plain_value():
    config = own_config(model={"width": Key(8, "width", at_least=1), "depth": 2})
    assert dict(**config.model) == {"width": 8, "depth": 2}
    override(config, {"model.width": 4}, "mlp.py")
    assert config.model.width == 4
    assert config.to_dict()["model"] == {"width": 4, "depth": 2}
    with pytest.raises(
        UserError, match=r"--config.model.width=0: must be a whole number, at least 1"
    ):
        override(config, {"model.width": 0}, "mlp.py")
    override(config, {"model.depth": -3}, "mlp.py")  # a plain value has no bounds
    check(config)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_copy_of_a_config_keeps_its_declarations(copied):
    config = copied(own_config(model={"width": Key(8, "width", at_least=1)}))
    assert declarations(config)["model.width"].help == "width"
    with pytest.raises(
        UserError, match=r"--config.model.width=0: must be a whole number, at least 1"
    ):
        override(config, {"model.width": 0}, "mlp.py")


def test_a_declared_value_may_be_of_several_kinds():
    config = own_config(rate=Key(None, "", kind=float, also=(None, "auto"), above=0))
    for text, value in (("2", 2.0), ("auto", "auto"), ("None", None)):
        given(config, rate=text)
        check(config)
        assert config.rate == value
        override(config, {"rate": value}, "mlp.py")
        assert config.rate == value
    for text in ("none", "-1"):
        with pytest.raises(
            UserError, match=rf"rate={text}: must be None, auto or a finite number, abo"
        ):
            given(config, rate=text)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_nan_and_infinities_are_refused_unless_they_are_the_default(text):
    config = own_config(limit=float("inf"), rate=0.5)
    with pytest.raises(UserError, match=rf"--config.rate={text}: must be a finite"):
        given(config, rate=text)
    given(config, limit=text)
    check(config)


def test_a_reference_to_another_key_still_follows_it():
    own = ConfigDict({"steps": 10, "batch_size": 8, "eval_every": 1})
    own.warmup = own.get_ref("steps") // 5
    own.eval_every = own.get_ref("steps") // 2
    config = complete(own, "mlp.py")
    override(config, {"steps": 20}, "mlp.py")
    check(config)
    assert (config.warmup, config.eval_every) == (4, 10)


@pytest.mark.parametrize("value", [None, "cosine", (1e-3, 1e-4)])
def test_a_recipe_may_mean_something_else_by_a_common_name(value):
    check(own_config(optimizer={"learning_rate": value}))


def test_a_common_number_has_its_range_without_a_declaration():
    config = own_config(optimizer={"learning_rate": 1, "clip_norm": None})
    override(config, {"optimizer.learning_rate": 0.1}, "mlp.py")
    assert config.optimizer.learning_rate == 0.1
    with pytest.raises(UserError, match=r"learning_rate=-0\.1: must be a .*at least 0"):
        override(config, {"optimizer.learning_rate": -0.1}, "mlp.py")
