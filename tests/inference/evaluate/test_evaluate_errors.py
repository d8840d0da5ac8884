"""What cannot be scored is told in a line, before weights are read."""

import json
import sys
from typing import Any

import jax
import optax
import pytest
from flax import nnx
from ml_collections import ConfigDict

import jshard
from jshard.evaluate import run_evaluate
from jshard.inference.evaluate.in_runs import RunTasks
from jshard.inference.evaluate.tasks import load_tasks
from jshard.models.gpt import GPT, GPTConfig
from jshard.recipe.config.run_config import check, complete
from jshard.recipe.config.settings import RunSettings
from jshard.recipe.config.text_keys import TextKeys, text_keys
from jshard.system.errors import UserError
from tiny_llama import CONFIG


@pytest.fixture
def llama(tmp_path, monkeypatch):
    """A folder with a model and no tokenizer, whose weights nobody reads."""
    monkeypatch.setattr(
        "jshard.inference.trained.model_command.cache_compilations", lambda: None
    )
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(
        UserError, match=r"--tasks: .* pip install 'jshard\[evaluate\]'"
    ):
        load_tasks("--tasks", ["hellaswag"])


def test_a_model_without_a_tokenizer_is_refused(llama):
    with pytest.raises(UserError, match=r"no tokenizer\.json here"):
        run_evaluate([f"--model={llama}", "--tasks=any"])


@pytest.mark.parametrize(
    ("word", "match"),
    [
        ("--include_path=missing", "missing: there is no such folder"),
        ("--output=missing/scores.json", "no file can be written there"),
        ("--limit=0", "must be .* above 0"),
        ("--num_fewshot=-1", "at least 0"),
    ],
)
def test_options_are_checked_first(llama, word, match):
    with pytest.raises(UserError, match=match):
        run_evaluate([f"--model={llama}", "--tasks=any", word])


def state_of(make_model):
    fsdp = jshard.FSDP(jshard.make_mesh(devices=jax.devices()[:1]))
    return fsdp, fsdp.abstract_state(make_model, optax.identity())


def gpt(rngs):
    sizes: dict[str, Any] = {"num_layers": 1, "num_heads": 2, "width": 16}
    return GPT(GPTConfig(vocab_size=300, sequence_length=32, **sizes), rngs=rngs)


def test_a_run_without_text_has_no_tasks():
    config = ConfigDict({"data": {"path": "x"}})
    settings = RunSettings(eval_tasks=("any",))
    with pytest.raises(UserError, match=r"eval_tasks: the recipe has no data\."):
        RunTasks(settings, text_keys(config), *state_of(gpt))
    config.data.tokenizer = ""
    made = state_of(lambda rngs: nnx.Linear(8, 8, rngs=rngs))
    with pytest.raises(UserError, match="eval_tasks: Linear is not a decoder"):
        RunTasks(settings, text_keys(config), *made)


def test_a_recipe_may_use_the_groups_of_text_for_something_else():
    config = ConfigDict({"data": "a folder", "model": 7})
    assert text_keys(config) == TextKeys(None, None)


def test_tasks_need_evaluations():
    config = {"steps": 1, "batch_size": 1, "eval_tasks": ("any",)}
    with pytest.raises(UserError, match=r"eval_tasks=.*needs --config\.eval_every"):
        check(complete(ConfigDict(config), "recipe"))
