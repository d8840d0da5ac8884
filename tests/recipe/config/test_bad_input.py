"""Bad values for every key of every recipe, and every option of every command."""

import contextlib
import math
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jshard.export
import jshard.inspect
import jshard.launch
import jshard.plan.__main__
import jshard.plan.topology
import jshard.tokenize
import jshard.train
from jobs import environment
from jshard.data.text.text_data import text_data
from jshard.data.tokenizers.tokenizer import load_tokenizer
from jshard.recipe.config.overrides import override, read_words
from jshard.recipe.config.run_config import (
    SHARED,
    check,
    complete,
    declarations,
    flatten,
)
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.recipe_path import packaged_recipes
from jshard.system.cli.knob import Knob
from jshard.system.cli.paths import path_problem
from jshard.system.errors import UserError

FILES = {file.name for file in packaged_recipes().glob("[!_]*.py")}
RECIPES = sorted({*FILES, "llama.py:2-13b", "llama.py:3-8b"} - {"llama.py"})
LONG = "x" * 5000
URL = "gs://bucket"  # and nothing in it, which a run could be


@contextlib.contextmanager
def config_of(name: str) -> Iterator:
    with open_recipe(find_recipe(name)) as recipe:
        yield complete(recipe.get_config(), name)


def bad_values(key: Knob) -> list[str]:
    """What a key cannot be, by its declaration alone."""
    if key.kind is Path:
        return [LONG, f"{LONG}/{LONG}", URL]
    if key.kind in (str, tuple) and not key.choices:
        return []  # any text is one
    if key.kind is bool or key.choices:
        return ["", "nosuch", "7", "nan", LONG]
    bad = ["", "many", "nan", "-nan", "inf", "-inf", "1e999", "1,2", "()", LONG]
    bad += ["9" * 5000, "-7", "1" + "0" * 20 if key.kind is int else "1e39"]
    if key.kind is int:
        bad += ["0.5", "1e3"]
    if key.problem(0):
        bad.append("0")
    return [text for text in bad if text not in map(str, key.also)]


def set_and_check(config, key: str, text: str) -> None:
    override(config, read_words(config, {key: text}, "recipe.py"), "recipe.py")
    check(config)


def misspelt(key: str, rng: random.Random) -> str:
    at = rng.randrange(len(key))
    return key[:at] + key[at + 1 :]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_good_as_it_is_and_explains_each_key(name):
    with config_of(name) as config:
        check(config)
        for key, declaration in declarations(config).items():
            assert declaration.help, key
            assert not declaration.problem(flatten(config)[key]), key


@pytest.mark.quick("gpt.py")
@pytest.mark.parametrize("name", RECIPES)
def test_a_bad_value_of_any_key_of_any_recipe_is_one_line_that_names_it(name):
    with config_of(name) as config:
        declared, flat = declarations(config), flatten(config)
        for key, declaration in declared.items():
            for text in bad_values(declaration):
                with pytest.raises(UserError) as error:
                    set_and_check(config, key, text)
                assert f"--config.{key}=" in str(error.value)
            set_and_check(config, key, str(flat[key]))


@pytest.mark.quick("gpt.py", "llama.py:3-8b", "digits.py")
@pytest.mark.parametrize("name", RECIPES)
def test_a_misspelt_key_of_any_recipe_is_one_line_that_names_it(name):
    rng = random.Random(name)
    with config_of(name) as config:
        for key in [*flatten(config), "model"]:
            wrong = key if key == "model" else misspelt(key, rng)
            with pytest.raises(UserError, match=re.escape(f"--config.{wrong} ")):
                read_words(config, {wrong: "1"}, name)


@pytest.mark.quick("gpt.py")
@pytest.mark.parametrize("name", ["gpt.py", "llama.py:3-8b"])
def test_training_refuses_them_before_anything_starts(name, refused):
    rng = random.Random(name)
    with config_of(name) as config:
        declared = declarations(config)
    for key in rng.sample(sorted(declared), len(declared) // 8):  # above, all keys
        if bad := bad_values(declared[key]):
            words = [f"--config={name}", f"--config.{key}={rng.choice(bad)}"]
            refused(jshard.train, words, f"--config.{key}=")
        wrong = misspelt(key, rng)
        refused(jshard.train, [f"--config={name}", f"--config.{wrong}=1"], wrong)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama.py", "must be one of 2-7b, 2-13b, 3-1b, 3-8b, 3-70b, 3-405b"),
        ("llama.py:3", "must be one of 2-7b, 2-13b, 3-1b, 3-8b, 3-70b, 3-405b"),
        ("gpt.py:3", "too many positional arguments; use --config=gpt.py"),
    ],
)
def test_a_recipe_whose_argument_cannot_be_is_refused(name, said, refused):
    refused(jshard.train, [f"--config={name}"], said)
    words = [f"--config={name}", "--topology=h100:8"]
    refused(jshard.plan.__main__, words, said)


