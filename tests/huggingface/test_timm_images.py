"""The image classifiers and their maps against timm: small random models."""

import functools
import json
import warnings
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

import jshard
from foreign_weights import read_tensors
from jshard.models import regnet_timm, resnet_timm, vit_timm
from jshard.models.regnet import RegNet, RegNetConfig
from jshard.models.resnet import ResNet, ResNetConfig
from jshard.models.vit import ViT, ViTConfig
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config
from jshard.storage.hub import exported_tensors as exported
from jshard.storage.hub.file_tensor import FileTensor

REGNET = Mapped(regnet_timm, RegNet, RegNetConfig)
RESNET = Mapped(resnet_timm, ResNet, ResNetConfig)
TRANSFORMER = Mapped(vit_timm, ViT, ViTConfig)
SMALL = {"img_size": SIZE, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3}
CASES: dict[str, tuple[Mapped, str, dict[str, Any]]] = {
    "regnet-y": (REGNET, "regnety_002", {}),
    "regnet-x": (REGNET, "regnetx_002", {"in_chans": 1}),
    "resnet": (RESNET, "resnet26", {}),
    "resnet-basic": (RESNET, "resnet18", {}),
    "vit": (TRANSFORMER, "vit_base_patch16_224", SMALL),
    "vit-no-bias": (TRANSFORMER, "deit_tiny_patch16_224",
                    {**SMALL, "qkv_bias": False, "mlp_ratio": 2.0}),
}  # fmt: skip
slow = pytest.mark.slow
quiet = pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit")


@pytest.fixture(scope="module")
def timm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torch")
        yield pytest.importorskip("timm", reason="needs timm")


@pytest.fixture(scope="module")
def folder(timm, tmp_path_factory):
    """Writes a model's folder once, as timm's hub has it."""

    @functools.cache
    def make(case: str) -> Path:
        path = tmp_path_factory.mktemp(case)
        _, name, arguments = CASES[case]
        given = {**arguments, "num_classes": CLASSES}
        model = timm.create_model(name, **given)
        randomize_all(model)
        timm.models.save_for_hf(model, path, model_args=given, safe_serialization=True)
        return path

    return make


def case_images(case: str) -> np.ndarray:
    return images(CASES[case][2].get("in_chans", 3))


def their_logits(timm: Any, folder: Path, case: str) -> np.ndarray:
    torch = pytest.importorskip("torch")
    # A new model may not be given these weights without notice.
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    stored = read_tensors(folder)
    for name, value in model.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            np.testing.assert_array_equal(value.numpy(), stored[name])
    with torch.no_grad():
        inputs = torch.tensor(case_images(case).transpose(0, 3, 1, 2))
        return model.eval()(inputs).numpy()


@slow
@quiet
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_timm(timm, folder, case):
    want = their_logits(timm, folder(case), case)
    assert np.std(want) > 0.1
    for replica in (1, 2):
        got = logits(folder(case), CASES[case][0], replica, case_images(case))
        assert np.max(np.abs(got - want)) <= 1e-5 * np.max(np.abs(want))


@slow
@quiet
@pytest.mark.parametrize("case", CASES)
def test_what_is_written_loads_in_timm(timm, folder, case, tmp_path):
    want = their_logits(timm, folder(case), case)
    out = write_again(folder(case), CASES[case][0], "timm", tmp_path)
    original, files = read_tensors(folder(case)), read_tensors(out)
    missing = original.keys() - files.keys()
    assert all(name.endswith("num_batches_tracked") for name in missing)
    for name, array in files.items():
        assert array.tobytes() == original[name].tobytes(), name
    np.testing.assert_array_equal(their_logits(timm, out, case), want)


