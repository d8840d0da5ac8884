"""JSONL, Parquet and Arrow as training data, and mixtures of sources."""

import gzip
import json
import random

import numpy as np
import pytest

from jshard.data.mixture import parse_mixture
from jshard.data.text.records import cut, read_records, read_texts
from jshard.system.errors import UserError
from texts import text, tokens_of, window

DOCUMENTS = [f"document {i} " + "x" * (i % 7) for i in range(40)] + ["文字 é"]
RECORDS = [{"id": i, "text": document} for i, document in enumerate(DOCUMENTS)]


def as_jsonl(records):
    return "".join(json.dumps(record) + "\n" for record in records)


def write(folder, kind):
    """Writes the records; returns the file or folder to read."""
    if kind == "jsonl":
        (folder / "a.jsonl").write_text(as_jsonl(RECORDS))
        return folder / "a.jsonl"
    if kind == "jsonl.gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(as_jsonl(RECORDS).encode()))
        return folder
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_pylist(RECORDS)
    if kind == "jsonl.zst":
        with pa.output_stream(str(folder / "a.jsonl.zst"), compression="zstd") as out:
            out.write(as_jsonl(RECORDS).encode())
    elif kind == "parquet":
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]

        pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=9)
    else:  # what Dataset.save_to_disk writes
        file = str(folder / "data-00000-of-00001.arrow")
        with pa.OSFile(file, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as to:
            to.write_table(table, max_chunksize=7)
        (folder / "cache-0123.arrow").write_bytes(b"of an earlier map")
        files = [{"filename": "data-00000-of-00001.arrow"}]
        (folder / "state.json").write_text(json.dumps({"_data_files": files}))
        (folder / "dataset_info.json").write_text("{}")
    (folder / "README.md").write_text("not data")
    return folder


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow"])
def test_records_are_documents(tmp_path, kind):
    path = write(tmp_path, kind)
    held_out = tokens_of(text(path, "validation", validation_fraction=0.3))
    found = bytes(held_out.tolist()).decode().split("\0")[:-1]
    assert 5 < len(found) < 20
    assert found == DOCUMENTS[-len(found) :]  # the last whole documents
    data = text(path, validation_fraction=0, pack=True, sequence_length=40)
    row = window(data, 0)
    end = np.flatnonzero(np.diff(row["segment_ids"]))[0] + 1
    assert bytes(row["inputs"][:end].tolist()).decode(errors="replace") in DOCUMENTS


def test_every_line_is_in_one_slice(tmp_path):
    file = write(tmp_path, "jsonl")
    for size in (1, 13, 64, 10_000):
        found = [t for part in cut(file, size) for t in read_texts(part, "text")]
        assert found == DOCUMENTS
    for part in cut(file, 200):
        for where, record in read_records(part):
            position = int(where.split()[-1])
            line = file.read_bytes()[position:].split(b"\n")[0]
            assert json.loads(line) == record


def test_every_row_group_is_in_one_slice(tmp_path):
    file = write(tmp_path, "parquet") / "a.parquet"
    parts = cut(file, file.stat().st_size // 3)
    assert len(parts) > 2
    found = [t for part in parts for t in read_texts(part, "text")]
    assert found == DOCUMENTS


def test_a_row_group_larger_than_a_slice_is_one(tmp_path):
    file = write(tmp_path, "parquet") / "a.parquet"
    bounds = [(part.start, part.stop) for part in cut(file, 1)]
    assert bounds == [(i, i + 1) for i in range(len(bounds))]
    assert len(bounds) > 2


def test_a_dictionary_of_datasets_keeps_its_splits(tmp_path):
    for split in ("train", "validation", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "data.jsonl").write_text(as_jsonl([{"text": split * 9}]))
    splits = {"splits": ["train", "validation", "test"]}
    (tmp_path / "dataset_dict.json").write_text(json.dumps(splits))
    held_out = tokens_of(text(tmp_path, "validation"))
    assert bytes(held_out.tolist()).decode() == "validation" * 9 + "\0"
    data = text(tmp_path)
    seen = {bytes(window(data, i)["inputs"].tolist()) for i in range(20)}
    assert not any(b"v" in inputs or b"es" in inputs for inputs in seen)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a\.jsonl: the line at byte 14 is not JSON"),
        ("[1]", r"a\.jsonl: the line at byte 14 is not a JSON object"),
        ('{"body": "b"}', r"'text' is not there.* set data\.text_key .* one of body"),
        ('{"text": 7}', r"'text' is a int, not a text"),
        ('{"text": null}', "'text' is null: leave the record out, or give it a text"),
        ('{"text": "\\ud800"}', r"a\.jsonl: has a text that is not valid Unicode"),
    ],
)
def test_a_bad_record_is_one_line(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(UserError, match=message):
        text(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", "a.arrow"])
def test_a_damaged_file_is_one_line(tmp_path, name):
    if not name.endswith("gz"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(UserError, match=f"{name}: cannot be read"):
        text(tmp_path / name)


@pytest.mark.parametrize("form", ["stream", "file", "parquet"])
def test_damaged_tables_are_read_or_one_line(tmp_path, form):
    """Offsets into other memory would end the process by a signal."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet  # pyright: ignore[reportMissingImports]

    columns = {
        "text": ["of more than twelve bytes", "é" * 20, ""],
        "meta": [{"a": [1, 2], "b": "x"}] * 3,
        "kind": pa.array(["k", "l", "k"]).dictionary_encode(),
        "date": pa.array([1, 2, None], pa.timestamp("us", tz="UTC")),
        "price": pa.array([1, 2, 3], pa.decimal128(10, 2)),
    }
    table, sink = pa.table(columns), pa.BufferOutputStream()
    if form == "parquet":
        pyarrow.parquet.write_table(table, sink, compression="none")
    else:
        new = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
        with new(sink, table.schema) as writer:
            writer.write_table(table)
    valid = sink.getvalue().to_pybytes()
    file = tmp_path / ("a.parquet" if form == "parquet" else "a.arrow")
    draw, refused = random.Random(form), 0
    for _ in range(150):
        damaged = bytearray(valid)
        for _ in range(draw.choice([1, 2, 5, 20])):
            damaged[draw.randrange(len(valid))] = draw.randrange(256)
        file.write_bytes(
            damaged[: draw.choice([None, None, draw.randrange(len(valid))])]
        )
        try:
            for part in cut(file, 1000):
                list(read_records(part))
        except UserError:
            refused += 1
    assert 50 < refused < 150


def test_a_truncated_gz_is_one_line(tmp_path):
    data = gzip.compress(as_jsonl(RECORDS).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(data[:-20])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: cannot be read"):
        text(tmp_path)


# Mixtures.


@pytest.fixture
def mixture(tmp_path):
    for name, letter in (("a", "a"), ("b", "b")):
        (tmp_path / name).write_text(letter * 4000)
    return f"{tmp_path}/a:0.7,{tmp_path}/b:0.3"


def test_a_mixture_has_its_shares(mixture):
    data = text("", mixture=mixture)
    again = text("", mixture=mixture)
    firsts = [chr(window(data, i)["inputs"][0]) for i in range(1000)]
    assert abs(firsts.count("a") - 700) <= 2
    assert all(abs(firsts[:n].count("a") - 0.7 * n) <= 2 for n in range(1000))
    for i in (0, 7, 999):  # an example follows from its number, so a run can resume
        for key, value in window(data, i).items():
            np.testing.assert_array_equal(window(again, i)[key], value)
    held_out = list(text("", "validation", mixture=mixture, validation_fraction=0.1))
    letters = [chr(row["inputs"][0]) for row in held_out]
    assert 60 < len(letters) <= 72  # of the first 50 windows have all, 0.3 / 0.7 others
    assert abs(letters.count("a") / len(letters) - 0.7) < 0.03


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a", "'a' must be PATH:WEIGHT"),
        ("a:", "'a:' must be PATH:WEIGHT"),
        ("a:x", "'a:x' must be PATH:WEIGHT"),
        ("a:0", "weight above 0"),
        ("a:inf", "weight above 0"),
        ("a:1,", "'' must be PATH:WEIGHT"),
        ("a:1,a:2", "a is there twice"),
    ],
)
def test_a_bad_mixture_is_one_line(given, message):
    with pytest.raises(UserError, match=message):
        parse_mixture(given, "data.mixture")


def test_sources_that_are_missing_or_given_twice_are_one_line(mixture, tmp_path):
    with pytest.raises(UserError, match="nosuch: no such file or folder"):
        text("", mixture=f"{tmp_path}/nosuch:1")
    with pytest.raises(
        UserError, match=r"stream the mixture: data.dataset=o/a:1,o/b:2"
    ):
        text("", mixture="o/a:1,o/b:2")
    with pytest.raises(UserError, match=r"data\.path and data\.mixture are both set"):
        text(tmp_path, mixture=mixture)
    with pytest.raises(UserError, match="has a weight below a millionth"):
        text("", mixture=f"{tmp_path}/a:1,{tmp_path}/b:1e-9")


def test_mixtures_of_paths_with_colons():
    given = "gs://a/b:0.5, c:2"
    assert parse_mixture(given, "data.mixture") == {"gs://a/b": 0.5, "c": 2.0}
