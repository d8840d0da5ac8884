"""Examples of images: pixels, targets and a weight."""

import functools
import sys
from typing import Any

import grain
import numpy as np

from jshard.data.images.image_files import (
    Decoder,
    center_crop,
    random_crop,
    shift_colors,
)
from jshard.data.images.image_sources import find_images
from jshard.system.errors import UserError

_KEPT = 256  # examples that wait for their partner in mixup, of all threads


def image_data(
    path: str,
    split: str,
    *,
    size: int,
    channels: int,
    classes: int,
    seed: int,
    label_smoothing: float = 0.0,
    mixup_alpha: float = 0.0,
    color_shift: float = 0.0,
    most_broken: int = 100,
) -> grain.MapDataset:
    """Returns the images at `path` with their labels.

    An example of the training split is a random part of an image, perhaps mirrored. It
    depends on the seed and its number in the run alone, whatever reads it. In the
    validation split it is the middle of the image. An image that does not decode is
    counted, and the next one that does takes its place with a weight of zero.

    Args:
      path: A folder, as for `find_images`.
      split: "train", which repeats forever in a new order each epoch, or "validation",
        which is finite and in order.
      size: Height and width of the examples.
      channels: 3 for colour, 1 for grey.
      classes: The number of labels.
      seed: Determines the order and the random parts.
      label_smoothing: Part of the targets that goes to all classes; see
        `smooth_labels`.
      mixup_alpha: See `mixup`; 0 is none.
      color_shift: Standard deviation of random changes of the colours, 0.1 in
        Krizhevsky et al. 2012; 0 is none.
      most_broken: How many of the images that a process reads may fail to decode.

    Returns:
      A dataset of {"image": uint8[size, size, channels], "targets": float32[classes],
      "weights": float32[]}.

    Raises:
      UserError: There are no such images; when one is read, too many do not decode, or
        its label is out of range.
    """
    source = find_images(path, split, classes)
    decoder = Decoder(channels, most_broken)
    if color_shift and channels != 3:
        raise UserError(f"data.color_shift={color_shift} needs model.channels=3")

    def read(index: int) -> tuple[Any, int, float]:
        for offset in range(len(source)):
            encoded = source[(index + offset) % len(source)]
            if not 0 <= encoded.label < classes:
                raise UserError(
                    f"{encoded.name}: label {encoded.label} is not in [0, "
                    f"model.classes={classes})"
                )
            image = decoder.decode(encoded)
            if image is not None:
                return image, encoded.label, float(offset == 0)
        raise UserError(f"--config.data.path={path}: no image of {split} decodes")

    def example(index: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
        image, label, weight = read(index)
        smoothing = 0.0
        if rng is None:
            pixels = center_crop(image, size)
        else:
            smoothing, pixels = label_smoothing, random_crop(image, size, rng)
            if color_shift:
                pixels = shift_colors(pixels, color_shift, rng)
        targets = smooth_labels(label, classes, smoothing)
        return {"image": pixels, "targets": targets, "weights": np.float32(weight)}

    numbers = grain.MapDataset.range(len(source))
    if split == "validation":
        return numbers.map(example)
    shuffled = numbers.seed(seed).shuffle().repeat()
    return mixup(shuffled.random_map(example), mixup_alpha, seed)


def smooth_labels(label: int, classes: int, smoothing: float = 0.0) -> np.ndarray:
    """Returns the targets of a label, float32[classes].

    The label has 1 - smoothing, and smoothing is shared out over all classes (Szegedy
    et al. 2015, arXiv:1512.00567, section 7).
    """
    targets = np.full(classes, smoothing / classes, np.float32)
    targets[label] += 1 - smoothing
    return targets


def mixup(examples: grain.MapDataset, alpha: float, seed: int) -> grain.MapDataset:
    """Mixes neighbours, pixels and targets (Zhang et al. 2018, arXiv:1710.09412).

    Example i becomes x times itself plus 1 - x times its partner, i + 1 or i - 1, with
    x from Beta(alpha, alpha) by the seed and the pair's number: it depends neither on
    the batch nor on the mesh.

    Args:
      examples: Of {"image": ..., "targets": ..., ...}.
      alpha: Of the distribution; 0 mixes nothing.
      seed: Determines the parts.
    """
    return _Mixed(examples, alpha, seed) if alpha else examples


class _Mixed(grain.MapDataset):
    """What `mixup` returns, a transformation that keeps the number of examples."""

    def __init__(self, examples: grain.MapDataset, alpha: float, seed: int):
        super().__init__(examples)
        self._alpha, self._seed = alpha, seed
        # The partner is the next example of the same batch.
        self._read = functools.lru_cache(_KEPT)(lambda index: examples[index])
        endless = len(examples) == sys.maxsize
        self._length = len(examples) if endless else len(examples) // 2 * 2

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        one, other = self._read(index), self._read(index ^ 1)
        rng = np.random.default_rng((self._seed, index >> 1))
        part = rng.beta(self._alpha, self._alpha)

        def mix(name: str) -> np.ndarray:
            values = part * one[name] + (1 - part) * other[name]
            kind = one[name].dtype
            values = np.rint(values) if kind.kind in "iu" else values
            return values.astype(kind)

        return {**one, "image": mix("image"), "targets": mix("targets")}


def noise(size: int, channels: int, classes: int, seed: int) -> grain.MapDataset:
    """Returns random images, for plans and for timings without data."""

    def example(index: int) -> dict[str, Any]:
        rng = np.random.default_rng((seed, index % _KEPT))
        pixels = rng.integers(0, 256, (size, size, channels), np.uint8)
        targets = smooth_labels(int(rng.integers(classes)), classes)
        return {"image": pixels, "targets": targets, "weights": np.float32(1)}

    return grain.MapDataset.range(_KEPT).map(example)