@slow
def test_sizes_of_names_are_those_of_timm(timm):
    torch = pytest.importorskip("torch")
    for names in (regnet_timm._PARAMETERS, resnet_timm._SHAPES):
        for name in names:
            with torch.device("meta"):
                theirs = timm.create_model(name).state_dict()
            mapped = REGNET if name in regnet_timm._PARAMETERS else RESNET
            keys = mapped.map.read_config({"architecture": name})
            assert mapped.map.read_config(mapped.map.write_config(keys)) == keys
            shapes = {x: v.shape for x, v in theirs.items() if "num_batches" not in x}
            ours = {t.names[0] for t in mapped.map.tensors(keys).values()}
            assert ours == shapes.keys()
            for i, (depth, width) in enumerate(
                zip(keys["depths"], keys["widths"], strict=True)
            ):
                stage = f"s{i + 1}.b{depth}" if mapped is REGNET else f"layer{i + 1}.0"
                last = "conv3.conv" if mapped is REGNET else "conv2"
                if mapped is RESNET and keys["bottleneck"]:
                    last = "conv3"
                assert shapes[f"{stage}.{last}.weight"][0] == width
            if mapped is REGNET:
                inner = shapes["s4.b1.conv2.conv.weight"][1]
                width = keys["widths"][-1]
                assert inner == width // RegNetConfig(**keys).groups(width)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"architecture": "regnetz_040"}, "regnetz_040 is not supported; those are"),
        ({"architecture": "regnety_160", "model_args": {"output_stride": 16}},
         "output_stride=16 of timm's regnety_160 is not supported"),
    ],
)  # fmt: skip
def test_other_architectures_are_one_line(tmp_path, content, message):
    (tmp_path / "config.json").write_text(json.dumps(content))
    with (
        open_recipe(find_recipe("imagenet_regnet.py")) as recipe,
        pytest.raises(jshard.UserError, match=message),
    ):
        make_config(recipe, {"model.from": str(tmp_path)})


def test_a_recipe_without_a_map_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"architecture": "resnet50"}')
    with (
        open_recipe(find_recipe("gpt.py")) as recipe,
        pytest.raises(jshard.UserError, match="recipe gpt has no map of timm's names"),
    ):
        make_config(recipe, {"model.from": str(tmp_path)})


def test_the_imagenet_recipe_takes_a_folder_of_timm(tmp_path):
    content = {"architecture": "regnety_032", "num_classes": 7}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with open_recipe(find_recipe("imagenet_regnet.py")) as recipe:
        model = make_config(recipe, {"model.from": str(tmp_path)}).model
    assert (model.classes, model.group_width, model.stem) == (7, 24, 32)
    assert tuple(model.depths) == (2, 5, 13, 1)
    assert tuple(model.widths) == (72, 216, 576, 1512)


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (resnet_timm, {"architecture": "resnet50d"}, "those are resnet18, resnet34"),
        (vit_timm, {"architecture": "vit_base_patch16_clip_224"}, "is not supported"),
        (vit_timm, {"architecture": "vit_base_patch16_224", "global_pool": "avg"},
         "global_pool='avg' of timm's vit_base_patch16_224"),
        (vit_timm, {"architecture": "vit_base_patch16_224",
                    "model_args": {"img_size": [224, 256]}}, "both sides must be"),
    ],
)  # fmt: skip
def test_what_a_map_does_not_know_is_one_line(read, content, message):
    with pytest.raises(jshard.UserError, match=message):
        read.read_config(content)


def test_models_that_timm_has_not_are_one_line():
    model = {**regnet_timm.read_config({"architecture": "regnety_002"}), "stem": 16}
    with pytest.raises(jshard.UserError, match=r"timm has no RegNet of these model.\*"):
        regnet_timm.write_config(model)
    model = vit_timm.read_config({"architecture": "vit_huge_patch14_224"})
    assert vit_timm.read_config(vit_timm.write_config(model)) == model
    with pytest.raises(jshard.UserError, match="norm_eps=1e-12 is not possible"):
        vit_timm.write_config({**model, "norm_eps": 1e-12})


def test_parts_of_a_tensor_are_written_in_their_order():
    whole = np.arange(6 * 2, dtype=np.float32).reshape(6, 2)
    places = [FileTensor(("qkv",), transposed=True, part=(i, 3)) for i in (1, 0, 2)]
    assert places[0].shape_in_file((2, 2)) == whole.shape
    tensors, values = {}, {}
    for place in places:
        number, _ = place.part
        name, part = f"qkv{number}", place.from_file(whole)
        tensors[name] = exported.Tensor(
            "qkv", name, (), place, np.dtype("float32"), part.nbytes
        )
        values[name] = part.transpose(place.axes(2))
    assert exported.sizes(tensors) == {"qkv": whole.nbytes}
    np.testing.assert_array_equal(exported._joined(tensors, values)["qkv"], whole)
