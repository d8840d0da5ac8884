"""Where encoded images with labels lie: folders with or without tables, and records.

A record is the label, a little-endian int32, and then the bytes of an image file.
"""

import dataclasses
import functools
import itertools
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain
from array_record.python.array_record_module import ArrayRecordWriter

from jshard.data.files.noting import note
from jshard.data.files.walk import files_of, reading
from jshard.data.images.image_tables import class_names, count_unnamed, labels_of_splits
from jshard.storage.hub.online.download import data_path
from jshard.system.cli.paths import check_path
from jshard.system.errors import UserError, some_of

# Of photographs and drawings. Pillow knows more, of which some start programs (EPS),
# and some crash on damaged files (DDS).
FORMATS = (
    "AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TGA", "TIFF", "WEBP",
)  # fmt: skip
RECORDS = ".array_record"
_SPLITS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev")}
_LABEL = struct.Struct("<i")


def pillow() -> Any:
    """Returns `PIL.Image`; a UserError if it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError(
            f"images need Pillow ({error}): pip install 'jshard[vision]'"
        ) from error
    return Image


@functools.cache
def suffixes() -> tuple[str, ...]:
    """Returns the ends of the names of files in formats that the Pillow here reads."""
    image = pillow()
    image.init()
    known = {*FORMATS, "MPO"} & {*image.OPEN, "MPO"}  # MPO is opened as JPEG
    return tuple(
        x for x, kind in image.registered_extensions().items() if kind in known
    )


class EncodedImage(NamedTuple):
    """An image as it is stored."""

    data: bytes  # the content of an image file
    label: int  # its class
    name: str  # where it is, for messages


@dataclasses.dataclass(frozen=True)
class ImageFolder:
    """Images in files with labels.

    Attributes:
      files: Their paths.
      labels: The class of each.
      classes: The names of the classes; a label is a place in them.
    """

    files: list[str]
    labels: list[int]
    classes: list[str]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> EncodedImage:
        """Reads an image."""
        file = self.files[index]
        try:
            return EncodedImage(Path(file).read_bytes(), self.labels[index], file)
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from error


class ImageRecords:
    """Images in array records, in the order of the files' names."""

    def __init__(self, files: Sequence[Path]):
        self._files = files
        self._records = grain.sources.ArrayRecordDataSource(list(map(str, files)))

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> EncodedImage:
        """Reads an image."""
        record, name = self._records[index], f"{self._files[0].parent}, record {index}"
        if len(record) <= _LABEL.size:
            raise UserError(
                f"{name}: has {len(record)} bytes; an image is an int32 label and the "
                "bytes of an image file (write_records makes such files)"
            )
        (label,) = _LABEL.unpack_from(record)
        return EncodedImage(record[_LABEL.size :], label, name)


def find_images(path: str, split: str, classes: int) -> ImageFolder | ImageRecords:
    """Finds the images of a split.

    `path` is a folder with one of:

    - `train/CLASS/...` and `validation/CLASS/...` (or `val`, `valid`, `dev`), with the
      same classes, which are labelled in sorted order;
    - images in such folders of splits, and `metadata.csv`, `metadata.jsonl`,
      `metadata.parquet` or `labels.csv` in each, or one beside them. Its columns
      `file_name` (or `file`, `filename`, `image`) and `label` (or `class`) are the path
      of an image below the table's folder, and the class: whole numbers, counted from
      0, or names, whose sorted order it is;
    - `train*.array_record` and `validation*.array_record` (or `val*`, `valid*`).

    Args:
      path: The folder, or its URL in a bucket.
      split: "train" or "validation".
      classes: The most classes that there may be.

    Raises:
      UserError: There are no images, the splits have different classes, or there are
        too many.
    """
    check_path("--config.data.path", path, bucket=True)
    folder = data_path(path)
    if not folder.is_dir():
        raise UserError(f"--config.data.path={path}: is not a folder")
    if records := _records(folder, split):
        source: ImageFolder | ImageRecords = ImageRecords(records)
    else:
        found = _in_files(folder, split)
        if found is None:
            wanted = " or ".join(f"{name}/" for name in _SPLITS[split])
            hint = (
                "; unpack its .tar files, or stream them in a recipe whose make_data "
                "returns an IterableDataset of Hugging Face"
            )
            raise UserError(
                f"--config.data.path={path}: has no {wanted} with a folder for each "
                "class or with a metadata.csv (columns file_name and label), and no "
                f"{_SPLITS[split][0]}*{RECORDS}" + hint * any(folder.glob("*.tar"))
            )
        source = found
        if len(source.classes) > classes:
            raise UserError(
                f"{folder}: {split} has {len(source.classes)} classes, and model."
                f"classes={classes}: set --config.model.classes={len(source.classes)}"
            )
    if not len(source):
        raise UserError(f"--config.data.path={path}: the {split} split has no images")
    return source


