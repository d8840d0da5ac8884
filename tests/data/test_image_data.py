"""Folders and records of images: decoding, augmentation, and what can be wrong."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from jshard.data.batches import batches, eval_batches
from jshard.data.files.noting import noted
from jshard.data.images.image_data import image_data, mixup, noise, smooth_labels
from jshard.data.images.image_files import Decoder
from jshard.data.images.image_sources import (
    EncodedImage,
    find_images,
    write_records,
)
from jshard.system.errors import UserError

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")
features = pytest.importorskip("PIL.features")

OPTIONS: dict[str, Any] = {"size": 8, "channels": 3, "classes": 3, "seed": 0}
CLASSES = ("ant", "bee", "cat")


def picture(seed: int, mode: str = "RGB", kind: str = "PNG", side: int = 12) -> bytes:
    rng = np.random.default_rng(seed)
    shape = (side, side + 4) if mode == "L" else (side, side + 4, 3)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(file, kind)
    return file.getvalue()


def write_folder(folder: Path, per_class: int = 3, **options: Any) -> Path:
    for split in ("train", "val"):
        for label, name in enumerate(CLASSES):
            (folder / split / name).mkdir(parents=True)
            for i in range(per_class):
                seed = label * per_class + i + 100 * (split == "val")
                file = folder / split / name / f"{i}.png"
                file.write_bytes(picture(seed, **options))
    return folder


def test_what_pillow_decodes_is_read_and_the_rest_is_counted(tmp_path):
    folder = write_folder(tmp_path / "images", per_class=1)
    of_class = folder / "train" / "ant"
    kinds = {
        "pgm": "PPM",
        "JFIF": "JPEG",
        "tga": "TGA",
        "jpe": "JPEG",
        "jp2": "JPEG2000",
    }
    for end, kind in kinds.items():
        (of_class / f"a.{end}").write_bytes(picture(0, "L", kind))
    for name in ("a.txt", "b.txt", "noname", ".ipynb_checkpoints/0.png", "__x/0.png"):
        (of_class / name).parent.mkdir(exist_ok=True)
        (of_class / name).write_bytes(picture(0))
    other = tmp_path / "other"
    other.mkdir()
    (other / "linked.png").write_bytes(picture(0))
    (of_class / "more").symlink_to(other)
    with noted() as said:
        assert len(find_images(str(folder), "train", 3)) == 3 + len(kinds) + 1
    assert said == [
        f"{folder / 'train'}: 9 images in 3 classes; left out 2 of .txt, 1 of no "
        "suffix: images are AVIF, BMP, GIF, JPEG, JPEG2000, PNG, PPM, TGA, TIFF, WEBP"
    ]


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "images")


def rows(path: Any, split: str = "train", count: int = 12, **options: Any) -> Any:
    dataset = image_data(str(path), split, **OPTIONS | options)
    return [dataset[i] for i in range(count)]


def check_equal(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def test_a_folder_gives_pixels_targets_and_weights(folder):
    validation = image_data(str(folder), "validation", **OPTIONS)
    assert len(validation) == 9
    labels = [int(example["targets"].argmax()) for example in validation]
    assert labels == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for example in (validation[0], *rows(folder)):
        assert (example["image"].shape, example["image"].dtype) == ((8, 8, 3), np.uint8)
        assert example["targets"].sum() == example["weights"] == 1
    seen = {row["targets"].argmax() for row in rows(folder, count=9)}
    assert seen == {0, 1, 2}


def test_the_middle_of_an_image_is_not_shifted(tmp_path):
    pixels = np.zeros((16, 24), np.uint8)
    pixels[:, 12:] = 200
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / split / "a" / "x.png")
    (example,) = rows(tmp_path, "validation", 1, size=14, channels=1, classes=1)
    np.testing.assert_array_equal(example["image"][:, :7], 0)
    np.testing.assert_array_equal(example["image"][:, 7:], 200)


def test_an_example_depends_on_seed_and_number_alone(folder):
    want = rows(folder, mixup_alpha=0.4, color_shift=0.1)
    check_equal(rows(folder, mixup_alpha=0.4, color_shift=0.1)[::-1], want[::-1])
    dataset = image_data(
        str(folder), "train", **OPTIONS, mixup_alpha=0.4, color_shift=0.1
    )
    # As two processes, in any batch size, from the middle of the run.
    for batch_size, process_count in ((4, 1), (4, 2), (6, 2)):
        parts = []
        for index in range(process_count):
            read = batches(
                dataset, batch_size=batch_size, start_step=1,
                num_steps=12 // batch_size, process_index=index,
                process_count=process_count,
            )  # fmt: skip
            parts.append(list(read))
        got = [
            np.concatenate([p["image"] for p in step])
            for step in zip(*parts, strict=True)
        ]
        for step, images in enumerate(got, 1):
            part = want[step * batch_size : (step + 1) * batch_size]
            np.testing.assert_array_equal(images, [row["image"] for row in part])
    others = rows(folder, mixup_alpha=0.4, color_shift=0.1, seed=1)
    assert any(
        (a["image"] != b["image"]).any() for a, b in zip(want, others, strict=True)
    )


def test_records_hold_what_the_folder_holds(folder, tmp_path):
    write_records(str(folder), str(tmp_path / "records"), images_per_file=4)
    assert len(list((tmp_path / "records").glob("train-*-of-00003.array_record"))) == 3
    for split in ("train", "validation"):
        want = rows(folder, split, 9)
        check_equal(rows(tmp_path / "records", split, 9), want)


def test_grey_images_become_colour_but_not_the_other_way(tmp_path, folder):
    grey = write_folder(tmp_path / "grey", mode="L")
    image = rows(grey, "validation", 1)[0]["image"]
    np.testing.assert_array_equal(image[..., 0], image[..., 2])
    assert rows(grey, count=1, channels=1)[0]["image"].shape == (8, 8, 1)
    with pytest.raises(UserError, match=r"png has colours \(RGB\), and model.channels"):
        rows(folder, channels=1)
    with pytest.raises(UserError, match=r"model.channels=2: image files have 3"):
        rows(folder, channels=2)


def saved(image: Any, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def shown(data: bytes, channels: int = 3) -> np.ndarray:
    decoder = Decoder(channels, most_broken=0)
    return np.asarray(decoder.decode(EncodedImage(data, 0, "x")))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bits_of_grey_keep_their_range(kind):
    values = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    data = saved(Image.fromarray(values), kind)
    np.testing.assert_array_equal(shown(data, 1), values // 257)
    np.testing.assert_array_equal(shown(data)[..., 2], values // 257)


def test_images_stand_as_they_were_taken():
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, 8:] = 200
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    data = saved(Image.fromarray(pixels), "PNG", exif=exif)
    np.testing.assert_array_equal(shown(data), np.rot90(pixels, -1))


def test_other_kinds_of_colours_are_those_of_rgb():
    colors = Image.fromarray(np.full((8, 8, 3), (200, 100, 50), np.uint8))
    palette = saved(colors.quantize(4), "PNG", transparency=bytes(4))
    for data in (
        palette,
        saved(colors.quantize(4), "GIF"),
        saved(colors.convert("CMYK"), "JPEG", quality=95),
        saved(colors.convert("RGBA"), "PNG"),
    ):
        assert np.abs(shown(data).astype(int) - (200, 100, 50)).max() <= 3


def test_floating_point_pixels_do_not_decode():
    data = saved(Image.fromarray(np.ones((8, 8), np.float32)), "TIFF")
    with pytest.raises(UserError, match="1 images do not decode"):
        shown(data)


def test_hidden_folders_are_no_classes_and_empty_ones_are(folder):
    (folder / "train" / ".ipynb_checkpoints").mkdir()
    assert [row["targets"].argmax() for row in rows(folder, "validation", 9)][-1] == 2
    for split in ("train", "val"):
        (folder / split / "dog").mkdir()
    assert len(find_images(str(folder), "train", 4)) == 9


def test_more_devices_than_images_evaluate_each_once(tmp_path):
    path = write_folder(tmp_path / "few", per_class=1)
    dataset = image_data(str(path), "validation", **OPTIONS)
    ((rows, examples),) = eval_batches(dataset, batch_size=8, devices=8)
    assert (len(rows["image"]), examples) == (8, 3)


def damage(folder: Path, *names: str) -> None:
    for name in names:
        file = folder / name
        file.write_bytes(file.read_bytes()[:60])


def test_images_that_do_not_decode_are_replaced_and_do_not_count(folder):
    want = rows(folder, "validation", 9)
    damage(folder, "val/bee/1.png", "val/cat/2.png")
    dataset = image_data(str(folder), "validation", **OPTIONS, most_broken=2)
    with pytest.warns(UserWarning, match=r"png does not decode and is") as found:
        *got, again = [dataset[i] for i in (*range(9), 4)]
    check_equal([again], [got[4]])
    assert len(found) == 2  # each is told once
    assert "2 of at most 2" in str(found[1].message)
    assert [row["weights"] for row in got] == [1, 1, 1, 1, 0, 1, 1, 1, 0]
    np.testing.assert_array_equal(got[4]["image"], want[5]["image"])
    np.testing.assert_array_equal(got[8]["image"], want[0]["image"])
    check_equal([got[i] for i in (0, 3, 5)], [want[i] for i in (0, 3, 5)])
    read = eval_batches(dataset, batch_size=4)
    assert sum(rows["weights"].sum() for rows, _ in read) == 7


def forged(kind: str) -> bytes:
    """What is no image of the formats that are read, or a broken one."""
    if kind == "EPS":
        return b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nfail"
    if kind == "bomb":
        return b"P6 200000 200000 255\n" + bytes(99)
    if kind == "cut":
        return picture(0, kind="JPEG")[:-40]
    if kind == "AVIF":  # whose reader has an error of its own
        if not features.check("avif"):
            pytest.skip("this Pillow has no AVIF")
        return picture(0, kind="AVIF").replace(b"iloc", b"xloc")
    return picture(0, kind=kind)


@pytest.mark.parametrize("kind", ["EPS", "DDS", "ICO", "bomb", "cut", "AVIF"])
def test_what_is_no_image_that_is_read_is_left_out_whatever_its_name(kind, monkeypatch):
    def started(*args, **keywords):
        raise AssertionError("a program was started")

    monkeypatch.setattr("subprocess.check_call", started)
    monkeypatch.setattr("subprocess.Popen", started)
    decoder, image = Decoder(3, most_broken=1), forged(kind)
    with pytest.warns(UserWarning, match=r"^a\.jpg does not decode and is skipped"):
        assert decoder.decode(EncodedImage(image, 0, "a.jpg")) is None


@pytest.mark.filterwarnings("ignore:.*does not decode and is skipped")
def test_too_many_of_them_are_named(folder):
    damage(folder, "val/bee/1.png", "val/cat/0.png", "val/cat/2.png")
    with pytest.raises(UserError, match=r"3 images do not decode, more than .*=2") as e:
        rows(folder, "validation", 9, most_broken=2)
    for name in ("bee/1.png", "cat/0.png", "cat/2.png"):
        assert name in str(e.value)
    for file in folder.glob("val/*/*"):
        file.write_bytes(b"no image")
    with pytest.raises(UserError, match=r"no image of validation decodes"):
        rows(folder, "validation", 1)


def test_a_folder_that_cannot_be_used_is_one_line(folder, tmp_path):
    with pytest.raises(UserError, match=r"nowhere: is not a folder"):
        rows(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"has no train/ with a folder.*record$"):
        rows(tmp_path)
    (tmp_path / "train-0.tar").touch()
    with pytest.raises(UserError, match=r"; unpack its \.tar files, or stream them in"):
        rows(tmp_path)
    with pytest.raises(UserError, match=r"has 3 classes, and model.classes=2"):
        rows(folder, classes=2)
    (folder / "val" / "bee").rename(folder / "val" / "bear")
    for split in ("train", "validation"):
        with pytest.raises(UserError, match=r"bee of train missing|bear of validation"):
            rows(folder, split)
    for name in CLASSES:
        (tmp_path / "empty" / "train" / name).mkdir(parents=True)
    with pytest.raises(UserError, match=r"the train split has no images"):
        rows(tmp_path / "empty")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            (7).to_bytes(4, "little") + picture(0),
            r"label 7 is not in \[0, model.classes",
        ),
        (b"\xff" * 4 + picture(0), "label -1 is not in"),
        (b"abc", "record 0: has 3 bytes; an image is an int32 label"),
    ],
)
def test_a_record_that_is_no_labelled_image_is_one_line(tmp_path, record, message):
    writer = ArrayRecordWriter(str(tmp_path / "train.array_record"), "group_size:1")
    writer.write(record)
    writer.close()
    with pytest.raises(UserError, match=message):
        rows(tmp_path, count=1)


def test_mixup_mixes_pairs():
    examples = noise(4, 1, 3, 0)
    mixed = mixup(examples, 0.5, seed=1)
    assert mixup(examples, 0.0, seed=1) is examples
    for i in range(6):
        one, other, got = examples[i], examples[i ^ 1], mixed[i]
        part = np.random.default_rng((1, i // 2)).beta(0.5, 0.5)
        want = np.rint(part * one["image"] + (1 - part) * other["image"])
        np.testing.assert_array_equal(got["image"], want)
        assert got["image"].dtype == np.uint8
        want = part * one["targets"] + (1 - part) * other["targets"]
        np.testing.assert_allclose(got["targets"], want, rtol=1e-6)


def test_smoothed_labels_are_probabilities():
    np.testing.assert_allclose(
        smooth_labels(1, 4, 0.2), [0.05, 0.85, 0.05, 0.05], rtol=1e-6
    )


def test_a_source_reads_by_number(folder):
    source = find_images(str(folder), "train", 3)
    assert (source[4].label, Path(source[4].name).name) == (1, "1.png")
