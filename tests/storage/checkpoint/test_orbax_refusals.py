"""What of Orbax is refused, in which words, and whose folder is whose."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from orbax.checkpoint import v1

import jshard
from filled import filled
from jshard.storage.checkpoint.restore import find_newest, find_step
from jshard.storage.hub.parameters import find_parameters
from saved_by_orbax import (
    TX,
    WIDTH,
    Model,
    make_fsdp,
    manager,
    save,
)

PAGE = Path(__file__).parents[3] / "docs/how_to/orbax.md"
pytestmark = [pytest.mark.filterwarnings("ignore:100% of the parameters")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """(model, optimizer), and their checkpoint."""
    with jax.enable_x64(True):
        model = filled(lambda: Model(nnx.Rngs(0)))
        optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
        folder = tmp_path_factory.mktemp("plain") / "both"
        save(folder, nnx.state((model, optimizer)))
    return model, optimizer, folder


# What does not fit.


class Other(Model):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.tail = self.head
        del self.head


class Wide(Model):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.head = nnx.Linear(WIDTH, 7, param_dtype=np.float64, rngs=rngs)


@pytest.mark.parametrize(
    ("model", "tx", "keys", "said"),
    [
        (
            Other, TX, {},
            "compared with 0 there, it lacks tail.bias, tail.kernel; it has unexpected "
            "head.bias, head.kernel$",
        ),
        (Wide, TX, {}, r"params.head.kernel has shape \(5, 3\), not \(5, 7\)"),
        (
            Model, optax.lion(1e-3), {},
            r"of another optimizer: compared with 1.opt_state.1 there, it has "
            r"unexpected 0.nu.* 2.count",
        ),
        (
            Model, optax.sgd(1e-3, momentum=0.9), {},
            "has no state of this optimizer: .*restore_optimizer=False",
        ),
        (Model, TX, {"params_at": "1"}, "'1' is not where the parameters can be"),
        (Model, TX, {"step": 4}, "is one checkpoint: leave out step=4"),
    ],
)  # fmt: skip
def test_what_does_not_match_is_listed_both_ways(model, tx, keys, said, plain, x64):
    *_, folder = plain
    with pytest.raises(jshard.UserError, match=said):
        jshard.restore_orbax(folder, make_fsdp(), model, tx, **keys)


def test_of_several_places_one_is_asked_for(plain, tmp_path, x64):
    model, *_ = plain
    tree = {"params": nnx.state(model), "ema": nnx.state(model), "opt": {"lr": 0.1}}
    save(tmp_path / "two", tree)
    fsdp = make_fsdp()
    keys: dict[str, Any] = {"restore_optimizer": False}
    with pytest.raises(
        jshard.UserError, match=r"2 places fit the parameters, ema, params: "
    ):
        jshard.restore_orbax(tmp_path / "two", fsdp, Model, TX, **keys)
    with pytest.warns(UserWarning, match=r"not read: opt, params \(\d+ arrays\)"):
        jshard.restore_orbax(tmp_path / "two", fsdp, Model, TX, params_at="ema", **keys)


def test_folders_that_are_no_whole_checkpoints_of_orbax_are_refused(
    plain, tmp_path, x64
):
    model, *_ = plain
    fsdp = make_fsdp()

    def refused(folder: Path, said: str) -> None:
        with pytest.raises(jshard.UserError, match=said):
            find_parameters(folder, abstract)

    abstract = fsdp.abstract_state(Model, TX)
    with pytest.raises(jshard.UserError, match="holds no checkpoint of Orbax's"):
        jshard.restore_orbax(tmp_path, fsdp, Model, TX)
    with pytest.raises(jshard.UserError, match="nowhere does not exist"):
        jshard.restore_orbax(tmp_path / "nowhere", fsdp, Model, TX)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    pure = nnx.to_pure_dict(nnx.state(model))
    ocp.Checkpointer(handler).save(tmp_path / "files", pure)
    shutil.copytree(tmp_path / "files", tmp_path / "8.orbax-checkpoint-tmp")
    refused(tmp_path / "8.orbax-checkpoint-tmp", "that Orbax did not complete")
    (tmp_path / "files/layers.0.kernel/0.0").unlink()  # zarr would read zeros
    source = find_parameters(tmp_path / "files", abstract).orbax
    assert source is not None
    with pytest.raises(jshard.UserError, match=r"is damaged: .*layers\.0\.kernel"):
        source.load(abstract)
    shutil.rmtree(tmp_path / "files/layers.0.kernel")
    refused(tmp_path / "files", r"is damaged: .*layers\.0\.kernel")
    (tmp_path / "files/_METADATA").write_text("{}")
    refused(tmp_path / "files", "_METADATA lists no arrays as Orbax does")


# Whose folder it is.


def test_folders_of_orbax_are_never_called_damaged_or_to_be_removed(plain, tmp_path):
    model, *_ = plain
    manager(tmp_path / "steps", nnx.state(model))
    v1.save(tmp_path / "one", nnx.state(model))  # its item is named as jshard's arrays
    for look, path, said in [
        (find_newest, "steps", r"holds checkpoints of Orbax's \(steps 1, 8\)"),
        (find_step, "steps", "holds checkpoints of Orbax's"),
        (find_step, "steps/8", "is a checkpoint of Orbax's"),
        (find_step, "one", "is a checkpoint of Orbax's"),
        (jshard.Checkpointer, "steps", "holds checkpoints of Orbax's"),
    ]:
        with pytest.raises(jshard.UserError, match=said) as error:
            look(tmp_path / path)
        assert "restore_orbax" in str(error.value)
        for word in ("damaged", "remove"):
            assert word not in str(error.value)
    assert sorted(x.name for x in (tmp_path / "steps").iterdir()) == ["1", "8"]


def test_orbax_alone_reads_a_checkpoint_and_its_folder_is_told_from_orbaxs(
    plain, tmp_path, x64
):
    model, *_ = plain
    fsdp = make_fsdp()
    with jshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(fsdp.from_model(model, TX))
    with pytest.raises(jshard.UserError, match=rf"of jshard's: give {tmp_path}/0$"):
        jshard.restore_orbax(tmp_path / "0/state", fsdp, Model, TX)
    with pytest.raises(jshard.UserError, match="holds no checkpoint of Orbax's"):
        jshard.restore_orbax(tmp_path, fsdp, Model, TX)
    # The lines of the page, without jshard.
    text = PAGE.read_text()
    lines = text[text.index("def read(") : text.index("params, tree =")]
    names = {"json": json, "jax": jax, "v1": v1}
    names |= {"flatten_dict": flatten_dict, "unflatten_dict": unflatten_dict}
    exec(lines, names)
    tree = names["read"](tmp_path / "0")
    kinds = {"params": nnx.Param, "model_state": nnx.Not(nnx.Param)}
    for kind, of_kind in kinds.items():
        for path, variable in nnx.to_flat_state(nnx.state(model, of_kind)):
            x = functools.reduce(lambda node, key: node[str(key)], path, tree[kind])
            want = variable.get_value()
            assert (x.shape, x.dtype) == (want.shape, want.dtype)
            assert bool(jnp.all(x == want))
