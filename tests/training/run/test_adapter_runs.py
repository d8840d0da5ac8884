"""Runs that train adapters: their checkpoints leave out what is frozen."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore
from safetensors.numpy import save_file

import jshard
from foreign_weights import read_tensors
from jshard.export import export
from jshard.inference.trained.trained_model import open_model
from jshard.storage.checkpoint import metadata
from jshard.storage.checkpoint.restore import ARRAYS, find_step
from jshard.system.compat.orbax import open_array
from jshard.system.errors import Preempted
from resumable import read_metrics
from stopped_runs import RECIPE, train

pytestmark = pytest.mark.usefixtures("compiled_once")

TWO_LAYERS = RECIPE.replace(
    "        self.noise =",
    "        self.blocks = jshard.Stack(\n"
    "            lambda rngs: nnx.Sequential(nnx.Linear(width, width, rngs=rngs)),\n"
    "            2,\n"
    "            rngs=rngs,\n"
    "        )\n"
    "        self.noise =",
).replace("self.dropout(self.embed(x))", "self.blocks(self.dropout(self.embed(x)))")
ADAPTERS = (
    TWO_LAYERS.replace('"peak": 1e-2}', '"peak": 1e-2}, "trained": "adapters"').replace(
        "    return Model(**config.model, rngs=rngs)",
        """\
    model = Model(**config.model, rngs=rngs)
    jshard.nn.add_lora(model, rank=2, alpha=4.0, rngs=rngs)
    return model
""",
    )
    + """

def trainable(config):
    return nnx.LoRAParam if config.trained == "adapters" else config.trained
"""
)
LINEAR = "blocks.layers.0"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A run of the model without adapters."""
    return train(tmp_path_factory.mktemp("base"), steps=4, recipe=TWO_LAYERS)


@pytest.fixture(scope="module")
def files(base, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    export(base, folder)
    return folder


@pytest.fixture(scope="module")
def frozen(tmp_path_factory) -> Path:
    """A file of tensors for the same model, that no run has trained."""
    draw = np.random.default_rng(0).normal
    shapes = {"embed.embedding": (64, 16), "head.kernel": (16, 64), "head.bias": (64,)}
    for layer in range(2):
        shapes[f"blocks.{layer}.layers.0.kernel"] = (16, 16)
        shapes[f"blocks.{layer}.layers.0.bias"] = (16,)
    file = tmp_path_factory.mktemp("frozen") / "frozen.safetensors"
    save_file({k: draw(size=x).astype(np.float32) for k, x in shapes.items()}, file)
    return file


@pytest.fixture(scope="module")
def adapted(frozen, tmp_path_factory) -> Path:
    """A run of eight steps that has trained adapters of it."""
    return adapt(tmp_path_factory.mktemp("adapted"), frozen)


def adapt(folder: Path, base: Path | str, **keys: Any) -> Path:
    given = {"steps": 8, "eval_every": 0, "checkpoint__restore": base} | keys
    return train(folder, recipe=ADAPTERS, **given)


def stop(folder: Path, base: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "jshard.training.callbacks.preemption.Preemption.requested",
            lambda self, now: now == 5,
        )
        with pytest.raises(Preempted):
            adapt(folder, base)
    return folder / "run"


def killed(adapted: Path, folder: Path) -> Path:
    """A copy of the run, as if it had been killed after its first checkpoint."""
    run = shutil.copytree(adapted, folder / "run")
    shutil.rmtree(run / "checkpoints/8")
    return run


def check_arrays(run: Path) -> None:
    """Adapters alone are in the newest checkpoint, and what tells their base."""
    kept = metadata.read(find_step(run))
    kinds = {name.split(".")[0] for name in kept["arrays"]}
    assert kinds == {"step", "params", "model_state", "opt_state", "ema"}
    params = [name for name in kept["arrays"] if name.startswith("params")]
    assert params == [f"params.{LINEAR}.lora_{side}" for side in "ab"]
    assert "blocks" in str(kept["frozen_from"]["bit_sums"])


def test_checkpoints_hold_adapters_alone_and_runs_go_on_from_them(
    adapted, frozen, tmp_path
):
    check_arrays(adapted)
    run = killed(adapted, tmp_path)
    adapt(tmp_path, frozen)
    assert read_metrics(run) == read_metrics(adapted)
    check_arrays(run)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["base", "files"])
