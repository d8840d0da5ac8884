"""Files of strangers: damaged ones are a UserError, names stay in their folder.

Every reader gets valid files with bytes or values replaced. It must return or raise a
`UserError`: no other exception, no hang, no memory for what a header only claims.
"""

import ast
import copy
import gzip
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jshard
from jshard.checkpoint import huggingface, manifest, metadata
from jshard.checkpoint.safetensors_file import DTYPES, find_tensors
from jshard.checkpoint.safetensors_write import INDEX, SINGLE
from jshard.checkpoint.untrusted import path_inside, read_json
from jshard.cli.command import expected_ending
from jshard.distributed import job
from jshard.training.data.corpus import split_corpus
from jshard.training.data.records import cut, read_records, with_records
from jshard.training.tokenizer import FileTokenizer
from small_tokenizer import make_tokenizer

REPOSITORY = Path(__file__).parents[1]
QUICK, MANY = 40, 3000
DEEP = "[" * 100_000 + "]" * 100_000
MOST_MEMORY = 2**25

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**30])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["../x", "/etc/passwd", ".", "a/../../x", "\0", "\ud800", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.just("format"), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def changed_json(draw, content: Any) -> str:
    """JSON with one value, at any depth, replaced by any other or removed."""
    content = copy.deepcopy(content)
    place: Any = content
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw(st.sampled_from(keys))
        inner = place[key]
        if not inner or not isinstance(inner, dict | list) or draw(st.booleans()):
            break
        place = inner
    if draw(st.integers(0, 4)):
        place[key] = draw(VALUES)
    else:
        del place[key]
    return json.dumps(content)


@st.composite
def changed_bytes(draw, content: bytes, head: int) -> bytes:
    """Bytes cut off, or with up to eight of them replaced, mostly at the beginning."""
    if draw(st.booleans()):
        content = content[: draw(st.integers(0, len(content)))]
    data = bytearray(content)
    for _ in range(draw(st.integers(0, 3))):
        if not data:
            break
        last = min(head, len(data)) if draw(st.integers(0, 3)) else len(data)
        at = draw(st.integers(0, last - 1))
        data[at : at + 8] = draw(st.binary(max_size=8))
    return bytes(data)


def read_or_refuse(read: Callable[[], object]) -> None:
    tracemalloc.start()
    try:
        read()
    except jshard.UserError as error:
        ending = expected_ending(error)
    else:
        ending = 0, ""
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MOST_MEMORY
    assert ending
    assert ending[1].isprintable()  # one line, and nothing that controls terminals


def json_text(value: object) -> bytes:
    return json.dumps(value).encode()


# The readers: a name to a function that writes valid files to a folder and returns the
# file to damage, a strategy for its content, and what reads it.


def tensors_reader(folder: Path):
    file = folder / SINGLE
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, "i1")}
    safetensors.numpy.save_file(arrays, file, metadata={"format": "np"})

    def read() -> None:
        for tensor in find_tensors(folder).values():
            if tensor.dtype in DTYPES and np.prod(tensor.shape):
                np.asarray(tensor.open()).tobytes()

    return file, changed_bytes(file.read_bytes(), 200), read


def tensors_header_reader(folder: Path):
    file, _, read = tensors_reader(folder)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, values = json.loads(data[8 : 8 + length]), data[8 + length :]

    def assembled(text: str) -> bytes:
        return len(text).to_bytes(8, "little") + text.encode() + values

    return file, changed_json(header).map(assembled), read


def index_reader(folder: Path):
    _, _, read = tensors_reader(folder)
    (folder / SINGLE).rename(folder / "x")
    names = {"weight_map": {"a": "x", "b": "x"}}
    return folder / INDEX, changed_json(names).map(str.encode), read


def manifest_reader(folder: Path):
    (folder / "state").mkdir()
    (folder / "state/d").write_bytes(b"values")
    manifest.write(folder, manifest.checksum(folder, "state"))
    content = json.loads((folder / manifest.FILE).read_text())
    strategy = changed_json(content).map(str.encode)
    return folder / manifest.FILE, strategy, lambda: manifest.verify(folder)


def description_reader(folder: Path):
    content = {
        "created": "2026-01-01",
        "step": 3,
        "processes": 1,
        "versions": {"jax": "0.10.2"},
        "mesh": {"fsdp": 8},
        "metrics": {"loss": 1.5},
        "config": {},
        "stacks": ["blocks"],
        "arrays": {"params.w": {"shape": [2, 3], "dtype": "float32", "layer_dims": 0}},
    }
    strategy = changed_json(content).map(str.encode)
    return folder / metadata.FILE, strategy, lambda: metadata.read(folder)


