"""Tables that label images, as Hugging Face's `datasets` has them beside the files."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jshard.data.files.noting import note
from jshard.data.files.walk import files_of, reading
from jshard.data.text.records import cut, read_records
from jshard.system.errors import UserError, some_of
from jshard.system.files.untrusted import path_inside

TABLES = ("metadata.csv", "metadata.jsonl", "metadata.parquet", "labels.csv")
_COLUMNS = {
    "file": ("file_name", "file", "filename", "image"),
    "label": ("label", "class"),
}
_BYTES = 2**24  # of a table that are read at a time
_MOST_CLASSES = 10**6
_NUMBER = re.compile("0|-?[1-9][0-9]*", re.ASCII)


def labels_of_splits(
    root: Path, folders: Mapping[str, Path]
) -> dict[str, dict[str, str]] | None:
    """Returns the labels of image files, by split and path; None if no table has them.

    A table is in the folder of its split, or in `root` for all. It names files by their
    paths below its own folder.

    Args:
      root: The folder of the data.
      folders: The folder of each split, below `root`.

    Raises:
      UserError: A table cannot be read, or names what is no image in the folder; a
        split has several tables, or none while the other has one.
    """
    tables = {split: _table(root, folder) for split, folder in folders.items()}
    read = {table: _read(table) for table in tables.values() if table}
    if not read:
        return None
    labels = {}
    for split, folder in folders.items():
        if (table := tables[split]) is None:
            raise UserError(
                f"{folder}: has no table of labels, and the other split has "
                f"{next(iter(read))}; write one for both, or one in {root}"
            )
        below = f"{folder}{os.sep}"
        labels[split] = {x: y for x, y in read[table].items() if x.startswith(below)}
        if not labels[split]:
            raise UserError(f"{table}: names no file in {folder.name}/")
    if rest := sum(map(len, read.values())) - sum(map(len, labels.values())):
        names = " and ".join(f"{folder.name}/" for folder in folders.values())
        note(f"{root}: its table labels {rest:,} files that are not in {names}")
    return labels


def class_names(labels: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Returns the classes that labels of splits name, in sorted order.

    Labels that are all whole numbers are the classes' places themselves.

    Raises:
      UserError: One is negative, or a million or more.
    """
    names = {label for of_split in labels.values() for label in of_split.values()}
    if not all(map(_NUMBER.fullmatch, names)):
        return sorted(names)
    if wrong := sorted(x for x in names if not 0 <= int(x[:9]) < _MOST_CLASSES):
        raise UserError(
            f"label {wrong[0][:20]}: labels that are numbers count classes from 0; "
            "leave out images without a class, or give classes other names"
        )
    return [str(place) for place in range(max(map(int, names)) + 1)]


def count_unnamed(
    folder: Path, labels: Mapping[str, str], ends: tuple[str, ...]
) -> int:
    """Returns how many images in a folder have no label.

    Args:
      folder: Of a split.
      labels: By path.
      ends: The ends of the names of images.

    Raises:
      UserError: A file with a label is not there.
    """
    with reading(folder):
        found = set(files_of(folder))
    # A walk leaves out hidden files, which may be named all the same.
    missing = [x for x in labels if x not in found and not os.path.isfile(x)]
    if missing:
        raise UserError(
            f"{missing[0]}: is not there, but a table labels it, as {len(missing):,} "
            f"of {len(labels):,} that are missing; a name has its suffix and is the "
            "path below the table's folder"
        )
    return sum(x.lower().endswith(ends) for x in found.difference(labels))


def _table(*folders: Path) -> Path | None:
    files = [folder / name for folder in folders for name in TABLES]
    found = [file for file in files if file.is_file()]
    if len(found) > 1:
        raise UserError(
            f"{found[0]} and {found[1]} both label images: keep one of them in "
            "data.path"
        )
    return found[0] if found else None


def _read(table: Path) -> dict[str, str]:
    labels: dict[str, str] = {}
    for part in cut(table, _BYTES):
        for where, record in read_records(part):
            name = _text(where, record, "file")
            try:
                file = str(path_inside(table.parent, name))
            except ValueError as error:
                raise UserError(f"{where}: {error}") from error
            if file in labels:
                raise UserError(
                    f"{where}: {name} is named before; an image has 1 label"
                )
            labels[file] = _text(where, record, "label")
    return labels


def _text(where: str, record: Mapping[str, Any], meaning: str) -> str:
    names = _COLUMNS[meaning]
    column = next((name for name in names if name in record), None)
    if column is None:
        raise UserError(
            f"{where}: has no column {names[0]}, the {meaning} of an image, but "
            f"{some_of(list(map(str, record)))}; rename one, or, if the names of "
            "folders are the classes, move the table out of data.path"
        )
    value = record[column]
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        said = repr(value)[:40]
        raise UserError(f"{where}: {column} is {said}; give it a name or a number")
    return str(value)
