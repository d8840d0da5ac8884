"""Streams of `datasets` and torchdata go on where they were, and are divided."""

import dataclasses
import io
import json
import re
import shutil
import tarfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jshard.data.batches import TrainingBatches
from jshard.data.dataset import as_dataset
from jshard.data.iterables import Stream
from jshard.data.stream_reader import StreamState
from jshard.data.stream_state import read_state, state_files
from jshard.data.text.named_dataset import load_splits
from jshard.data.text.streamed_text import streamed_text
from jshard.system.errors import UserError

datasets = pytest.importorskip("datasets")
STEPS = 14


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Five files of 40 rows."""
    made = tmp_path_factory.mktemp("rows")
    for file in range(5):
        rows = [
            {"text": f"file {file} row {row:02} " + "x" * (row * 7 % 50), "n": row}
            for row in range(40)
        ]
        lines = [json.dumps(row) + "\n" for row in rows]
        (made / f"part-{file}.jsonl").write_text("".join(lines))
    return made


def rows_of(folder: Path) -> Any:
    found: Any = datasets.load_dataset(str(folder), streaming=True)
    return found["train"].map(
        lambda row: {"x": 100 * int(row["text"][5]) + row["n"]},
        remove_columns=["text", "n"],
    )


def training(data: Any, state: Any = None, start: int = 0, steps=STEPS, **process: int):
    stream = as_dataset(data, 0, repeat=True)
    assert isinstance(stream, Stream)
    return TrainingBatches(
        stream, state, start_step=start, num_steps=steps, batch_size=32, **process
    )


def stored(states: Any, folder: Path) -> StreamState | None:
    """What a checkpoint gives back of the states of all processes."""
    if states[0] is None:
        return None
    of_part = {part: x for one in states for part, x in one.of_part.items()}
    whole = dataclasses.replace(states[0], of_part=of_part)
    for name, text in state_files(whole).items():
        (folder / name).write_text(text)
    return read_state(folder)


def check_resumes(make: Any, tmp_path: Path, steps=(1, 5, 6, 7, 13)) -> list[Any]:
    whole = list(training(make()))
    for step in steps:  # 200 rows are an epoch, of 6.25 steps
        state = stored([whole[step - 1].state], tmp_path)
        assert state is not None
        rest = [batch.rows for batch in training(make(), state, step)]
        np.testing.assert_equal(rest, [batch.rows for batch in whole[step:]])
    return whole


MAPS = {
    "mapped": lambda rows: rows,
    "files in another order": lambda rows: rows.shuffle(seed=3, buffer_size=1),
    "filtered": lambda rows: rows.filter(lambda row: row["x"] % 3 > 0),
    "skipped": lambda rows: rows.skip(7),
    "mixed": lambda rows: datasets.interleave_datasets(
        [rows, rows.skip(50)], probabilities=[0.7, 0.3], seed=1
    ),
}


@pytest.mark.parametrize("name", MAPS)
def test_an_iterable_dataset_goes_on_where_it_was(name, folder, tmp_path):
    make = lambda: MAPS[name](rows_of(folder))
    whole = check_resumes(make, tmp_path)
    if name == "mapped":
        epoch = np.concatenate([batch.rows["x"] for batch in whole])
        assert sorted(epoch[:200]) == sorted(epoch[200:400])
        assert epoch[:200].tolist() != epoch[200:400].tolist()


@pytest.mark.parametrize("before", [1, 2, 8])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_it_is_divided_and_the_number_of_processes_may_change(
    before, after, folder, tmp_path
):
    def run(count: int, *at: Any) -> list[Any]:
        read = [
            training(rows_of(folder), *at, process_index=i, process_count=count)
            for i in range(count)
        ]
        return list(zip(*read, strict=True))

    whole = run(before)
    if before == 2:  # files 0, 2, 4 and files 1, 3
        for part, files in enumerate(({0, 2, 4}, {1, 3})):
            found = np.concatenate([one[part].rows["x"] for one in whole])
            assert {*(found // 100)} == files
    if before == 8:  # more than files: every eighth example
        first = np.concatenate([one[3].rows["x"] for one in whole])[:25]
        assert first.tolist() == [100 * (i // 40) + i % 40 for i in range(3, 200, 8)]
    state = stored([x.state for x in whole[8]], tmp_path)
    for one, other in zip(run(after, state, 9), whole[9:], strict=True):
        np.testing.assert_equal(
            np.concatenate([x.rows["x"] for x in one]),
            np.concatenate([x.rows["x"] for x in other]),
        )


def test_other_data_of_the_same_kind_are_one_line(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    text = lambda: streamed_text(str(copy), "train", **OPTIONS)
    cases: list[Any] = [
        (text, "the files of .*/copy: 6 .*but 5 .*at the checkpoint: resume with"),
        (lambda: rows_of(copy), "the number of files: 6, but 5 at the checkpoint"),
    ]
    states = [stored([next(training(make())).state], tmp_path) for make, _ in cases]
    shutil.copy(copy / "part-0.jsonl", copy / "part-5.jsonl")
    load_splits.cache_clear()
    for (make, said), state in zip(cases, states, strict=True):
        with pytest.raises(UserError, match=said) as caught:
            training(make(), state, 1)
        assert "\n" not in str(caught.value)


def test_what_is_divided_already_is_refused(folder):
    split_dataset_by_node = import_module("datasets.distributed").split_dataset_by_node
    with pytest.raises(UserError, match="leave that out, each process reads its part"):
        as_dataset(split_dataset_by_node(rows_of(folder), 0, 2), 0, repeat=True)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.filterwarnings("ignore:.*fork.*")  # from several threads
@pytest.mark.parametrize("kind", ["map", "iterable"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_where_it_was(kind, workers, folder, tmp_path):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    torch = pytest.importorskip("torch")

    def make() -> Any:
        if kind == "iterable":
            data, options = rows_of(folder), {}
        else:
            data = [{"x": i} for i in range(200)]
            seeded = torch.Generator().manual_seed(5)
            options = {"shuffle": True, "generator": seeded}
        options["num_workers"] = workers
        return loaders.StatefulDataLoader(data, batch_size=9, **options)

    check_resumes(make, tmp_path, steps=(1, 6, 7))


# data.dataset

OPTIONS: dict[str, Any] = {"sequence_length": 32, "seed": 3, "validation_rows": 5}


def texts(batches: Any) -> str:
    inputs = [batch.rows["inputs"].ravel() for batch in batches]
    return bytes(np.concatenate(inputs).astype(np.uint8)).decode()


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("shuffle_rows", [0, 16])
def test_text_goes_on_where_it_was(pack, shuffle_rows, folder, tmp_path):
    options = OPTIONS | {"pack": pack, "shuffle_rows": shuffle_rows}
    whole = check_resumes(
        lambda: streamed_text(str(folder), "train", **options), tmp_path
    )
    shapes = {name: x.shape for name, x in whole[0].rows.items()}
    assert {*shapes.values()} == {(32, 32)}
    text = texts(whole)
    assert not any(f"file 0 row 0{row}" in text for row in range(5))  # held out
    validation: Any = streamed_text(str(folder), "validation", **options)
    seen = texts(
        [type("", (), {"rows": validation[i]}) for i in range(len(validation))]
    )
    assert "file 0 row 00" in seen
    assert "file 0 row 05" not in seen
    assert validation[0].keys() == shapes.keys()
    assert pack == ("segment_ids" in shapes)


def test_packed_rows_have_whole_documents(folder):
    stream = streamed_text(str(folder), "train", **OPTIONS, pack=True, max_segments=3)
    for batch in training(stream, steps=3):
        for i in range(32):
            row = {name: x[i] for name, x in batch.rows.items()}
            segments = row["segment_ids"]
            assert segments.max() <= 2
            for segment in range(1, segments.max() + 1):
                (places,) = np.nonzero(segments == segment)
                np.testing.assert_array_equal(
                    row["positions"][places], range(len(places))
                )
                np.testing.assert_array_equal(
                    row["inputs"][places][1:], row["targets"][places][:-1]
                )
            assert (row["weights"] == (segments > 0)).all()


def test_a_mixture_takes_turns_by_weight(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    line = json.dumps({"text": "y" * 60}) + "\n"
    (other / "a.jsonl").write_text(line * 50)
    names = f"{folder}:0.75,{other}:0.25"
    check_resumes(lambda: streamed_text(names, "train", **OPTIONS), tmp_path)
    batch = next(training(streamed_text(names, "train", **OPTIONS)))
    counts = (batch.rows["inputs"] == ord("y")).any(1).sum()
    assert counts == 8  # of 32


def copy_as(kind: str, folder: Path, to: Path) -> str:
    """Writes the files of a folder as others; returns the column of the text."""
    for file in sorted(folder.iterdir()):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        if kind == "parquet":
            datasets.Dataset.from_list(rows).to_parquet(to / f"{file.stem}.parquet")
            continue
        with tarfile.open(to / f"{file.stem}.tar", "w") as tar:
            for row in rows:
                info = tarfile.TarInfo(f"{row['n']:03}.txt")
                data = row["text"].encode()
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return "text" if kind == "parquet" else "txt"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "webdataset"])
def test_each_file_is_read_by_one_process_alone(kind, folder, tmp_path):
    options = dict(OPTIONS)
    if kind != "jsonl":
        options["text_key"] = copy_as(kind, folder, tmp_path)
        folder = tmp_path
    for part, files in enumerate(({0, 2, 4}, {1, 3})):
        stream = streamed_text(str(folder), "train", **options)
        read = training(stream, process_index=part, process_count=2)
        found = re.findall(r"file (\d) row", texts(read))
        assert {*map(int, found)} == files


def test_a_split_named_validation_is_validated_on(tmp_path):
    for name in ("train", "validation"):
        line = json.dumps({"text": f"{name} " * 9, "other": 1}) + "\n"
        (tmp_path / f"{name}.jsonl").write_text(line * 20)
    validation: Any = streamed_text(str(tmp_path), "validation", **OPTIONS)
    assert b"validation" in bytes(validation[0]["inputs"].astype(np.uint8))
    none: dict[str, Any] = OPTIONS | {"validation_rows": 0}
    assert streamed_text(str(tmp_path), "validation", **none) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"text_key": "body"}, "no column 'body'; set data.text_key to one of text, n"),
        ({"text_key": "n"}, "'n' of a row is a int, not a text; set data.text_key to"),
        ({"train_split": "test"}, "no split 'test'; set data.split to one of train"),
        ({"config": "en"}, "data.config=en: BuilderConfig 'en' not found. Availab"),
    ],
)  # fmt: skip
def test_what_a_dataset_does_not_have_is_one_line(options, said, folder):
    with pytest.raises(UserError) as caught:
        training(streamed_text(str(folder), "train", **OPTIONS | options))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_data_is_one_line(tmp_path):
    for name in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UserError, match=f"data.dataset={name}: ") as caught:
            streamed_text(str(name), "train", **OPTIONS)
        assert "\n" not in str(caught.value)
