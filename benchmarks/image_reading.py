"""Images a second that are decoded and cropped, beside PyTorch's DataLoader.

    python benchmarks/image_reading.py --workers=2

Writes JPEGs of 500 x 375 pixels, reads them as train/imagenet_regnet.py does (random
crops of 224 x 224, mirrored half of the time), and, where torchvision is installed, by
its ImageFolder, RandomResizedCrop and RandomHorizontalFlip. jshard's workers are
threads, PyTorch's processes. Both take turns; the best of three counts.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jshard.data.batches import batches
from jshard.data.images.image_data import image_data

_IMAGES, _CLASSES, _BATCH, _SIZE = 512, 4, 64, 224
_WARM, _TIMED, _ROUNDS = 2, 12, 3  # batches, and turns


def write_images(folder: Path, width: int, height: int) -> float:
    """Writes smooth noise, as photographs are; returns the mean size of a file, KB."""
    rng, sizes = np.random.default_rng(0), []
    for i in range(_IMAGES):
        coarse = rng.integers(0, 256, (height // 8, width // 8, 3), np.uint8)
        fine = rng.integers(0, 24, (height, width, 3), np.uint8)
        image = Image.fromarray(coarse).resize(
            (width, height), Image.Resampling.BICUBIC
        )
        pixels = np.clip(np.asarray(image).astype(int) + fine, 0, 255).astype(np.uint8)
        file = folder / "train" / str(i % _CLASSES) / f"{i}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file, quality=85)
        sizes.append(file.stat().st_size)
    return sum(sizes) / len(sizes) / 1000


def read_by_jshard(folder: Path, workers: int) -> Iterator[Any]:
    dataset = image_data(
        str(folder), "train", size=_SIZE, channels=3, classes=_CLASSES, seed=0
    )
    return batches(
        dataset, batch_size=_BATCH, start_step=0, num_steps=_WARM + _TIMED,
        num_threads=workers,
    )  # fmt: skip


def read_by_torch(folder: Path, workers: int) -> Iterator[Any]:
    import torch
    from torchvision import datasets, transforms

    augment = transforms.Compose(
        [
            transforms.RandomResizedCrop(_SIZE),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),
        ]
    )
    dataset = datasets.ImageFolder(str(folder / "train"), augment)
    sampler = torch.utils.data.RandomSampler(
        dataset, replacement=True, num_samples=_BATCH * (_WARM + _TIMED)
    )
    return iter(
        torch.utils.data.DataLoader(
            dataset, _BATCH, sampler=sampler, num_workers=workers
        )
    )


def images_per_second(found: Iterator[Any]) -> float:
    for _ in islice(found, _WARM):
        pass
    start = time.perf_counter()
    count = sum(1 for _ in found)
    return count * _BATCH / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--width", type=int, default=500)
    parser.add_argument("--height", type=int, default=375)
    arguments = parser.parse_args()
    readers = {"jshard": read_by_jshard}
    try:
        import torchvision  # noqa: F401

        readers["torchvision"] = read_by_torch
    except ImportError:
        pass
    best = dict.fromkeys(readers, 0.0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_images(folder, arguments.width, arguments.height)
        for _ in range(_ROUNDS):
            for reader, read in readers.items():
                speed = images_per_second(read(folder, arguments.workers))
                best[reader] = max(best[reader], speed)
    print(f"{arguments.width} x {arguments.height}, {size:.0f} KB a file")
    for reader, speed in best.items():
        each = speed / arguments.workers
        print(f"{reader:12} {speed:6.0f} images/s, {each:.0f} a worker")


if __name__ == "__main__":
    main()
