"""Records of JSON, CSV, Parquet and Arrow files, and documents in them or in text.

A file is read in slices, so that a large one can be shared out.
"""

import contextlib
import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jshard.data.files.conversations import FORMS
from jshard.data.files.record_forms import form_of, has_records, is_array
from jshard.system.errors import UserError, some_of
from jshard.system.files.untrusted import parse_json

_ROWS = 1024  # read from a table at a time
_LINE = 2**28  # bytes of a line in a compressed file
_ARRAY = 2**31  # bytes of an array in a .json file
# What pyarrow raises of damaged files, beside its own: names and texts that are not
# UTF-8, dates after 9999, counts and sizes that no memory has.
_OF_DAMAGE = (OSError, ValueError, ArithmeticError, SystemError, MemoryError)
_DELIMITERS = {"csv": ",", "tsv": "\t"}


class Slice(NamedTuple):
    """A part of a file.

    Attributes:
      file: The file.
      start: The first byte of text or of uncompressed JSONL; a line belongs to the
        slice in which it begins. The first row group of Parquet. 0 for other files.
      stop: The one after the last; 1 for files that are read as a whole.
      size: About how many bytes of the file it is.
    """

    file: Path
    start: int
    stop: int
    size: int


def cut(file: Path, most: int) -> list[Slice]:
    """Returns slices of about `most` bytes that make up the file."""
    size = file.stat().st_size
    form = form_of(file)
    if form == "parquet":
        groups = _parquet(file).metadata.num_row_groups
        step = max(1, groups * most // max(size, 1))
        bounds = [(i, min(i + step, groups)) for i in range(0, groups, step)]
        return [Slice(file, a, b, size * (b - a) // groups) for a, b in bounds]
    whole = form in ("arrow", *_DELIMITERS) or is_array(file)
    if whole or _is_packed(file):
        return [Slice(file, 0, 1, size)]
    bounds = [(i, min(i + most, size)) for i in range(0, size, most)]
    return [Slice(file, a, b, b - a) for a, b in bounds]


def read_texts(part: Slice, text_key: str) -> Iterator[str]:
    """Yields the documents of a slice: of records the texts, of text the whole slice.

    Raises:
      UserError: The file cannot be read, or a record has no text under `text_key`.
    """
    if not has_records(part.file):
        text = b"".join(line for _, line in _lines(part))
        try:
            yield text.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{part.file}: not UTF-8 text ({error.reason})") from error
        return
    for where, record in read_records(part, text_key):
        text = record.get(text_key)
        if not isinstance(text, str):
            if text_key in record and text is None:
                raise UserError(
                    f"{where}: {text_key!r} is null: leave the record out, or give it "
                    "a text"
                )
            what = f"a {type(text).__name__}" if text_key in record else "not there"
            texts = sorted(key for key, x in record.items() if isinstance(x, str))
            raise UserError(
                f"{where}: {text_key!r} is {what}, not a text; set data.text_key "
                "(--text_key of jshard.tokenize) to one of "
                f"{some_of(texts) or 'none'}, or give records the keys of {FORMS}; "
                f"it has {some_of(sorted(record))}"
            )
        yield text


def read_records(
    part: Slice, column: str = ""
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields where each record is, for errors, and the record.

    Args:
      part: Of a file for which `has_records` is true.
      column: If given and a table has it, only this is read.
    """
    form = form_of(part.file)
    if form in ("parquet", "arrow"):
        yield from _rows(part, column)
        return
    if form in _DELIMITERS:
        yield from _separated(part.file, _DELIMITERS[form])
        return
    if is_array(part.file):
        yield from _of_array(part.file)
        return
    for position, line in _lines(part):
        if not line.strip():
            continue
        where = f"{part.file}: the line at byte {position}"
        try:
            record = parse_json(line)
        except ValueError as error:
            hint = (
                ": a .json file is an array of objects, or has one on each line"
                if form == "json"
                else ""
            )
            raise UserError(f"{where} is not JSON: {error}{hint}") from error
        if not isinstance(record, dict):
            raise UserError(f"{where} is not a JSON object")
        yield where, record


def _of_array(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the objects of a .json file that is one array."""
    with _opened(file) as stream:
        data = stream.read(_ARRAY + 1)
    try:
        if len(data) > _ARRAY:
            raise ValueError(f"more than {_ARRAY:,} bytes; write one object per line")
        records = parse_json(data)
    except ValueError as error:
        raise UserError(f"{file}: is not JSON: {error}") from error
    for number, record in enumerate(records):
        where = f"{file}: object {number}"
        if not isinstance(record, dict):
            raise UserError(f"{where} is a {type(record).__name__}, not a JSON object")
        yield where, record


def _separated(file: Path, delimiter: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the rows of a .csv or .tsv file, named by its first row."""
    csv.field_size_limit(_LINE)  # of all readers; by default 131,072 characters
    try:
        with _opened(file) as stream:
            text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
            rows = csv.DictReader(text, delimiter=delimiter, strict=True)
            for number, row in enumerate(rows, 1):
                where = f"{file}: row {number}"
                if None in row or None in row.values():
                    raise UserError(
                        f"{where} has not as many fields as the first row; set its "
                        "quotes right, or convert the file to JSONL"
                    )
                yield where, row
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(
            f"{file}: cannot be read as {file.suffix.lower()[1:]}: {error}"
        ) from error


def _is_packed(file: Path) -> bool:
    return file.suffix.lower() in (".gz", ".zst")


def _lines(part: Slice) -> Iterator[tuple[int, bytes]]:
    """Yields the positions and lines that begin in a slice."""
    whole = _is_packed(part.file)
    most = _LINE + 1 if whole else -1
    with _opened(part.file) as stream:
        position = part.start
        if position:  # the line that begins earlier belongs to another slice
            stream.seek(position - 1)
            position += len(stream.readline()) - 1
        while (whole or position < part.stop) and (line := stream.readline(most)):
            if len(line) == most:  # a small file may expand to any size
                raise UserError(
                    f"{part.file}: the line at byte {position} is longer than "
                    f"{most - 1:,} bytes; divide it"
                )
            yield position, line
            position += len(line)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Opens a file, uncompressed; what goes wrong is a UserError."""
    try:
        if file.suffix.lower() == ".gz":
            stream: Any = gzip.GzipFile(file)
        elif file.suffix.lower() == ".zst":
            stream = io.BufferedReader(
                _pyarrow(file).input_stream(str(file), compression="zstd")
            )
        else:
            stream = file.open("rb")
        with stream:
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error


def _rows(part: Slice, column: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the rows of a table as dicts."""
    arrow = _pyarrow(part.file)
    try:
        if form_of(part.file) == "parquet":
            table = _parquet(part.file)
            columns = [column] if column in table.schema_arrow.names else None
            groups = range(part.start, part.stop)
            tables: Any = table.iter_batches(_ROWS, groups, columns=columns)
        else:
            tables = _arrow_batches(arrow, part.file)
        row = 0
        for batch in tables:
            batch.validate(full=True)  # offsets into other memory, and text not UTF-8
            for first in range(0, batch.num_rows, _ROWS):
                for record in batch.slice(first, _ROWS).to_pylist():
                    place = f"of row group {part.start} on " if part.start else ""
                    yield f"{part.file}: row {row} {place}".rstrip(), record
                    row += 1
    except UserError:
        raise
    except (arrow.ArrowException, *_OF_DAMAGE) as error:
        raise UserError(f"{part.file}: cannot be read: {error}") from error


def _arrow_batches(arrow: Any, file: Path) -> Iterator[Any]:
    """Yields the batches of an Arrow stream, as `datasets` writes, or an Arrow file."""
    with arrow.memory_map(str(file)) as source:
        try:
            reader = arrow.ipc.open_stream(source)
        except arrow.ArrowInvalid:
            source.seek(0)
            reader = arrow.ipc.open_file(source)
            yield from map(reader.get_batch, range(reader.num_record_batches))
        else:
            yield from reader


def _parquet(file: Path) -> Any:
    arrow = _pyarrow(file)
    import pyarrow.parquet  # pyright: ignore[reportMissingImports]

    try:
        return pyarrow.parquet.ParquetFile(file)
    except (arrow.ArrowException, *_OF_DAMAGE) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error


def _pyarrow(file: Path) -> Any:
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"{file}: reading it needs pyarrow: pip install 'jshard[text]'"
        ) from error
    return pyarrow
