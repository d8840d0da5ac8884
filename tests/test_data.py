"""Data: batches of a step, evaluation, text and token files as windows."""

import math
from pathlib import Path

import grain
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from jshard.errors import UserError
from jshard.training import corpus
from jshard.training.data import batches, eval_batches
from jshard.training.text import bigram_entropy, decode, encode, text_data

PROCESS_COUNTS = (1, 2, 4)


def examples(count, *, weights=True):
    """A finite dataset whose example i is {"x": [i, -i], "weights": 1}."""
    extra = {"weights": np.float32(1)} if weights else {}
    return grain.MapDataset.range(count).map(
        lambda i: {"x": np.array([i, -i], np.int32), **extra}
    )


def x(example):
    return example["x"][..., 0]


def text(path, split="train", **options):
    options = {"sequence_length": 8, "seed": 0, **options}
    return text_data(str(path), split, **options)


def window(dataset, index):
    element = dataset[index]
    assert element is not None
    return element


def tokens_of(dataset):
    """The tokens that a finite dataset of windows covers, weight 0 left out."""
    windows = list(dataset)
    targets = [w["targets"][w["weights"] > 0] for w in windows]
    return np.concatenate([windows[0]["inputs"][:1], *targets])


def epoch(dataset, number, length):
    """The inputs of one epoch, in order, [length, T]."""
    start = number * length
    return np.stack([window(dataset, start + i)["inputs"] for i in range(length)])


def write_text(folder, count, size=100):
    for i in range(count):
        (folder / f"{i:03}.txt").write_text(chr(ord("A") + i % 26) * size)


# Batches of a step.


@settings(max_examples=30)
@given(
    per_process=st.integers(1, 3),
    process_count=st.sampled_from(PROCESS_COUNTS),
    start=st.integers(0, 8),
    seed=st.integers(0, 2**32 - 1),
    num_threads=st.sampled_from([0, 3]),
)
def test_the_batch_of_a_step_does_not_depend_on_start_processes_or_threads(
    per_process, process_count, start, seed, num_threads
):
    # 23 examples, so that batches cross the ends of epochs.
    dataset = examples(23).seed(seed).shuffle().repeat()
    batch_size = per_process * process_count
    parts = [
        list(
            batches(
                dataset,
                batch_size=batch_size,
                start_step=start,
                num_steps=8,
                process_index=index,
                process_count=process_count,
                num_threads=num_threads,
            )
        )
        for index in range(process_count)
    ]
    assert [len(part) for part in parts] == [8 - start] * process_count
    for number, local in enumerate(zip(*parts, strict=True)):
        step = start + number
        rows = range(step * batch_size, (step + 1) * batch_size)
        expected = np.stack([window(dataset, row)["x"] for row in rows])
        np.testing.assert_array_equal(np.concatenate([b["x"] for b in local]), expected)


def test_starting_at_step_7_equals_skipping_to_step_7():
    def from_step(start):
        dataset = examples(23).seed(3).shuffle().repeat()
        return list(batches(dataset, batch_size=4, start_step=start, num_steps=10))

    for resumed, skipped in zip(from_step(7), from_step(0)[7:], strict=True):
        np.testing.assert_array_equal(resumed["x"], skipped["x"])


def test_each_epoch_has_each_window_once_in_an_order_of_its_own(tmp_path):
    file = tmp_path / "a.bin"
    np.arange(401, dtype=np.uint16).tofile(file)
    data = text(file, validation_fraction=0)
    orders = [epoch(data, number, 50)[:, 0] for number in range(3)]
    for order in orders:
        assert sorted(order) == list(range(0, 400, 8))
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[1], orders[2])


def test_the_next_seed_is_not_the_next_epoch(tmp_path):
    file = tmp_path / "a.bin"
    np.arange(401, dtype=np.uint16).tofile(file)
    second_epoch = epoch(text(file, seed=0), 1, 47)
    first_epoch = epoch(text(file, seed=1), 0, 47)
    assert not np.array_equal(second_epoch, first_epoch)