def test_adapters_of_a_run_and_of_its_export_go_on_after_a_signal(
    source, tmp_path, request
):
    base = request.getfixturevalue(source)
    (tmp_path / "whole").mkdir()
    whole = adapt(tmp_path / "whole", base)
    run = stop(tmp_path, base)
    check_arrays(run)
    adapt(tmp_path, base)
    assert read_metrics(run) == read_metrics(whole)
    check_arrays(run)


@pytest.mark.quick("adapters-True")
@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize("kind", ["base", "adapters"])
def test_a_trained_model_is_that_of_the_last_step_or_the_averages(kind, ema, request):
    run = request.getfixturevalue("base" if kind == "base" else "adapted")
    recipe = str(run.parent / "tiny.py")
    name = "head.kernel" if kind == "base" else f"{LINEAR}.lora_b"
    stored = f"{'ema' if ema else 'params'}.{name}"
    with open_model(run, recipe, ema=ema) as model:
        assert "averages" in str(model)
        assert ("as trained" in str(model)) != ema
        _, state = model.load(jax.devices()[:2])
    assert state.ema is None
    got = metadata.arrays_by_name(state)[f"params.{name}"]
    want = open_array(find_step(run) / ARRAYS, stored, tensorstore.Context())
    np.testing.assert_array_equal(got, want.read().result())


@pytest.mark.slow
def test_a_base_that_has_moved_is_named_again(files, tmp_path, capsys):
    moved = shutil.copytree(files, tmp_path / "there")
    run = stop(tmp_path, moved)
    here = moved.rename(tmp_path / "here")
    with pytest.raises(jshard.UserError, match=r"there.* does not exist: .*restore"):
        adapt(tmp_path, "")
    recipe, one = str(tmp_path / "tiny.py"), jax.devices()[:1]
    wrong = pytest.raises(jshard.UserError, match=r"there.* not exist: .*--base=DIR")
    with wrong, open_model(run, recipe):
        pass
    with open_model(run, recipe, base=here) as model:
        _, state = model.load(one)
    stored = read_tensors(here)["head.kernel"]
    got = metadata.arrays_by_name(state)["frozen.head.kernel"]
    np.testing.assert_array_equal(got, stored)
    adapt(tmp_path, here)
    assert f"resuming {run} after step 5" in capsys.readouterr().out


def test_a_base_that_has_changed_is_an_error_that_names_arrays(
    adapted, frozen, tmp_path
):
    file = own = Path(shutil.copy(frozen, tmp_path))
    run = killed(adapted, tmp_path)
    data = bytearray(file.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    offset = header["head.kernel"]["data_offsets"][0]
    data[8 + int.from_bytes(data[:8], "little") + offset] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        jshard.UserError, match=r"frozen\.head\.kernel differ; give the folder"
    ) as error:
        adapt(tmp_path, own)
    assert "\n" not in str(error.value)
    assert run.exists()


@pytest.mark.slow
def test_adapters_without_a_base_are_saved_with_what_is_frozen(tmp_path):
    run = train(tmp_path, recipe=ADAPTERS, steps=4)
    names = metadata.read(find_step(run))["arrays"]
    assert {f"frozen.{LINEAR}.kernel", f"params.{LINEAR}.lora_a"} <= names.keys()


def test_a_filter_that_is_none_is_an_error_of_the_recipe(tmp_path):
    with pytest.raises(jshard.UserError, match=r"trainable\(config\) returned 3"):
        train(
            tmp_path,
            recipe=ADAPTERS.replace('"adapters"}', "3}").replace(
                '"trained": "adapters"', '"trained": 3'
            ),
            steps=4,
        )


@pytest.mark.slow
def test_frozen_weights_do_not_change(base, tmp_path):
    run = adapt(tmp_path, base)
    there = metadata.read(find_step(run))["frozen_from"]["bit_sums"]
    again = adapt(tmp_path, base, steps=12)
    assert metadata.read(find_step(again))["frozen_from"]["bit_sums"] == there
    losses = [line["loss"] for line in read_metrics(run) if "loss" in line]
    assert np.isfinite(losses).all()
