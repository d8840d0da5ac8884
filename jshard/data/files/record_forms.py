"""Which files hold records: by the name's end in any case, and JSON by its begin."""

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jshard.system.errors import UserError
from jshard.system.files.untrusted import parse_json, read_json

_PACKED = (".gz", ".zst")
_LINES = (".jsonl", ".ndjson")
_FORMS = {".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
_FORMS |= {".csv": "csv", ".tsv": "tsv", **dict.fromkeys(_LINES, "lines")}
_SEPARATED = ("csv", "tsv")
_LOOKED_AT = 2**20  # bytes of a .json file
# Other JSON beside a dataset: of `datasets`, of models, and of jshard.tokenize.
_ABOUT = (
    *("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"),
    *("state.json", "tokens.json", "index.json", "tokenizer.json"),
)


def form_of(file: Path) -> str:
    """Returns what kind of records a file holds by its name: "lines", "csv", or ""."""
    name = file.name.lower()
    packed = next((x for x in _PACKED if name.endswith(x)), "")
    form = _FORMS.get(Path(name.removesuffix(packed)).suffix, "")
    return "" if packed and form in ("parquet", "arrow") else form


def has_records(file: Path) -> bool:
    """Whether the file holds records, by its name."""
    return form_of(file) != ""


def is_array(file: Path) -> bool:
    """Whether a .json file is one array, and not objects on lines."""
    if form_of(file) != "json" or file.suffix.lower() == ".zst":
        return False
    return _begin_of(file)[:1] == b"["


def with_records(files: Sequence[Path]) -> list[Path]:
    """Returns the files with records, in the same order.

    Of .json files these are arrays of objects and objects on lines, not a single object
    such as a package's. Tables of .csv and .tsv are left out beside other records, and
    beside more files of text.

    Of a folder that Hugging Face's `datasets` saved, these are the files of the dataset
    (others are caches), and of a dictionary of datasets those to train on or validate
    with.
    """
    left_out = _beside_saved(files)
    kept = [x for x in files if x not in left_out and has_records(x)]
    records = [x for x in kept if form_of(x) not in _SEPARATED and _is_data(x)]
    tables = [x for x in kept if form_of(x) in _SEPARATED]
    texts = sum(file.suffix.lower() == ".txt" for file in files)
    return records or (tables if len(tables) >= texts else [])


def _is_data(file: Path) -> bool:
    """Whether a file of records has some, which a .json file may not."""
    if form_of(file) != "json" or file.suffix.lower() == ".zst":
        return True
    if file.name in _ABOUT:
        return False
    begin = _begin_of(file)
    if begin[:1] == b"[":
        return begin[1:].lstrip()[:1] in (b"{", b"]")
    first, _, rest = begin.partition(b"\n")
    if not rest.lstrip().startswith(b"{"):
        return False
    try:
        return isinstance(parse_json(first), dict)
    except ValueError:  # the object goes on
        return False


def _begin_of(file: Path) -> bytes:
    """Returns the first bytes, without a mark of UTF-8 and white space."""
    try:
        opened: Any = gzip.open if file.suffix.lower() == ".gz" else open
        with opened(file, "rb") as stream:
            return stream.read(_LOOKED_AT).removeprefix(b"\xef\xbb\xbf").lstrip()
    except (OSError, EOFError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error


def _beside_saved(files: Sequence[Path]) -> set[Path]:
    """Returns the files that a folder of `datasets` does not count as its data."""
    present = set(files)
    left_out: set[Path] = set()
    for file in files:
        if file.name == "state.json" and (named := _entry(file, "_data_files")):
            if not isinstance(named, list) or not all(
                isinstance(data, dict) and "filename" in data for data in named
            ):
                raise UserError(f"{file}: its _data_files are not those of a dataset")
            kept = {file.parent / str(data["filename"]) for data in named}
            if missing := sorted(kept - present):
                raise UserError(f"{missing[0]}: is missing; {file} names it")
            left_out |= {f for f in files if f.parent == file.parent} - kept
        if file.name == "dataset_dict.json":
            splits = _entry(file, "splits") or ()
            if not isinstance(splits, list | tuple):
                raise UserError(f"{file}: its splits are not a list")
            for split in map(str, splits):
                if split != "train" and not split.startswith("val"):
                    folder = file.parent / split
                    left_out |= {f for f in files if folder in f.parents}
    return left_out


def _entry(file: Path, key: str) -> Any:
    try:
        found = read_json(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error
    return found.get(key) if isinstance(found, dict) else None