def test_batches_end_with_finite_data():
    with pytest.raises(UserError, match=r"after 10 examples.*end make_data with"):
        batches(examples(10), batch_size=4, start_step=0, num_steps=3)


def test_batches_must_divide_over_the_processes():
    for read in (
        lambda **k: batches(examples(9).repeat(), start_step=0, num_steps=1, **k),
        lambda **k: eval_batches(examples(9), **k),
    ):
        with pytest.raises(UserError, match="batch_size=6 does not divide over 4"):
            read(batch_size=6, process_index=0, process_count=4)
        with pytest.raises(UserError, match="positive multiple"):
            read(batch_size=0)
        with pytest.raises(ValueError, match="process_index=2 is not in"):
            read(batch_size=2, process_index=2, process_count=2)


def test_steps_are_counted_from_0():
    with pytest.raises(UserError, match="start_step=-1"):
        batches(examples(9).repeat(), batch_size=1, start_step=-1, num_steps=1)


def test_a_mistake_found_while_reading_reaches_the_loop_as_itself(tmp_path):
    file = tmp_path / "a.bin"
    tokens = np.zeros(20_001, np.uint16)
    tokens[15_000] = 99
    tokens.tofile(file)
    data = text(file, validation_fraction=0, vocab_size=99)
    with pytest.raises(UserError, match=r"a\.bin: token 99 at position 15000"):
        list(batches(data, batch_size=10, start_step=0, num_steps=250))


# Evaluation.


@given(
    count=st.integers(1, 30),
    per_process=st.integers(1, 5),
    process_count=st.sampled_from(PROCESS_COUNTS),
    max_batches=st.none() | st.integers(1, 8),
)
def test_evaluation_sees_every_example_once_in_order_on_equally_many_batches(
    count, per_process, process_count, max_batches
):
    batch_size = per_process * process_count
    parts = [
        list(
            eval_batches(
                examples(count),
                batch_size=batch_size,
                process_index=index,
                process_count=process_count,
                max_batches=max_batches,
                num_threads=0,
            )
        )
        for index in range(process_count)
    ]
    num_batches = min(math.ceil(count / batch_size), max_batches or math.inf)
    assert [len(part) for part in parts] == [num_batches] * process_count
    seen = []
    for local in zip(*parts, strict=True):
        whole = {k: np.concatenate([b[k] for b in local]) for k in ("x", "weights")}
        assert whole["x"].shape == (batch_size, 2)
        assert whole["weights"].dtype == np.float32
        seen += list(x(whole)[whole["weights"] == 1])
        padding = whole["x"][whole["weights"] == 0]
        assert all(0 <= i < count and j == -i for i, j in padding)
    assert seen == list(range(min(count, num_batches * batch_size)))


def test_evaluation_needs_weights_only_where_it_pads():
    data = examples(6, weights=False)
    assert len(list(eval_batches(data, batch_size=3))) == 2
    assert len(list(eval_batches(data, batch_size=4, max_batches=1))) == 1
    with pytest.raises(
        UserError, match=r"batches of 4 do not divide the 6 .*'weights'"
    ):
        eval_batches(data, batch_size=4)


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (examples(4).repeat(), {}, r"infinite: leave out \.repeat\(\)"),
        (examples(4)[:0], {}, "no examples"),
        (examples(4), {"max_batches": 0}, "max_batches=0"),
    ],
)
def test_evaluation_refuses(dataset, options, message):
    with pytest.raises(UserError, match=message):
        eval_batches(dataset, batch_size=2, **options)


# Windows.


