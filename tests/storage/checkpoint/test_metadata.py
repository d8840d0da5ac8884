"""Descriptions and manifests of hostile checkpoints are refused in one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from jshard import inspect
from jshard.export import export
from jshard.recipe.make_config import take_recorded
from jshard.storage.checkpoint import manifest, metadata
from jshard.storage.checkpoint.checkpointer import Checkpointer
from jshard.storage.checkpoint.metadata import checked
from jshard.storage.checkpoint.restore import find_damage
from jshard.storage.checkpoint.step_folders import find_steps
from jshard.system.errors import UserError
from known_states import abstract, make_state

KERNEL = "params.layers.linear.kernel"


def of_array(name: str = KERNEL, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda about: about["arrays"][name].update(changes)


def without(key: str, name: str = KERNEL) -> Callable[[dict[str, Any]], None]:
    return lambda about: about["arrays"][name].pop(key)


def of_all(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda about: about.update(changes)


SOURCE = {"path": "/base", "bit_sums": {}}
HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "an unknown dtype": (of_array(dtype="float31"), "has dtype 'float31'"),
    "a dtype of Python": (of_array(dtype="O"), "has dtype 'O'"),
    "a dtype of fields": (of_array(dtype="i4,i4"), "has dtype 'i4,i4'"),
    "metrics as lists": (of_all(metrics={"loss": [1]}), "loss is [1], no number"),
    "metrics as texts": (of_all(metrics={"loss": "1"}), "loss is '1', no number"),
    "metrics as objects": (of_all(metrics={"loss": {}}), "loss is {}, no number"),
    "a huge metric": (of_all(metrics={"loss": 10**400}), "no number"),
    "a shape of 2^63": (of_array(shape=[2**63]), "too many bytes"),
    "a product of 2^80": (of_array(shape=[2**40, 2**40]), "too many bytes"),
    "a shape of 0": (of_array(shape=[4, 0, 16]), "has shape [4, 0, 16]"),
    "many dimensions": (of_array(shape=[1] * 99), "has shape [1, 1"),
    "a billion layers": (of_array(shape=[10**9, 1, 1]), "1,000,000,020 layers"),
    "no layers": (without("layer_dims"), "no layer_dims or random"),
    "negative layers": (of_array(layer_dims=-1), "layer_dims -1"),
    "layers of layers": (of_array(layer_dims=9), "layer_dims 9"),
    "randomness unknown": (
        without("random", "model_state.mean"),
        "no layer_dims or random",
    ),
    "no stacks": (lambda about: about.pop("stacks"), "stacks is not a list"),
    "stacks of numbers": (of_all(stacks=[3]), "stacks is not a list"),
    "half a character": (
        lambda about: about["arrays"].update({"opt.\ud800": {}}),
        "half a character",
    ),
    "no source of frozen ones": (of_all(frozen_from={}), "frozen_from has no path"),
    "a list for that": (of_all(frozen_from=[]), "frozen_from is not a JSON object"),
    "a path with a zero": (of_all(frozen_from=SOURCE | {"path": "a\0"}), "zero byte"),
    "a home of nobody": (
        of_all(frozen_from=SOURCE | {"path": "~no-such-user/a"}),
        "unknown user",
    ),
    "sums of bits": (of_all(frozen_from=SOURCE | {"bit_sums": {"a": ""}}), "no sums"),
    # What only the arrays themselves, or the averages beside them, contradict.
    "another shape": (of_array(shape=[4, 8, 32]), "description.json says float32"),
    "other averages": (
        of_array("ema.layers.linear.kernel", shape=[2]),
        "has another shape",
    ),
    "random keys": (of_array(dtype="key<fry>"), "holds random keys"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(make_state(abstract(2, 4), 8))
    return folder / "8"


@pytest.fixture
def step(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "8")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_description_is_one_line(name, step, tmp_path):
    change, said = HOSTILE[name]
    file = step / metadata.FILE
    about = json.loads(file.read_text())
    change(about)
    file.write_text(json.dumps(about))
    manifest.write(step, manifest.read(step) | manifest.checksum(step, metadata.FILE))
    assert not find_damage(step)
    try:
        checked(about)
    except ValueError:
        with pytest.raises(UserError, match="describes no checkpoint"):
            inspect.describe(step, full=True)
    else:
        inspect.describe(step, full=True)
    with pytest.raises(UserError) as refused:
        export(step, tmp_path / "out", ema="averages" in name)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", [-1, 2**63, 1.5, float("inf"), True, None, "9"])
def test_a_hostile_manifest_is_damage(size, step):
    files = manifest.read(step)
    next(iter(files.values()))["bytes"] = size
    (step / manifest.FILE).write_text(json.dumps({"format": 1, "files": files}))
    assert find_damage(step) == "manifest.json is damaged"
    with pytest.raises(UserError, match=r"is damaged: manifest\.json"):
        inspect.describe(step)


@pytest.mark.parametrize("stored", [{"model": [3]}, {"steps": {"a": 1}}])
def test_a_config_of_another_form_is_one_line(stored, tmp_path):
    config = ConfigDict({"model": {"width": 4}, "steps": 1})
    with pytest.raises(UserError, match="the run was of another recipe"):
        take_recorded(config, stored, tmp_path)


def test_folders_whose_names_are_no_steps_are_left_alone(saved):
    folder = saved.parent
    for name in ("²", "٣", "08", "9" * 200, str(2**31), "-1", "8.saving"):
        (folder / name).mkdir()
    assert find_steps(folder) == [8]
