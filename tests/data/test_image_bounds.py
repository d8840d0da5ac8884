"""Random parts, colours and records of images: their published numbers."""

from typing import Any

import numpy as np
import pytest

from jshard.data.images.image_files import center_crop, random_crop, shift_colors
from jshard.data.images.image_sources import find_images, write_records

# Images.


def picture(*shape: int) -> Any:
    Image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    rows, columns = np.indices(shape)
    pixels = np.stack([columns, rows, 0 * rows], -1).astype(np.uint8)
    return Image.fromarray(pixels)


def test_the_middle_is_7_8_of_the_short_side():
    pixels = center_crop(picture(160, 240), 140).astype(int)
    assert (pixels[0, 0, 0], pixels[0, -1, 0]) == (50, 189)
    assert (pixels[0, 0, 1], pixels[-1, 0, 1]) == (10, 149)


def test_random_parts_have_areas_ratios_and_places_as_published():
    image, rng = picture(200, 240), np.random.default_rng(0)
    areas, ratios, left, top, mirrored = [], [], [], [], 0
    for _ in range(300):
        pixels = random_crop(image, 16, rng).astype(int)
        across, down = (pixels[8, :, 0], pixels[:, 8, 1])
        mirrored += across[0] > across[-1]
        across = np.sort(across)
        width, height = ((x[-1] - x[0]) * 16 / 15 for x in (across, down))
        areas.append(width * height / (200 * 240))
        ratios.append(width / height)
        left.append(across[0])
        top.append(down[0])
    assert 0.06 < min(areas) < 0.12
    assert max(areas) > 0.85
    assert 0.45 < np.mean(areas) < 0.55
    assert 0.7 < min(ratios) < 0.8
    assert 1.25 < max(ratios) < 1.4
    assert 0.95 < np.median(ratios) < 1.05
    assert min(left) < 10
    assert min(top) < 10
    assert max(left) > 120
    assert max(top) > 100
    assert 120 < mirrored < 180


def test_a_part_that_never_fits_is_the_middle():
    pixels = random_crop(picture(8, 240), 8, np.random.default_rng(3))
    across = np.sort(pixels[4, :, 0].astype(int))
    assert across[-1] - across[0] <= 12


def test_colours_move_along_the_axes_by_their_variances():
    grey, rng = np.full((1, 1, 3), 128, np.uint8), np.random.default_rng(0)
    draws = [
        shift_colors(grey, 0.1, rng)[0, 0].astype(float) - 128 for _ in range(2000)
    ]
    std = np.array([0.2175, 0.0188, 0.0045])
    axes = np.array(
        [
            [-0.5675, 0.7192, 0.4009],
            [-0.5808, -0.0045, -0.8140],
            [-0.5836, -0.6948, 0.4203],
        ]
    )
    want = (axes * (0.1 * std * 255) ** 2) @ axes.T
    np.testing.assert_allclose(np.cov(np.transpose(draws)), want, atol=0.9)
    np.testing.assert_allclose(np.mean(draws, 0), 0, atol=0.3)
    white = np.full((1, 1, 3), 255, np.uint8)
    shifted = [shift_colors(white, 0.5, rng) for _ in range(20)]
    assert max(x.max() for x in shifted) == 255
    assert min(x.min() for x in shifted) > 100


def test_records_are_full_but_the_last_file(tmp_path):
    image = picture(4, 4)
    folder = tmp_path / "images" / "train" / "a"
    folder.mkdir(parents=True)
    for i in range(4):
        image.save(folder / f"{i}.png")
    (folder / ".hidden.png").write_bytes(b"")
    for each, files in ((2, 2), (3, 2), (4, 1)):
        output = tmp_path / "deep" / str(each)
        for _ in range(2):  # a folder that is there, too
            write_records(str(folder.parents[1]), str(output), each)
        assert len(list(output.iterdir())) == files
        assert len(find_images(str(output), "train", 1)) == 4
