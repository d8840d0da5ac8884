"""Files of text and of tokens, split into training and validation."""

from pathlib import Path

import numpy as np
import pytest

from jshard.data.text import corpus
from jshard.data.tokenizers.tokenizer import ByteTokenizer
from jshard.system.errors import UserError
from texts import enough, epoch, text, tokens_of, window, write_text

decode = ByteTokenizer().decode

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


def test_folders_of_few_files_hold_out_the_last_tokens_and_no_whole_file(tmp_path):
    write_text(tmp_path, 2)
    held_out = tokens_of(text(tmp_path, "validation", validation_fraction=0.05))
    assert decode(held_out) == "B" * 9 + "\0"
    for split in ("train", "validation"):  # a file each is no more than asked for
        assert len(text(tmp_path, split, validation_fraction=0.5)) >= 12


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
    with pytest.warns(UserWarning, match=r"1 of 4 files that are not.*image\.png"):
        data = text(tmp_path, validation_fraction=0)
    assert set(decode(epoch(data, 0, 18).reshape(-1))) == set("Ab\0")


@pytest.mark.parametrize("suffix", ["txt", "bin"])
def test_files_named_validation_are_held_out(tmp_path, suffix):
    held_out = ["val.{}", "fine_val_000.{}", "validation/a.{}", "Valid.{}"]
    trained_on = ["retrieval.{}", "trainval_1.{}", "valley/a.{}"]
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
        (odd_tokens, {}, r"a\.bin: 99 bytes are not a multiple of uint16"),
        (dangling, {}, r"a\.bin: cannot be read \(No such file"),
        (only_validation, {}, r"val\.bin: .*named as validation or test data; rename"),
        (short, {}, "train split has 8 tokens but needs 9 with sequence_length=8"),
        (
            short,
            {"split": "validation", "validation_fraction": 0},
            "validation split has 0 tokens but needs 2 .*data.validation_fraction",
        ),
        (enough, {"split": "test"}, "split 'test' is unknown: use 'train' or"),
        (enough, {"token_dtype": "int16"}, "data.token_dtype 'int16' is unknown: use"),
        (enough, {"sequence_length": 0}, "sequence_length=0: use"),
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