def config_reader(folder: Path):
    content = {"architectures": ["X"], "model_type": "x", "quantization_config": None}
    strategy = changed_json(content).map(str.encode)

    def read() -> None:
        huggingface.is_huggingface(folder)
        huggingface.read_config(folder)

    return folder / "config.json", strategy, read


def token_reader(folder: Path, suffix: str = ".bin"):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 100
    file = folder / "train.bin"
    file.write_bytes(header.tobytes() + np.arange(100, dtype="<u2").tobytes())
    file.with_suffix(".idx").write_bytes(np.array([40, 70, 100], "<u8").tobytes())

    def read() -> None:
        pieces = split_corpus(
            str(folder), validation_fraction=0.5, token_dtype="uint16"
        )
        for piece in [*pieces["train"], *pieces["validation"]]:
            assert piece.read(0, len(piece)).size == len(piece)

    damaged = file.with_suffix(suffix)
    return damaged, changed_bytes(damaged.read_bytes(), 16), read


def token_index_reader(folder: Path):
    return token_reader(folder, ".idx")


def records_reader(folder: Path, suffix: str = "jsonl"):
    file = folder / f"data.{suffix}"
    content = json_text({"text": "one", "n": [1, {"a": 2}]}) + b"\n" + b'{"text": "2"}'
    content = gzip.compress(content) if suffix.endswith("gz") else content

    def read() -> None:
        for part in cut(file, 16):
            list(read_records(part))

    return file, changed_bytes(content, 30), read


def compressed_records_reader(folder: Path):
    return records_reader(folder, "jsonl.gz")


def dataset_reader(folder: Path):
    content = {"_data_files": [{"filename": "data.arrow"}]}
    files = [folder / "data.arrow", folder / "state.json"]
    strategy = changed_json(content).map(str.encode)
    return folder / "state.json", strategy, lambda: with_records(files)


def tokenizer_reader(folder: Path, file: str = "tokenizer.json"):
    pytest.importorskip("tokenizers")
    make_tokenizer(folder)
    (folder / "config.json").write_text('{"eos_token_id": [0, 1], "bos_token_id": 1}')
    content = json.loads((folder / file).read_text())

    def read() -> None:
        tokenizer = FileTokenizer(folder / "tokenizer.json")
        tokenizer.decode(tokenizer.encode("a word"))

    return folder / file, changed_json(content).map(str.encode), read


def tokenizer_config_reader(folder: Path):
    return tokenizer_reader(folder, "tokenizer_config.json")


def token_numbers_reader(folder: Path):
    return tokenizer_reader(folder, "config.json")


READERS = (
    tensors_reader,
    tensors_header_reader,
    index_reader,
    manifest_reader,
    description_reader,
    config_reader,
    token_reader,
    token_index_reader,
    records_reader,
    compressed_records_reader,
    dataset_reader,
    tokenizer_reader,
    tokenizer_config_reader,
    token_numbers_reader,
)


@pytest.mark.parametrize(
    "examples", [QUICK, pytest.param(MANY, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("reader", READERS)
def test_damaged_files_are_read_or_refused(reader, examples, tmp_path):
    file, strategy, read = reader(tmp_path)

    @settings(
        max_examples=examples,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(strategy)
    def check(content: bytes) -> None:
        file.unlink(missing_ok=True)  # a new file: the old one may be mapped
        file.write_bytes(content)
        read_or_refuse(read)

    check()


JSON_READERS = (
    index_reader,
    manifest_reader,
    description_reader,
    config_reader,
    records_reader,
    dataset_reader,
    tokenizer_reader,
    tokenizer_config_reader,
)


@pytest.mark.parametrize("reader", JSON_READERS)
def test_json_that_is_nested_deeply(reader, tmp_path):
    file, _, read = reader(tmp_path)
    file.write_text(DEEP)
    read_or_refuse(read)


@pytest.mark.parametrize("reader", JSON_READERS[:4])
def test_json_that_never_ends(reader, tmp_path):
    file, _, read = reader(tmp_path)
    file.unlink(missing_ok=True)
    file.symlink_to("/dev/zero")
    read_or_refuse(read)
    file.unlink()
    os.mkfifo(file)
    read_or_refuse(read)
    file.unlink()
    with file.open("wb") as stream:  # 1 TiB of holes
        stream.truncate(2**40)
    read_or_refuse(read)


@pytest.mark.parametrize("length", [0, 2**20, 2**31, 2**40, 2**63, 2**64 - 1])
def test_a_header_that_claims_any_length(length, tmp_path):
    file, _, read = tensors_reader(tmp_path)
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(jshard.UserError, match="cannot read"):
        find_tensors(tmp_path)
    read_or_refuse(read)


@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 2**63]},
        {"dtype": "F32", "shape": [2, 3], "data_offsets": [24, 0]},
        {"dtype": "F32", "shape": [-6], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [2, 3], "data_offsets": [-8, 16]},
    ],
)
def test_tensors_outside_their_file(tensor, tmp_path):
    header = json_text({"a": tensor})
    values = bytes(24)
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + values)
    with pytest.raises(jshard.UserError, match="cannot read"):
        find_tensors(tmp_path)