def write_records(path: str, output: str, images_per_file: int = 10_000) -> None:
    """Writes the splits of a folder of images as array records.

    Args:
      path: As for `find_images`.
      output: The folder to write to.
      images_per_file: The most images of a file.
    """
    check_path("output", output)
    target = Path(output).expanduser()
    target.mkdir(parents=True, exist_ok=True)
    for split in _SPLITS:
        images = _in_files(Path(path).expanduser(), split)
        if images is None:
            continue
        count = -(-len(images) // images_per_file)
        for number in range(count):
            name = f"{split}-{number:05d}-of-{count:05d}{RECORDS}"
            # Groups of one record, as images are read in any order.
            writer = ArrayRecordWriter(str(target / name), "group_size:1")
            first = number * images_per_file
            for i in range(first, min(first + images_per_file, len(images))):
                writer.write(_LABEL.pack(images[i].label) + images[i].data)
            writer.close()


def _records(folder: Path, split: str) -> list[Path]:
    for name in _SPLITS[split]:
        if found := sorted(folder.glob(f"{name}*{RECORDS}")):
            return found
    return []


def _in_files(root: Path, split: str) -> ImageFolder | None:
    """Returns the images of a split's folder, if there is one."""
    folders = {}
    for name, of_split in _SPLITS.items():
        candidates = [root / folder for folder in of_split]
        if found := next((x for x in candidates if x.is_dir()), None):
            folders[name] = found
    if split not in folders:
        return None
    if labels := labels_of_splits(root, folders):
        return _labelled_by_table(folders[split], labels[split], class_names(labels))
    _check_classes(root, {name: _class_names(x) for name, x in folders.items()})
    return _labelled_by_folder(folders[split])


def _labelled_by_table(
    folder: Path, labels: Mapping[str, str], classes: list[str]
) -> ImageFolder:
    text = f"{folder}: {len(labels):,} images in {len(classes)} classes, by a table"
    if count := count_unnamed(folder, labels, suffixes()):
        text += f"; left out {count:,} that it does not name"
    note(text)
    files, places = sorted(labels), {name: i for i, name in enumerate(classes)}
    return ImageFolder(files, [places[labels[file]] for file in files], classes)


def _labelled_by_folder(folder: Path) -> ImageFolder:
    """Labels images in folders that are named like their classes, in sorted order."""
    images = ImageFolder([], [], _class_names(folder))
    left_out: Counter[str] = Counter()
    for label, name in enumerate(images.classes):
        with reading(folder / name):
            found = sorted(files_of(folder / name))
        files = [file for file in found if file.lower().endswith(suffixes())]
        others = [file for file in found if not file.lower().endswith(suffixes())]
        left_out.update(Path(file).suffix.lower() or "no suffix" for file in others)
        images.files.extend(files)
        images.labels.extend([label] * len(files))
    text = f"{folder}: {len(images):,} images in {len(images.classes)} classes"
    if left_out:
        kinds = [f"{count:,} of {kind}" for kind, count in left_out.most_common()]
        read = ", ".join(FORMATS)
        text += f"; left out {some_of(kinds)}: images are {read}"
    note(text)
    return images


def _class_names(folder: Path) -> list[str]:
    """Returns the names of the folders that are not hidden, as tools leave some."""
    names = (entry.name for entry in folder.iterdir() if entry.is_dir())
    return sorted(name for name in names if not name.startswith((".", "__")))


def _check_classes(folder: Path, classes: Mapping[str, Sequence[str]]) -> None:
    """Raises a UserError if the splits have different classes."""
    for has, lacks in itertools.permutations(classes, 2):
        if names := sorted({*classes[has]} - {*classes[lacks]}):
            raise UserError(
                f"--config.data.path={folder}: the splits have different classes: "
                f"{some_of(names)} of {has} missing in {lacks}, so that labels would "
                "not mean the same"
            )
