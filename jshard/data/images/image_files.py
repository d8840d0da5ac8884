"""Images: decoded, cropped and flipped by Pillow, in the threads that make batches."""

import io
import math
import threading
from typing import Any

import numpy as np

from jshard.data.images.image_sources import FORMATS, EncodedImage, pillow
from jshard.system.errors import UserError, some_of, warn

_MODES = {1: "L", 3: "RGB"}
_DEEP = ("I", "I;16", "I;16B", "I;16L")  # 16 bits of grey
_GREY = ("1", "L", "LA")
# Parts of the image and ratios of width to height of random crops (Szegedy et al. 2015,
# arXiv:1409.4842, section 6), and how often one that does not fit is drawn again.
_AREA, _RATIO, _TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
# Evaluation crops this part of the short side: 224 of 256 pixels.
_CENTER = 224 / 256
# Variances and axes of ImageNet's colours (Krizhevsky et al. 2012, section 4.1).
_COLOR_STD = np.array([0.2175, 0.0188, 0.0045])
_COLOR_AXES = np.array(
    [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]]
)


class Decoder:
    """Decodes images, and counts those that do not decode.

    Args:
      channels: 3 for colour, 1 for grey.
      most_broken: The most different images that may fail; the next one ends the run.

    Raises:
      UserError: `channels` is another number, or Pillow is not installed.
    """

    def __init__(self, channels: int, most_broken: int):
        if channels not in _MODES:
            raise UserError(
                f"--config.model.channels={channels}: image files have 3 channels, or "
                "1 if grey"
            )
        self._image = pillow()
        self._channels = channels
        self._most_broken = most_broken
        self._broken: dict[str, str] = {}  # why, by name
        self._lock = threading.Lock()

    def decode(self, encoded: EncodedImage) -> Any:
        """Returns a Pillow image, or None for one that does not decode.

        Raises:
          UserError: Too many do not, or a colour image is to be grey.
        """
        from PIL import ImageOps

        try:
            image = self._image.open(io.BytesIO(encoded.data), formats=FORMATS)
            image.load()
            # Upright, as cameras mean it, who note how they were held (EXIF).
            image = _in_8_bits(ImageOps.exif_transpose(image))
        # Damaged data, and sizes that are attacks: each reader has errors of its own.
        except Exception as error:
            self._count(encoded.name, str(error))
            return None
        if self._channels == 1 and image.mode not in _GREY:
            raise UserError(
                f"{encoded.name} has colours ({image.mode}), and model.channels=1: set "
                "--config.model.channels=3, or make the images grey"
            )
        return image.convert(_MODES[self._channels])

    def _count(self, name: str, why: str) -> None:
        with self._lock:
            known = name in self._broken
            self._broken[name] = why
            count = len(self._broken)
            if count > self._most_broken:
                raise UserError(
                    f"{count} images do not decode, more than "
                    f"data.max_broken={self._most_broken}: "
                    f"{some_of(sorted(self._broken))}"
                )
        if not known:
            warn(
                f"{name} does not decode and is skipped ({why}): {count} of at most "
                f"{self._most_broken}"
            )


def _in_8_bits(image: Any) -> Any:
    """Returns an image in a mode whose conversion keeps its values.

    Pillow would make 16 bits white, as it clips them.

    Raises:
      ValueError: The values are floating-point numbers, of any range.
    """
    if image.mode in _DEEP:
        values = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255)
        return pillow().fromarray(values.astype(np.uint8))
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers")
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA")  # from which transparency can be dropped
    return image


def random_crop(image: Any, size: int, rng: np.random.Generator) -> np.ndarray:
    """Returns a random part of an image, perhaps mirrored, uint8 (size, size, C)."""
    width, height = image.size
    box = _center(width, height, 1.0)
    for _ in range(_TRIES):
        area = width * height * rng.uniform(_AREA[0], _AREA[1])
        ratio = math.exp(rng.uniform(math.log(_RATIO[0]), math.log(_RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.integers(width - w + 1), rng.integers(height - h + 1)
            box = (int(left), int(top), int(left) + w, int(top) + h)
            break
    pixels = _resize(image, size, box)
    return np.ascontiguousarray(pixels[:, ::-1]) if rng.random() < 0.5 else pixels


def center_crop(image: Any, size: int) -> np.ndarray:
    """Returns the middle of an image, uint8 (size, size, C)."""
    width, height = image.size
    return _resize(image, size, _center(width, height, _CENTER))


def shift_colors(
    pixels: np.ndarray, strength: float, rng: np.random.Generator
) -> np.ndarray:
    """Returns an image with its colours moved along ImageNet's principal axes."""
    shift = _COLOR_AXES @ (rng.normal(0, strength, 3) * _COLOR_STD) * 255
    return np.clip(np.rint(pixels + shift), 0, 255).astype(np.uint8)


def _center(width: int, height: int, part: float) -> tuple[float, ...]:
    side = min(width, height) * part
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _resize(image: Any, size: int, box: tuple[float, ...]) -> np.ndarray:
    # Pillow's resampling spans as many pixels as it shrinks: it is antialiased.
    resized = image.resize((size, size), pillow().Resampling.BILINEAR, box=box)
    pixels = np.asarray(resized)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]
