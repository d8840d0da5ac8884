"""Tables that label images: what is read, what is said of it, and what is refused."""

import json
from pathlib import Path

import pytest

from jshard.data.files.noting import noted
from jshard.data.images.image_sources import find_images, write_records
from jshard.system.errors import UserError

pytest.importorskip("PIL.Image", reason="needs Pillow")

# Their order by name is not that of their labels, nor that of the table.
LABELS = {"b.png": "cat", "a.png": "ant", "sub/c.png": "bee"}


def write(folder: Path, labels: dict[str, str], table: str) -> None:
    for name in labels:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    (folder / table).write_text(text_of(labels, table))


def text_of(labels: dict[str, str], table: str) -> str:
    if table.endswith("jsonl"):
        rows = [{"file_name": x, "label": y, "other": [1]} for x, y in labels.items()]
        return "".join(json.dumps(row) + "\n" for row in rows)
    names = "file,label" if table == "labels.csv" else "file_name,label"
    rows = "".join(f"{x},{y},1\n" for x, y in labels.items())
    return f"{names},other\n{rows}"


def labels_of(root: Path, split: str = "train") -> dict[str, int]:
    source = find_images(str(root), split, 100)
    images = [source[i] for i in range(len(source))]
    return {image.data.decode(): image.label for image in images}


@pytest.mark.parametrize("table", ["metadata.csv", "metadata.jsonl", "labels.csv"])
def test_a_table_in_each_split_labels_its_images(tmp_path, table):
    write(tmp_path / "train", LABELS, table)
    write(tmp_path / "validation", {"d.png": "cat"}, table)
    (tmp_path / "train" / "unnamed.png").touch()
    with noted() as said:
        assert labels_of(tmp_path) == {"b.png": 2, "a.png": 0, "sub/c.png": 1}
        # Classes are those of both splits, so that a label means the same.
        assert labels_of(tmp_path, "validation") == {"d.png": 2}
    assert said == [
        f"{tmp_path / 'train'}: 3 images in 3 classes, by a table; left out 1 that it "
        "does not name",
        f"{tmp_path / 'validation'}: 1 images in 3 classes, by a table",
    ]


def test_one_table_labels_both_splits_and_records_are_made_of_them(tmp_path):
    of_splits = {"train/a.png": "x", "val/b.png": "y", "test/c.png": "?"}
    write(tmp_path, of_splits, "metadata.csv")
    with noted() as said:
        assert labels_of(tmp_path) == {"train/a.png": 0}
        assert labels_of(tmp_path, "validation") == {"val/b.png": 1}
    assert (
        f"{tmp_path}: its table labels 1 files that are not in train/ and val/" in said
    )
    write_records(str(tmp_path), str(tmp_path / "records"))
    assert labels_of(tmp_path / "records", "validation") == {"val/b.png": 1}


def test_labels_that_are_numbers_are_the_places_of_the_classes(tmp_path):
    numbers = {"a.png": "10", "b.png": "2", "c.png": "0"}
    write(tmp_path / "train", numbers, "labels.csv")
    assert labels_of(tmp_path) == {"a.png": 10, "b.png": 2, "c.png": 0}
    with pytest.raises(UserError, match=r"train has 11 classes, .*model\.classes=11"):
        find_images(str(tmp_path), "train", 10)
    write(tmp_path / "train", numbers | {"a.png": "007"}, "labels.csv")  # a name
    assert labels_of(tmp_path) == {"a.png": 1, "b.png": 2, "c.png": 0}
    for wrong in ("-1", "1000000", "9" * 5000):
        write(tmp_path / "train", numbers | {"a.png": wrong}, "labels.csv")
        with pytest.raises(UserError, match=rf"^label {wrong[:20]}: .* count classes"):
            labels_of(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "id,breed\na,x\n",
            "row 1: has no column file_name, the file of .* id, breed;",
        ),
        (
            "file_name,text\na.png,x\n",
            "row 1: has no column label, .* file_name, text;",
        ),
        ("file_name,label\na.png,\n", "row 1: label is ''; give it a name"),
        ("file_name,label\na,x\n", r"train/a: is not there.* 1 of 1 .* has its suffix"),
        ("file_name,label\na.png,x\na.png,y\n", "row 2: a.png is named before"),
        ("file_name,label\n../a.png,x\n", r"row 1: '\.\./a.png' is not the name of a"),
        ("file_name,label\n/etc/passwd,x\n", "row 1: '/etc/passwd' is not the name"),
        ("file_name,label\n", r"metadata.csv: names no file in train/"),
    ],
)
def test_a_table_that_labels_no_images_is_one_line(tmp_path, text, said):
    write(tmp_path / "train", {"a.png": "x"}, "metadata.csv")
    (tmp_path / "a.png").touch()
    (tmp_path / "train" / "metadata.csv").write_text(text)
    with pytest.raises(UserError, match=said) as found:
        labels_of(tmp_path)
    assert "\n" not in str(found.value)


def test_a_json_label_is_a_name_or_a_whole_number(tmp_path):
    write(tmp_path / "train", {"a.png": "x"}, "metadata.jsonl")
    table = tmp_path / "train" / "metadata.jsonl"
    table.write_text('{"file_name": "a.png", "label": 3}')
    assert labels_of(tmp_path) == {"a.png": 3}
    for wrong in ("null", "true", "1.5", "[1]"):
        table.write_text(f'{{"file_name": "a.png", "label": {wrong}}}')
        with pytest.raises(UserError, match=r"byte 0: label is .*; give it a name or"):
            labels_of(tmp_path)


def test_two_tables_or_one_of_two_are_refused(tmp_path):
    write(tmp_path / "train", {"a.png": "x"}, "metadata.csv")
    (tmp_path / "val" / "x").mkdir(parents=True)
    with pytest.raises(UserError, match=r"val: has no table of labels, and the other"):
        labels_of(tmp_path)
    write(tmp_path, {"train/a.png": "x", "val/b.png": "x"}, "labels.csv")
    with pytest.raises(UserError, match=r"labels.csv and .*metadata.csv both label"):
        labels_of(tmp_path)