def test_targets_are_inputs_shifted_by_one(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("the quick brown fox jumps over the lazy dog " * 9)
    whole = file.read_text()
    for split in ("train", "validation"):
        element = window(text(file, split), 1)
        assert {k: (v.dtype, v.shape) for k, v in element.items()} == {
            "inputs": (np.int32, (8,)),
            "targets": (np.int32, (8,)),
            "weights": (np.float32, (8,)),
        }
        inputs, targets = decode(element["inputs"]), decode(element["targets"])
        assert inputs[1:] == targets[:-1]
        assert inputs + targets[-1] in whole
        assert element["weights"].all()


def test_windows_of_validation_cover_it_and_the_last_is_padded(tmp_path):
    file = tmp_path / "a.bin"
    np.arange(1, 101, dtype=np.uint16).tofile(file)
    data = text(file, "validation", validation_fraction=0.3)
    assert len(data) == 4  # 29 targets in windows of 8
    np.testing.assert_array_equal(tokens_of(data), np.arange(71, 101))
    last = list(data)[-1]
    np.testing.assert_array_equal(last["weights"], [1] * 5 + [0] * 3)
    np.testing.assert_array_equal(last["targets"], [96, 97, 98, 99, 100, 0, 0, 0])


def test_windows_of_training_drop_what_is_left(tmp_path):
    file = tmp_path / "a.bin"
    np.arange(20, dtype=np.uint16).tofile(file)
    data = text(file, validation_fraction=0)
    assert sorted(epoch(data, 0, 2)[:, 0]) == [0, 8]
    assert sorted(epoch(data, 1, 2)[:, 0]) == [0, 8]
    assert all(window(data, i)["weights"].all() for i in range(4))


@pytest.mark.parametrize("num_files", [1, 3])
def test_training_and_validation_share_no_token(tmp_path, num_files):
    for i, part in enumerate(
        np.array_split(np.arange(500, dtype=np.uint16), num_files)
    ):
        part.tofile(tmp_path / f"{i}.bin")
    held_out = tokens_of(text(tmp_path, "validation", validation_fraction=0.5))
    train = text(tmp_path, validation_fraction=0.5)
    trained_on = {
        *(token for i in range(31) for token in window(train, i)["inputs"]),
        *(token for i in range(31) for token in window(train, i)["targets"]),
    }
    assert trained_on == set(range(249))  # 31 windows of 8, and the last target
    assert set(held_out) == set(range(250, 500))


def test_one_file_holds_out_its_end(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("a" * 300 + "b" * 100)
    train = text(file, validation_fraction=0.25)
    assert set(epoch(train, 0, 37).flat) == {ord("a")}
    held_out = tokens_of(text(file, "validation", validation_fraction=0.25))
    assert decode(held_out) == "b" * 100


# Files of text.


def test_the_default_text_is_the_standard_library_split_by_file():
    pieces = corpus.split_corpus("", validation_fraction=0.05, token_dtype="uint16")
    names = {split: {p.name for p in pieces[split]} for split in pieces}
    assert not names["train"] & names["validation"]
    # The choice must not move between interpreters, runs and machines.
    assert {"gzip.py", "pprint.py", "urllib/request.py"} <= names["validation"]
    assert {"argparse.py", "ast.py", "json/decoder.py"} <= names["train"]
    everything = names["train"] | names["validation"]
    assert not [n for n in everything if {"test", "site-packages"} & {*n.split("/")}]
    sizes = {split: sum(map(len, pieces[split])) for split in pieces}
    assert 4e6 < sizes["train"] < 2e7
    assert 1e5 < sizes["validation"] < 1e6


def test_the_default_text_trains_on_python():
    data = text("", sequence_length=256, vocab_size=256)
    source = "".join(decode(window(data, i)["inputs"]) for i in range(200))
    assert "def " in source
    assert "import " in source
    assert "self." in source


def test_a_folder_of_text_holds_out_whole_files(tmp_path):
    write_text(tmp_path, 26)
    held_out = decode(tokens_of(text(tmp_path, "validation", validation_fraction=0.2)))
    assert held_out.endswith("\0")
    files = held_out.split("\0")[:-1]
    assert 1 <= len(files) < 13
    assert all(file == file[0] * 100 for file in files)
    train = text(tmp_path, validation_fraction=0.2)
    trained_on = set(decode(epoch(train, 0, 100).reshape(-1)))
    assert not trained_on & {file[0] for file in files}


def test_files_added_to_a_folder_move_no_other_file_to_the_other_split(tmp_path):
    def held_out():
        pieces = corpus.split_corpus(
            str(tmp_path), validation_fraction=0.1, token_dtype="uint16"
        )
        return {piece.name for piece in pieces["validation"]}

    write_text(tmp_path, 100)
    before = held_out()
    write_text(tmp_path, 200)
    after = held_out()
    assert before == {name for name in after if name < "100.txt"}
    assert len(after) > len(before) > 1


def test_small_folders_have_a_file_in_either_split(tmp_path):
    write_text(tmp_path, 2)
    for fraction in (0.001, 0.999):
        for split in ("train", "validation"):
            assert len(text(tmp_path, split, validation_fraction=fraction)) >= 12


def test_a_folder_of_one_text_holds_out_its_end(tmp_path):
    write_text(tmp_path, 1)
    assert len(tokens_of(text(tmp_path, "validation", validation_fraction=0.2))) == 20


def test_a_folder_leaves_out_hidden_files_and_warns_of_binary_ones(tmp_path):
    write_text(tmp_path, 1)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("X" * 50)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.txt").write_text("b" * 50)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n")
    (tmp_path / "empty.txt").touch()
    with pytest.warns(UserWarning, match=r"1 of 4 files are not UTF-8.*image\.png"):
        data = text(tmp_path, validation_fraction=0)
    assert set(decode(epoch(data, 0, 18).reshape(-1))) == set("Ab\0")


@pytest.mark.parametrize("suffix", ["txt", "bin"])
def test_files_named_validation_are_held_out(tmp_path, suffix):
    held_out = ["val.{}", "fine_val_000.{}", "validation/a.{}", "Valid.{}"]
    trained_on = ["train.{}", "retrieval.{}", "trainval_1.{}", "valley/a.{}"]
    for mark, names in ((b"v", held_out), (b"t", trained_on)):
        for name in names:
            file = tmp_path / name.format(suffix)
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(mark * 40)
    pieces = corpus.split_corpus(
        str(tmp_path), validation_fraction=0.05, token_dtype="uint16"
    )
    for split, names in (("train", trained_on), ("validation", held_out)):
        assert {p.name for p in pieces[split]} == {n.format(suffix) for n in names}


# Files of tokens.


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files_are_read_as_their_dtype(tmp_path, dtype):
    tokens = np.random.default_rng(0).integers(0, 60_000, 100).astype(dtype)
    tokens.tofile(tmp_path / "a.bin")
    data = text(tmp_path / "a.bin", "validation", token_dtype=dtype)
    np.testing.assert_array_equal(tokens_of(data), tokens[-5:])
    train = text(tmp_path / "a.bin", token_dtype=dtype)
    starts = sorted(epoch(train, 0, 11)[:, 0])
    np.testing.assert_array_equal(starts, sorted(tokens[:88:8]))


def test_token_files_larger_than_memory_are_mapped(tmp_path):
    file = tmp_path / "a.bin"
    with file.open("wb") as stream:  # a sparse 4 TiB
        stream.seek(2**42)
        np.arange(1, 5, dtype=np.uint16).tofile(stream)
    data = text(file, "validation", sequence_length=2**20)
    last = window(data, len(data) - 1)
    counted = last["targets"][last["weights"] > 0]
    np.testing.assert_array_equal(counted[-4:], [1, 2, 3, 4])
    assert not window(text(file, sequence_length=2**20), 0)["inputs"].any()


def test_a_thousand_token_files_need_no_thousand_descriptors(tmp_path):
    for i in range(1100):
        (tmp_path / f"{i:04}.bin").write_bytes(bytes(20))
    text(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) < 600


def test_windows_run_across_token_files_and_the_end_of_all_is_held_out(tmp_path):
    tokens = np.arange(100, dtype=np.uint16)
    for name, part in zip("abc", np.split(tokens, [3, 65]), strict=True):
        part.tofile(tmp_path / f"{name}.bin")
    (tmp_path / "prepare.py").write_text("not tokens")
    held_out = text(tmp_path, "validation", validation_fraction=0.4)
    np.testing.assert_array_equal(tokens_of(held_out), tokens[60:])
    windows = epoch(text(tmp_path, validation_fraction=0.4), 0, 7)
    first = windows[np.argsort(windows[:, 0])]
    np.testing.assert_array_equal(first, tokens[:56].reshape(7, 8))


@pytest.mark.parametrize(
    ("magic", "dtype"), [(20240520, "uint16"), (20240801, "uint32")]
)
def test_the_header_of_llm_c_token_files_is_skipped(tmp_path, magic, dtype):
    file = tmp_path / "a.bin"
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, 40
    tokens = np.arange(40).astype(dtype)
    file.write_bytes(header.tobytes() + tokens.tobytes())
    data = text(file, "validation", validation_fraction=0.99, token_dtype=dtype)
    np.testing.assert_array_equal(tokens_of(data), tokens)
    other = "uint32" if dtype == "uint16" else "uint16"
    with pytest.raises(UserError, match=f"header says 40 tokens of {dtype}"):
        text(file, token_dtype=other)


def test_a_token_outside_the_vocabulary_is_named_with_its_file(tmp_path):
    tokens = np.zeros(6000, np.uint32)
    tokens.tofile(tmp_path / "a.bin")
    tokens[[10, 5000]] = 50_000, 2**31
    tokens.tofile(tmp_path / "b.bin")

    def data(**options):
        return text(
            tmp_path, "validation", validation_fraction=0.9, token_dtype="uint32",
            **options,
        )  # fmt: skip

    with pytest.raises(UserError, match=r"b\.bin: token 50000 at position 10 is not.*"):
        data(vocab_size=50_000)
    for limit in (None, 60_000):  # beyond the sample, and beyond int32
        lazily = data(vocab_size=limit)
        assert not window(lazily, 0)["inputs"].any()
        with pytest.raises(UserError, match=r"b\.bin: token 2147483648 at.* 5000 "):
            list(lazily)


# Mistakes.


def binary(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_bytes(b"text\0")
    return tmp_path / "a.txt"


def latin(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_bytes("caf\xe9 au lait".encode("latin-1"))
    return tmp_path / "a.txt"


def missing(tmp_path: Path) -> Path:
    return tmp_path / "nothing"


def empty_folder(tmp_path: Path) -> Path:
    return tmp_path


def empty_text(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").touch()
    return tmp_path / "a.txt"


def empty_tokens(tmp_path: Path) -> Path:
    (tmp_path / "a.bin").touch()
    return tmp_path


def odd_tokens(tmp_path: Path) -> Path:
    (tmp_path / "a.bin").write_bytes(bytes(99))
    return tmp_path / "a.bin"


def short(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("12345678")
    return tmp_path / "a.txt"


def enough(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("0123456789" * 9)
    return tmp_path / "a.txt"


def only_validation(tmp_path: Path) -> Path:
    (tmp_path / "val.bin").write_bytes(bytes(100))
    return tmp_path


def dangling(tmp_path: Path) -> Path:
    (tmp_path / "a.bin").symlink_to(tmp_path / "gone")
    return tmp_path


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (missing, {}, "nothing: no such file or folder; set data.path"),
        (empty_folder, {}, "has no text and no .bin files; set data.path"),
        (empty_text, {}, r"a\.txt: the file is empty; set"),
        (empty_tokens, {}, r"a\.bin: the file is empty; remove"),
        (binary, {}, r"a\.txt: not UTF-8 text \(a zero byte at 4\); convert"),
        (latin, {}, r"a\.txt: not UTF-8 text \(.* at byte 3\); convert"),
        (odd_tokens, {}, r"a\.bin: 99 bytes are not a whole number of uint16"),
        (dangling, {}, r"a\.bin: cannot be read \(No such file"),
        (only_validation, {}, r"val\.bin: .*named as validation data; rename"),
        (short, {}, "train split has 8 tokens, and needs 9 with sequence_length=8"),
        (
            short,
            {"split": "validation", "validation_fraction": 0},
            "validation split has 0 tokens, and needs 2 .*data.validation_fraction",
        ),
        (enough, {"split": "test"}, "split 'test' is unknown: use 'train' or"),
        (enough, {"token_dtype": "int16"}, "data.token_dtype 'int16' is unknown: use"),
        (enough, {"sequence_length": 0}, "data.sequence_length=0: use"),
        (enough, {"validation_fraction": 1}, "data.validation_fraction=1: use"),
        (enough, {"seed": -1}, "seed=-1: use"),
        (enough, {"vocab_size": 57}, r"a\.txt: token 57 at position 9 is not below"),
        (
            enough,
            {"split": "validation", "validation_fraction": 0.5, "vocab_size": 57},
            r"a\.txt: token 57 at position 49 is not below",
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_mistake_is_one_line_that_says_what_to_do(tmp_path, make, options, message):
    path = make(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        text(path, **{"validation_fraction": 0, **options})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "function"), [("a.txt", "read_bytes"), ("a.bin", "open")]
)
def test_a_file_without_permission_is_named(tmp_path, monkeypatch, name, function):
    # Not by chmod, which does not stop root.
    def refuse(self, *args):
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / name).write_bytes(b"x" * 100)
    monkeypatch.setattr(Path, function, refuse)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UserError, match=rf"{name}: cannot be read \(Permission"):
            text(path)


def test_a_folder_without_permission_is_named(tmp_path, monkeypatch):
    def scandir(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(corpus.os, "scandir", scandir)
    with pytest.raises(UserError, match=f"{tmp_path}: cannot be read"):
        text(tmp_path)


# Entropy and bytes.


def test_a_cycle_has_no_bigram_entropy():
    assert bigram_entropy(np.tile([3, 1, 2], 50), 4) == pytest.approx(0, abs=1e-12)


def test_bigram_entropy_of_a_markov_chain_is_its_closed_form():
    # After 0 comes 0 or 1, equally often; after 1 always 0: 4 of 6 pairs begin with 0.
    tokens = np.append(np.tile([0, 0, 1], 50), 0)
    expected = 2 / 3 * math.log(2)
    assert bigram_entropy(tokens, 2) == pytest.approx(expected, rel=1e-12)


def test_bigram_entropy_of_independent_tokens_approaches_log_k():
    tokens = np.random.default_rng(0).integers(0, 8, 200_000)
    assert bigram_entropy(tokens, 256) == pytest.approx(math.log(8), abs=1e-3)


def test_bigram_entropy_counts_windows_by_their_weights(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 4, 1000).astype(np.uint16)
    tokens.tofile(tmp_path / "a.bin")
    data = text(tmp_path / "a.bin", "validation", validation_fraction=0.5)
    assert len(data) * 8 > 499  # the last window is padded
    assert bigram_entropy(data, 4) == pytest.approx(bigram_entropy(tokens[500:], 4))


def test_bigram_entropy_refuses_what_it_cannot_count(tmp_path):
    with pytest.raises(ValueError, match="infinite"):
        bigram_entropy(text(enough(tmp_path)), 256)
    with pytest.raises(ValueError, match="no pair"):
        bigram_entropy(np.array([1]), 256)


@given(st.text())
def test_text_survives_encoding(string):
    tokens = encode(string)
    assert tokens.dtype == np.int32
    assert decode(tokens) == string


def test_bytes_that_are_not_text_decode_to_replacement_characters():
    assert decode(np.array([104, 105, 255])) == "hi\ufffd"