OUTSIDE = ("../x", "a/../../x", "/etc/passwd", "", ".", "..", "a//x", "x\0", 3, None)


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_stay_in_their_folder(name, tmp_path):
    with pytest.raises(ValueError, match="is not the name of a file"):
        path_inside(tmp_path, name)
    (tmp_path / INDEX).write_bytes(json_text({"weight_map": {"a": name}}))
    with pytest.raises(jshard.UserError, match=r"cannot read .*index\.json"):
        find_tensors(tmp_path)
    files = {str(name): {"bytes": 1, "sha256": ""}}
    (tmp_path / manifest.FILE).write_bytes(json_text({"format": 1, "files": files}))
    if isinstance(name, str):
        assert manifest.verify(tmp_path) == ["manifest.json is damaged"]


def test_links_out_of_a_checkpoint_are_refused(tmp_path):
    for link in ("state", "state/d"):
        step = tmp_path / link.replace("/", "-")
        step.mkdir()
        file, _, _ = manifest_reader(step)
        (step / link).rename(tmp_path / f"outside-{step.name}")
        (step / link).symlink_to(tmp_path / f"outside-{step.name}")
        assert file.exists()
        assert len(manifest.verify(step)) == 1
        assert "state" in manifest.verify(step)[0]


def test_links_of_the_hub_s_cache_are_followed(tmp_path):
    blob, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    blob.mkdir()
    snapshot.mkdir()
    file, _, _ = tensors_reader(blob)
    (snapshot / SINGLE).symlink_to(file)
    assert set(find_tensors(snapshot)) == {"a", "b"}


def test_what_is_valid_is_read(tmp_path):
    (tmp_path / "a.json").write_text('{"a": [1, 2]}')
    assert read_json(tmp_path / "a.json") == {"a": [1, 2]}
    assert path_inside(tmp_path, "sub/a.json") == tmp_path / "sub/a.json"
    manifest_reader(tmp_path)
    assert manifest.verify(tmp_path) == []


# What would run code out of a file: unpickling, or evaluating.
RUNS_CODE = {
    "pickle.load", "pickle.loads", "torch.load", "joblib.load", "marshal.loads",
    "yaml.load", "yaml.unsafe_load", "eval", "exec", "shelve.open",
    "pd.read_pickle", "cloudpickle.loads", "dill.loads",
}  # fmt: skip


def test_no_file_is_unpickled_or_evaluated():
    found = []
    for room in ("jshard", "models", "train"):
        for file in (REPOSITORY / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call):
                    name = ast.unparse(node.func)
                    pickles = any(
                        word.arg in ("allow_pickle", "weights_only")
                        and ast.unparse(word.value) != "False"
                        for word in node.keywords
                    )
                    if name in RUNS_CODE or pickles:
                        found.append(f"{file}:{node.lineno}: {name}")
    assert not found


@pytest.mark.parametrize(
    ("coordinator", "bound"),
    [
        ("127.0.0.1:2000", "127.0.0.1:2000"),
        ("localhost:2000", "localhost:2000"),
        ("[::1]:2000", "[::1]:2000"),
        ("node1:2000", None),
        (None, None),
    ],
)
def test_jobs_of_one_machine_listen_to_it_alone(coordinator, bound, monkeypatch):
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    assert job._bind_address(coordinator) == bound
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "10.0.0.1:2000")
    assert job._bind_address(coordinator) is None