def test_the_planner_refuses_the_same(refused):
    rng = random.Random(0)
    with config_of("llama.py:3-8b") as config:
        declared = declarations(config)
    for key in rng.sample(sorted(declared), len(declared) // 8):
        if bad := bad_values(declared[key]):
            setting = f"--config.{key}={rng.choice(bad)}"
            words = ["--config=llama.py:3-8b", "--topology=h100:8", setting]
            refused(jshard.plan.__main__, words, f"--config.{key}=")


def test_an_unknown_url_is_refused_wherever_a_path_is_expected(tmp_path, monkeypatch):
    """It would be a folder named "gs:" on this machine's disk."""
    monkeypatch.chdir(tmp_path)
    asks = {
        "workdir": lambda path: jshard.Trainer("gpt.py", workdir=path),
        "Checkpointer: folder": jshard.Checkpointer,
        "data.tokenizer": load_tokenizer,
    }
    for name, ask in asks.items():
        for url in ("abfs://bucket/run", "https://me/run", Path("s3://bucket/run")):
            with pytest.raises(UserError, match=f"{name}={url}: is a URL"):
                ask(url)
    other = "abfs://bucket"
    for path, mixture in ((other, ""), ("", f"{other}:1")):
        with pytest.raises(UserError, match=f"data.path={other}: is a URL"):
            text_data(path, "train", mixture=mixture, sequence_length=8, seed=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["a:b", "./gs:/x", "C/x://y", "~/x", "gpt.py:/x"])
def test_other_paths_with_colons_are_allowed(path):
    assert path_problem(path) == ""


@pytest.mark.parametrize("key", sorted(SHARED))
def test_a_shared_key_that_a_recipe_misspells_is_one_line_that_names_it(
    key, refused, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    wrong = key[:-2] + key[-1]
    if wrong in SHARED:
        return
    config: dict = {"steps": 1, "batch_size": 8} | ({} if "." in key else {wrong: 1})
    config.pop(key, None)
    if "." in key:
        *groups, name = wrong.split(".")
        inner = config
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[name] = 1
    write_recipe(tmp_path, config)
    named = key if key in ("steps", "batch_size") else wrong
    refused(jshard.train, ["--config=own.py"], repr(named))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"policy": "full"}, "policy='full': policy is a group: policy.remat"),
        ({"mesh": {"fdsp": 2}}, "unknown key 'mesh.fdsp'; did you mean mesh.fsdp?"),
        ({"policy": {"remmat": "full"}}, "did you mean policy.remat?"),
        ({"checkpoint": {"evry": 1}}, "did you mean checkpoint.every?"),
        ({"watch": {"zzz": 1}}, "unknown key 'watch.zzz'; did you mean watch."),
        ({"chekpoint": {"every": 1}}, "did you mean checkpoint?"),
        ({"mesh": {"replica": True}}, "mesh.replica=True: must be hosts or a whole"),
        ({"mesh": {"expert": "fit"}}, "mesh.expert='fit': must be a whole number (jsh"),
        ({"steps": 2.5}, "steps=2.5: must be a whole number"),
        ({"steps": True}, "steps=True: must be a whole number"),
        ({"steps": {"number": 3}}, "steps="),
        ({"seed": -1}, "--config.seed=-1: must be a whole number, at least 0"),
        ({"policy": {"precision": "bf16"}}, "policy.precision is a group"),
        ({"watch": {"silence": math.nan}}, "--config.watch.silence=nan: must be a"),
        (
            {"optimizer": {"b2": 2.0}},
            "--config.optimizer.b2=2.0: must be a finite number, at least 0 and",
        ),
        (
            {"optimizer": {"clip_norm": 0}},
            "optimizer.clip_norm=0: must be a finite number, above 0",
        ),
        ({"mesh": {"cpu_devices": 100_000}}, "mesh.cpu_devices=100000: must be"),
    ],
)
def test_a_bad_value_in_get_config_is_one_line_that_names_it(
    config, said, refused, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path, {"steps": 1, "batch_size": 8} | config)
    refused(jshard.train, ["--config=own.py"], said)


def write_recipe(folder: Path, config: dict) -> None:
    text = repr(config).replace("nan", "float('nan')")
    (folder / "own.py").write_text(
        "from ml_collections import ConfigDict\n"
        f"def get_config(): return ConfigDict({text})\n"
        "def make_model(config, rngs): ...\n"
        "def make_optimizer(config): ...\n"
        "def loss_fn(model, batch): ...\n"
        "def make_data(config, split): ...\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config.mesh.replica=True"], "--config.mesh.replica=True"),
        (["--config.policy.first_k=99"], "policy.first_k=99 is more layers than"),
        (["--config.sample.prompt=" + "long" * 50], "--config.sample.prompt: has 1"),
        (["--config.model.num_heads=3"], "num_heads=3"),
        (["--config.checkpoint.best=eval_nosuch"], "checkpoint.best=eval_nosuch"),
        (["--config.data.validation_fraction=0", "--config.data.path=text.txt"],
            "validation_fraction"),
        (["--config.model.vocab_size=100"], "vocab_size"),
        (["--workdir=text.txt"], "text.txt"),
    ],
)  # fmt: skip
def test_a_real_command_ends_with_one_line_too(words, said, tmp_path):
    (tmp_path / "text.txt").write_text("text " * 1000)
    words = [*TINY, *words]
    done = subprocess.run(
        [sys.executable, "-m", "jshard.train", *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert said in line


TINY = [
    "--config=gpt.py",
    "--config.steps=1",
    "--config.model.num_layers=1",
    "--config.model.width=16",
    "--config.mesh.cpu_devices=2",
]
