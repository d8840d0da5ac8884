"""Valid files of every kind that is read, strategies that damage them, and readers.

A reader is a function that writes valid files to a folder and returns the file to
damage, a strategy for its content, and what reads it.
"""

import functools
import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx

import jshard
from checkpoints import make_state
from damage import changed_bytes, changed_json, json_text
from jshard import export, inspect
from jshard.data.files.record_forms import with_records
from jshard.data.text.corpus import split_corpus
from jshard.data.text.records import cut, read_records
from jshard.data.tokenizers.chat import _load_chat, load_chat
from jshard.data.tokenizers.tokenizer import FileTokenizer
from jshard.storage.checkpoint import manifest, metadata
from jshard.storage.checkpoint.checkpointer import Checkpointer
from jshard.storage.hub import exported_tensors as exported
from jshard.storage.hub import huggingface_folder as huggingface
from jshard.storage.hub import peft
from jshard.storage.hub.file_tensor import FileTensor
from jshard.storage.hub.safetensors_file import DTYPES, find_tensors
from jshard.storage.hub.safetensors_write import INDEX, SINGLE
from jshard.system.errors import RunFailed
from small_tokenizer import CHATML, make_tokenizer


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
    array = {"shape": [2, 3], "dtype": "float32", "layer_dims": 0, "random": False}
    content = {
        "created": "2026-01-01",
        "step": 3,
        "processes": 1,
        "versions": {"jax": "0.10.2"},
        "mesh": {"fsdp": 8},
        "metrics": {"loss": 1.5},
        "config": {},
        "stacks": ["blocks"],
        "arrays": {"params.w": array, "opt.w": {"shape": [], "dtype": "int32"}},
    }
    strategy = changed_json(content).map(str.encode)
    return folder / metadata.FILE, strategy, lambda: metadata.read(folder)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(4, 4, rngs=rngs)


class Adapted(nnx.Module):
    """Layers in a Stack with adapters, which train, beside what is frozen."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = jshard.Stack(Layer, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        jshard.nn.add_lora(self, rank=2, alpha=4.0, targets=("up",), rngs=rngs)


PLACES = {
    **{
        f"blocks.{i}.up.kernel": FileTensor((f"layers.{i}.weight",), transposed=True)
        for i in range(2)
    },
    **{f"blocks.{i}.up.bias": FileTensor((f"layers.{i}.bias",)) for i in range(2)},
    **{
        f"norm.{ours}": FileTensor((f"norm.{theirs}",))
        for ours, theirs in (
            ("scale", "weight"),
            ("bias", "bias"),
            ("mean", "running_mean"),
            ("var", "running_var"),
        )
    },
}


@functools.cache
def _adapted() -> jshard.TrainState:
    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(ema_decay=0.9))
    return make_state(
        fsdp.abstract_state(Adapted, optax.sgd(0.1), wrt=nnx.LoRAParam), 0
    )


def checkpoint_reader(folder: Path):
    """The description of a checkpoint that leaves out what is frozen, used by all."""
    base = folder / "base"
    base.mkdir()
    weights = {f"layers.{i}.weight": np.ones((4, 4), np.float32) for i in range(2)}
    names = {name for place in PLACES.values() for name in place.names}
    vectors = dict.fromkeys(names - weights.keys(), np.ones(4, np.float32))
    safetensors.numpy.save_file(weights | vectors, base / SINGLE)
    config = {"model": {"width": 4}, "checkpoint": {"restore": str(base)}}
    with Checkpointer(folder / "run") as checkpointer:
        checkpointer.save(
            _adapted(), metrics={"loss": 1.5}, config=config, frozen_from=base
        )
    step, out = folder / "run/0", folder / "out"
    content = json.loads((step / metadata.FILE).read_text())

    def exports(ema: bool) -> None:
        about = metadata.read(step)
        chosen = exported.Exported(about, "bfloat16", ema)
        for tensors in (chosen.merged(PLACES, {}), chosen.adapters(PLACES)):
            exported.read(step, about, tensors)
        peft.write_config(folder, about, PLACES)

    def export_all() -> None:
        shutil.rmtree(out, ignore_errors=True)
        manifest.write(
            step, manifest.read(step) | manifest.checksum(step, metadata.FILE)
        )
        export.export(step, out)

    def read() -> None:
        problems = []
        for use in (
            lambda: inspect.describe(step),
            lambda: inspect.describe(step, full=True),
            lambda: exports(False),
            lambda: exports(True),
            export_all,
        ):
            try:
                use()
            except (jshard.UserError, RunFailed) as error:
                problems.append(error)
        if problems:
            raise problems[0]

    return step / metadata.FILE, changed_json(content).map(str.encode), read


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


def chat_reader(folder: Path):
    """A template, which another process compiles, and a conversation to write."""
    pytest.importorskip("jinja2")
    file, _, _ = tokenizer_reader(folder)
    tokenizer = FileTokenizer(file)
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant")]

    def read() -> None:
        _load_chat.cache_clear()
        load_chat(tokenizer, "here").encode({"messages": turns}, "here")

    damaged = changed_bytes(CHATML.encode(), len(CHATML))
    return folder / "chat_template.jinja", damaged, read


READERS = (
    tensors_reader,
    tensors_header_reader,
    index_reader,
    manifest_reader,
    description_reader,
    checkpoint_reader,
    config_reader,
    token_reader,
    token_index_reader,
    records_reader,
    compressed_records_reader,
    dataset_reader,
    tokenizer_reader,
    tokenizer_config_reader,
    token_numbers_reader,
    chat_reader,
)

JSON_READERS = (
    index_reader,
    manifest_reader,
    description_reader,
    config_reader,
    checkpoint_reader,
    records_reader,
    dataset_reader,
    tokenizer_reader,
    tokenizer_config_reader,
)

# Of files that are read as a whole.
WHOLE_READERS = (
    index_reader,
    manifest_reader,
    description_reader,
    config_reader,
    tokenizer_reader,
    tokenizer_config_reader,
    token_numbers_reader,
    chat_reader,
)
