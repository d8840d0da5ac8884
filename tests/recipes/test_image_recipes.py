"""The recipes of images: digits to its accuracy, ImageNet's in the small."""

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from jshard.recipe import contract as returns
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config
from jshard.system.errors import UserError
from tiny_runs import expect_one_line, read_metrics

SMALL_REGNET = (
    "--config.steps=2",
    "--config.batch_size=8",
    "--config.eval_every=2",
    "--config.checkpoint.every=0",
    "--config.model.stem=8",
    "--config.model.depths=1,2",
    "--config.model.widths=16,32",
    "--config.model.group_width=8",
    "--config.model.classes=3",
    "--config.data.image_size=16",
    "--config.mesh.cpu_devices=2",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "words", "accuracy", "most_wrong"),
    [
        ("regnet", ["--config.steps=100"], 0.94, 5),
        ("vit", ["--config.steps=400"], 0.93, 5),
    ],
    ids=["a quarter of regnet", "a third of vit"],
)
def test_digits_are_read_after_a_minute(
    command, tmp_path, model, words, accuracy, most_wrong
):
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    pytest.importorskip("PIL", reason="needs Pillow")
    words = command(tmp_path, f"--config=digits.py:{model}", "--workdir=run", *words)
    run = subprocess.run(timeout=600, **words)  # beside other work
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    last = [line for line in read_metrics(tmp_path / "run") if "eval_loss" in line][-1]
    assert last["eval_accuracy"] > accuracy
    assert last["eval_ema_accuracy"] > accuracy - 0.01
    pictures = json.loads((tmp_path / "run" / "notes.json").read_text())["pictures"]
    wrong = [one["caption"] for one in pictures if "not" in one["caption"]]
    assert len(pictures) == 40
    assert len(wrong) <= most_wrong
    report = (tmp_path / "run" / "report.html").read_text()
    assert report.count("data:image/png;base64,") == 40


def digits(**overrides: Any) -> Any:
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    with open_recipe(find_recipe("digits.py")) as recipe:
        config = make_config(recipe, overrides)
        return [recipe.make_data(config, split) for split in ("train", "validation")]


def test_the_splits_of_the_digits_are_apart():
    train, validation = digits(**{"data.shift": 0})
    assert len(validation) == 360
    epoch = [train[i] for i in range(0, 1437, 3)]
    seen = {row["image"].tobytes() for row in epoch}
    assert len(seen) > 460  # some images are there twice
    assert len(seen & {row["image"].tobytes() for row in validation}) < 5
    assert epoch[0]["image"].shape == (8, 8, 1)
    np.testing.assert_allclose(epoch[0]["targets"].max(), 0.91, rtol=1e-6)
    assert validation[0]["targets"].max() == 1
    moved, _ = digits(**{"data.mixup": 0.2})
    assert moved[3]["image"].dtype == np.float32


def test_without_scikit_learn_there_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with open_recipe(find_recipe("digits.py")) as recipe:
        config = make_config(recipe, {})
        with pytest.raises(UserError, match=r"pip install 'jshard\[vision\]'"):
            recipe.make_data(config, "train")


def test_an_unknown_model_is_one_line():
    known = r"digits.py:mlp: known are regnet, vit"
    with (
        open_recipe(find_recipe("digits.py:mlp")) as recipe,
        pytest.raises(UserError, match=known),
    ):
        recipe.get_config()


@pytest.mark.slow
def test_imagenets_recipe_trains_on_noise_and_on_folders(train, tmp_path):
    run = train(
        tmp_path, "--config=imagenet_regnet.py", *SMALL_REGNET, "--workdir=noise"
    )
    assert run.returncode == 0, run.stderr
    (line,) = [x for x in read_metrics(tmp_path / "noise") if "eval_loss" in x]
    assert line["eval_top5_accuracy"] == 1  # of three classes
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    for split in ("train", "val"):
        for name in ("ant", "bee", "cat"):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            for i in range(4):
                pixels = np.random.default_rng(i).integers(
                    0, 256, (20, 24, 3), np.uint8
                )
                file = tmp_path / "images" / split / name / f"{i}.jpg"
                image.fromarray(pixels).save(file)
    words = (*SMALL_REGNET, "--config.data.path=images", "--config.data.mixup=0.2")
    train_on = lambda *more: train(
        tmp_path, "--config=imagenet_regnet.py", *words, *more
    )
    (tmp_path / "images" / "train" / "ant" / "about.txt").touch()
    run = train_on("--workdir=run")
    assert run.returncode == 0, run.stderr
    note = "images/train: 12 images in 3 classes; left out 1 of .txt: images are "
    assert note in run.stdout
    file = tmp_path / "images" / "val" / "bee" / "1.jpg"
    file.write_bytes(b"no image")
    run = train_on("--workdir=one")
    assert run.returncode == 0, run.stderr
    assert "bee/1.jpg does not decode and is skipped" in run.stderr
    run = train_on("--workdir=none", "--config.data.max_broken=0")
    expect_one_line(run, 2, "more than data.max_broken=0: images/val/bee/1.jpg")


@pytest.mark.parametrize(
    "found",
    [
        7,
        (len, {"image": np.zeros((1, 2, 2, 1))}),
        (len, {"x": 1}, str),
        (7, {"image": np.zeros((1, 2, 2, 1))}, str),
    ],
)
def test_what_sample_images_returns_is_checked(found):
    with pytest.raises(UserError, match=r"sample_images\(config\)"):
        returns.sample_images(lambda config: found, {})  # pyright: ignore[reportArgumentType]
