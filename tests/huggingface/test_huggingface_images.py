"""The image classifiers and their maps against transformers: tiny random models."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_folders import (
    CLASSES,
    SIZE,
    Mapped,
    images,
    logits,
    randomize_all,
    write_again,
)

from foreign_weights import read_tensors
from jshard.models import regnet_huggingface, resnet_huggingface, vit_huggingface
from jshard.models.regnet import RegNet, RegNetConfig
from jshard.models.resnet import ResNet, ResNetConfig
from jshard.models.vit import ViT, ViTConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own
    pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit"),
]

STAGES = {"embedding_size": 8, "hidden_sizes": [16, 32, 48], "depths": [1, 3, 2]}
VIT = {
    "image_size": SIZE,
    "patch_size": 8,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
}
REGNET = Mapped(regnet_huggingface, RegNet, RegNetConfig)
RESNET = Mapped(resnet_huggingface, ResNet, ResNetConfig)
TRANSFORMER = Mapped(vit_huggingface, ViT, ViTConfig)
CASES: dict[str, tuple[Mapped, dict[str, Any]]] = {
    "regnet-y": (REGNET, {**STAGES, "groups_width": 8}),
    "regnet-x": (REGNET, {**STAGES, "groups_width": 16, "layer_type": "x"}),
    "regnet-grey": (REGNET, {**STAGES, "groups_width": 8, "num_channels": 1,
                             "downsample_in_first_stage": False}),
    "resnet": (RESNET, STAGES),
    "resnet-basic": (RESNET, {**STAGES, "layer_type": "basic",
                              "downsample_in_first_stage": True}),
    "vit": (TRANSFORMER, VIT),
    "vit-no-bias": (TRANSFORMER, {**VIT, "qkv_bias": False}),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(transformers, tmp_path_factory):
    """Writes a model's folder once."""

    @functools.cache
    def make(case: str) -> Path:
        path = tmp_path_factory.mktemp(case)
        mapped, options = CASES[case]
        name = mapped.model.__name__
        config = getattr(transformers, f"{name}Config")(**options, num_labels=CLASSES)
        model = getattr(transformers, f"{name}ForImageClassification")(config)
        randomize_all(model)
        model.save_pretrained(path)
        return path

    return make


def case_images(case: str) -> np.ndarray:
    return images(CASES[case][1].get("num_channels", 3))


def their_logits(transformers: Any, folder: Path, case: str) -> np.ndarray:
    torch = pytest.importorskip("torch")
    name = CASES[case][0].model.__name__
    kind = getattr(transformers, f"{name}ForImageClassification")
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    # A count that PyTorch uses without a momentum alone, and starts again from zero.
    info["missing_keys"] = {
        key for key in info["missing_keys"] if not key.endswith("num_batches_tracked")
    }
    assert not any(info.values()), info
    inputs = torch.tensor(case_images(case).transpose(0, 3, 1, 2))
    with torch.no_grad():
        return model.eval()(inputs).logits.numpy()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(transformers, folder, case):
    want = their_logits(transformers, folder(case), case)
    assert np.std(want) > 0.1
    for replica in (1, 2):
        got = logits(folder(case), CASES[case][0], replica, case_images(case))
        assert np.max(np.abs(got - want)) <= 1e-5 * np.max(np.abs(want))


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_loads_in_transformers(transformers, folder, case, tmp_path):
    want = their_logits(transformers, folder(case), case)
    out = write_again(folder(case), CASES[case][0], "huggingface", tmp_path)
    original, files = read_tensors(folder(case)), read_tensors(out)
    missing = original.keys() - files.keys()
    assert all(name.endswith("num_batches_tracked") for name in missing)
    for name, array in files.items():
        assert array.tobytes() == original[name].tobytes(), name
    np.testing.assert_array_equal(their_logits(transformers, out, case), want)
