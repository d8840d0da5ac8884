"""The image classifiers and their maps against transformers: tiny random models."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jshard
from foreign_weights import randomize, read_tensors
from jshard.checkpoint.checkpointer import Checkpointer
from jshard.checkpoint.restore import find_parameters, read_parameters
from jshard.export import export
from models import regnet_huggingface, resnet_huggingface, vit_huggingface
from models.regnet import RegNet, RegNetConfig
from models.resnet import ResNet, ResNetConfig
from models.vit import ViT, ViTConfig
from parity import make_mesh

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own
    pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit"),
]

B, SIZE, CLASSES = 8, 32, 5
STAGES = {"embedding_size": 8, "hidden_sizes": [16, 32, 48], "depths": [1, 3, 2]}
VIT = {
    "image_size": SIZE,
    "patch_size": 8,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
}
REGNET = (regnet_huggingface, RegNet, RegNetConfig, "RegNet")
RESNET = (resnet_huggingface, ResNet, ResNetConfig, "ResNet")
CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "regnet-y": (REGNET, {**STAGES, "groups_width": 8}),
    "regnet-x": (REGNET, {**STAGES, "groups_width": 16, "layer_type": "x"}),
    "regnet-grey": (REGNET, {**STAGES, "groups_width": 8, "num_channels": 1,
                             "downsample_in_first_stage": False}),
    "resnet": (RESNET, STAGES),
    "resnet-basic": (RESNET, {**STAGES, "layer_type": "basic",
                              "downsample_in_first_stage": True}),
    "vit": ((vit_huggingface, ViT, ViTConfig, "ViT"), VIT),
    "vit-no-bias": ((vit_huggingface, ViT, ViTConfig, "ViT"),
                    {**VIT, "qkv_bias": False}),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(transformers, tmp_path_factory):
    """Writes a model's folder once."""

    @functools.cache
    def make(case: str) -> Path:
        torch = pytest.importorskip("torch")
        path = tmp_path_factory.mktemp(case)
        (*_, name), options = CASES[case]
        config = getattr(transformers, f"{name}Config")(**options, num_labels=CLASSES)
        model = getattr(transformers, f"{name}ForImageClassification")(config)
        randomize(model)
        for buffer, value in model.named_buffers():
            if "running" in buffer:
                value.copy_(torch.rand_like(value) + ("var" in buffer))
        model.save_pretrained(path)
        return path

    return make


def images(case: str) -> np.ndarray:
    channels = CASES[case][1].get("num_channels", 3)
    rng = np.random.default_rng(0)
    return rng.normal(size=(B, SIZE, SIZE, channels)).astype(np.float32)


def their_logits(transformers: Any, folder: Path, case: str) -> np.ndarray:
    torch = pytest.importorskip("torch")
    (*_, name), _ = CASES[case]
    kind = getattr(transformers, f"{name}ForImageClassification")
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    # A count that PyTorch uses without a momentum alone, and starts again from zero.
    info["missing_keys"] = {
        key for key in info["missing_keys"] if not key.endswith("num_batches_tracked")
    }
    assert not any(info.values()), info
    inputs = torch.tensor(images(case).transpose(0, 3, 1, 2))
    with torch.no_grad():
        return model.eval()(inputs).logits.numpy()


def imported(folder: Path, case: str, replica: int) -> tuple[jshard.FSDP, Any, Any]:
    (names, kind, config, _), _ = CASES[case]
    keys = names.read_config(json.loads((folder / "config.json").read_text()))
    fsdp = jshard.FSDP(
        make_mesh(replica, 8 // replica), jshard.Policy(min_shard_elements=0)
    )
    make_model = lambda rngs: kind(config(**keys), rngs=rngs)
    state = fsdp.init(make_model, optax.sgd(0.1), seed=1)
    source = find_parameters(folder, state, tensors=names.tensors(keys))
    return fsdp, read_parameters(source, state), keys


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(transformers, folder, case):
    want = their_logits(transformers, folder(case), case)
    assert np.std(want) > 0.1
    for replica in (1, 2):
        fsdp, state, _ = imported(folder(case), case, replica)
        predict = fsdp.predict_step(lambda model, batch: model(batch["image"]))
        with jax.default_matmul_precision("highest"):
            got = fsdp.unshard(
                predict(state, fsdp.shard_batch({"image": images(case)}))
            )
        assert np.max(np.abs(got - want)) <= 1e-5 * np.max(np.abs(want))


RECIPE = """\
from models import {file}_huggingface as huggingface


def get_config():
    from ml_collections import ConfigDict
    return ConfigDict({{"steps": 1, "batch_size": 8, "model": {{}}}})


make_model = make_optimizer = loss_fn = make_data = lambda *_: None
"""


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_loads_in_transformers(transformers, folder, case, tmp_path):
    want = their_logits(transformers, folder(case), case)
    _, state, keys = imported(folder(case), case, 2)
    with Checkpointer(tmp_path / "run" / "checkpoints") as checkpointer:
        config = {"recipe": "tiny", "model": {**keys, "from": ""}}
        checkpointer.save(state, config=config)
    (tmp_path / "tiny.py").write_text(RECIPE.format(file=CASES[case][0][-1].lower()))
    export(
        tmp_path / "run",
        tmp_path / "out",
        format="huggingface",
        recipe=str(tmp_path / "tiny.py"),
    )
    original, files = read_tensors(folder(case)), read_tensors(tmp_path / "out")
    missing = original.keys() - files.keys()
    assert all(name.endswith("num_batches_tracked") for name in missing)
    for name, array in files.items():
        assert array.tobytes() == original[name].tobytes(), name
    np.testing.assert_array_equal(
        their_logits(transformers, tmp_path / "out", case), want
    )
    names = CASES[case][0][0]
    assert keys == names.read_config(
        json.loads((tmp_path / "out" / "config.json").read_text())
    )
