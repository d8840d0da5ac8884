"""Files of strangers: damaged ones are a UserError, and none runs code.

Every reader gets valid files with bytes or values replaced. It must return or raise a
`UserError`: no other exception, no hang, no memory for what a header only claims.
"""

import ast
import gzip
import os
import re
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

import jshard
from damage import json_text, read_or_refuse
from damaged_files import (
    JSON_READERS,
    READERS,
    WHOLE_READERS,
    chat_reader,
    checkpoint_reader,
    manifest_reader,
    tensors_reader,
)
from hostile_files import CONTENT_READERS, SLOW_READERS
from jshard.data.text import token_writer
from jshard.inference.trained.generate_command import read_prompts
from jshard.plan.fit.hardware import find_constants
from jshard.plan.search.result_cache import read_result
from jshard.storage.checkpoint import manifest
from jshard.storage.checkpoint.local.copy_files import Label
from jshard.storage.hub.safetensors_file import find_tensors
from jshard.storage.hub.safetensors_write import SINGLE
from jshard.system.files.untrusted import path_inside, read_json

REPOSITORY = Path(__file__).parents[1]
QUICK, MANY = 15, 400
SLOW = 5  # of readers that start a process or export for each
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module", autouse=True)
def traced_memory():
    """Measures what these tests allocate."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize(
    "examples", [QUICK, pytest.param(MANY, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("reader", [*READERS, *CONTENT_READERS])
def test_damaged_files_are_read_or_refused(reader, examples, tmp_path):
    file, strategy, read = reader(tmp_path)
    if examples == QUICK and reader in (chat_reader, checkpoint_reader, *SLOW_READERS):
        examples = SLOW

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


@pytest.mark.parametrize("reader", JSON_READERS)
def test_json_that_is_nested_deeply(reader, tmp_path):
    file, _, read = reader(tmp_path)
    file.write_text(DEEP)
    read_or_refuse(read)


@pytest.mark.parametrize("reader", WHOLE_READERS)
def test_a_file_that_never_ends_or_is_none(reader, tmp_path):
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
    file.unlink()
    file.mkdir()
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
PICKLES = ("allow_pickle", "weights_only")


def test_no_file_is_unpickled_or_evaluated():
    found = []
    words = [*PICKLES, *(f"{name}(" for name in RUNS_CODE)]
    for room in ("jshard", "models", "train"):
        for file in (REPOSITORY / room).rglob("*.py"):
            text = file.read_text()
            if not any(word in text for word in words):
                continue  # to parse all takes a second
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call):
                    name = ast.unparse(node.func)
                    pickles = any(
                        word.arg in PICKLES and ast.unparse(word.value) != "False"
                        for word in node.keywords
                    )
                    if name in RUNS_CODE or pickles:
                        found.append(f"{file}:{node.lineno}: {name}")
    assert not found


def test_what_is_nested_deep_is_refused_by_every_command_that_reads_it(tmp_path):
    (tmp_path / "tokens.json").write_text(DEEP)
    (tmp_path / "deep.jsonl").write_text(DEEP + "\n")
    for read in (
        lambda: find_constants(tmp_path / "tokens.json"),
        lambda: read_prompts(tmp_path / "deep.jsonl"),
        lambda: token_writer._begin(tmp_path / "part", {}),
    ):
        with pytest.raises(jshard.UserError, match=r"(tokens\.json|deep\.jsonl).*deep"):
            read()
    with pytest.raises(ValueError, match="nested too deeply"):
        Label.read(DEEP)
    (tmp_path / "tokens.json.gz").write_bytes(gzip.compress(DEEP.encode()))
    with pytest.warns(UserWarning, match="ignored a damaged cache file"):
        assert read_result(tmp_path, "tokens") is None


# What jshard's own processes tell each other, and what is part of the package.
OWN_JSON = """
data/stream_state data/tokenizers/byte_pieces data/tokenizers/chat_template
data/tokenizers/chat_template_program data/tokenizers/tokenizer_settings plan/fit/fitted
plan/search/processes plan/search/worker recipe/changes
storage/checkpoint/local/exchange storage/checkpoint/local/local_copies
storage/checkpoint/participants system/files/untrusted system/jobs/heartbeat
system/jobs/peers system/jobs/supervisor system/network/authenticated training/agreement
training/run/start training/train_command
"""


def test_json_that_others_wrote_passes_one_parser():
    package = REPOSITORY / "jshard"
    found = {
        str(file.relative_to(package).with_suffix(""))
        for file in package.rglob("*.py")
        if re.search(r"json\.loads?\b", file.read_text())
    }
    assert found == set(OWN_JSON.split())
