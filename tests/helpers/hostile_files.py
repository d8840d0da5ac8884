"""More of what strangers write: images, runs, lists of steps, schedulers, adapters, and
the databases that a checkpoint's arrays are in.

Readers are as in tests/helpers/damaged_files.py.
"""

import io
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import tensorstore
from hypothesis import strategies as st
from ml_collections import ConfigDict

from damage import VALUES, changed_bytes, changed_json
from damaged_files import PLACES, _adapted
from jshard.data.images.image_files import Decoder
from jshard.data.images.image_sources import FORMATS, EncodedImage
from jshard.data.text.records import cut, read_records, read_texts
from jshard.recipe.changes import read_notes
from jshard.recipe.config.run_config import complete
from jshard.recipe.config.settings import settings_of
from jshard.storage.checkpoint.buckets import step_list
from jshard.storage.checkpoint.checkpointer import Checkpointer
from jshard.storage.checkpoint.restore import restore_state
from jshard.storage.hub import peft
from jshard.storage.hub.adapters import reading
from jshard.storage.hub.adapters.reading import (
    check_adapters,
    check_base,
    read_adapters,
)
from jshard.system.compat.orbax import database
from jshard.system.jobs.cluster import find_cluster
from jshard.system.jobs.peers import Peers
from jshard.system.jobs.schedulers import gpus_seen
from jshard.training.report.run_report import write_report
from jshard.training.run.start import find_start


def images_reader(folder: Path):
    """An image of any format, whatever its name says."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    image.init()
    pixels = np.random.default_rng(0).integers(0, 256, (20, 24, 3), np.uint8)
    contents = []
    for kind in FORMATS:
        file = io.BytesIO()
        if kind in image.SAVE:
            image.fromarray(pixels).save(file, kind)
            contents.append(file.getvalue())
    file, decoder = folder / "image.jpg", Decoder(3, most_broken=10**9)

    def read() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            decoder.decode(EncodedImage(file.read_bytes(), 0, "image.jpg"))

    return file, st.sampled_from(contents).flatmap(lambda x: changed_bytes(x, 60)), read


def run_reader(folder: Path, name: str = "notes.json"):
    """A file of a run that is reported, and gone on with: the report raises nothing."""
    sample = {"step": 2, "eval_loss": 2.5, "text": "words"}
    picture = {"step": 2, "picture": "samples/x-2.png"}
    given = {"steps": 8, "batch_size": 8, "checkpoint": {"every": 2}}
    config: Any = complete(ConfigDict(given), "tiny.py")
    lines = [{"step": i, "time": i / 2, "loss": 3.0 / i} for i in range(1, 5)]
    lines[1] |= {"eval_loss": 2.5, "learning_rate": 1e-3}
    notes = {
        "recipe": "tiny.py", "changed": ["steps"], "resumed": [2], "run": "ab",
        "start_up": "mesh 8 x cpu", "references": {"uniform": 4.2},
        "generated": [sample], "samples": {"x": picture, "y": sample},
        "pictures": [{"png": "iVBORw0KGgo=", "caption": "3"}],
        "stopped": {"step": 4, "steps": 8, "why": "enough"},
    }  # fmt: skip
    texts = {
        "notes.json": json.dumps(notes),
        "config.json": json.dumps({"recipe": "tiny", **config.to_dict()}),
    }
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    for file, text in texts.items():
        (folder / file).write_text(text)
    if name == "metrics.jsonl":
        strategy = changed_json(lines).map(json.loads).map(_lines)
    else:
        strategy = changed_json(json.loads(texts[name])).map(str.encode)

    def read() -> None:
        write_report(folder)
        read_notes(folder)
        find_start(folder, settings_of(config), config.to_dict(), Peers())

    return folder / name, strategy, read


def _lines(values: list[Any]) -> bytes:
    return b"".join(json.dumps(x).encode() + b"\n" for x in values)


def run_config_reader(folder: Path):
    return run_reader(folder, "config.json")


def metrics_reader(folder: Path):
    return run_reader(folder, "metrics.jsonl")


def metrics_bytes_reader(folder: Path):
    file, _, read = run_reader(folder, "metrics.jsonl")
    return file, changed_bytes(file.read_bytes(), 400), read


def steps_reader(folder: Path):
    """A bucket's list of complete steps."""
    file = folder / "steps.json"
    content = {"format": 1, "owner": "ab", "steps": {"1": "1-ab", "3": "3-cd"}}
    objects: Any = SimpleNamespace(
        url="s3://bucket/run", read=lambda name: (file.read_bytes(), b"1")
    )
    strategy = changed_json(content | {"write": "cd"}).map(str.encode)
    return file, strategy, lambda: step_list.read(objects)


ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {
        "SLURM_JOB_ID": "17", "SLURM_STEP_NODELIST": "node[01-02]",
        "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
        "SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0,1",
    },
    {
        "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:3491",
    },
    {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "host0", "MASTER_PORT": "1234", "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "x",
    },
    {"JOB_COMPLETION_INDEX": "2", "JAX_COORDINATOR_ADDRESS": "a:1"},
    {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"},
    {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    {"JSHARD_LOCAL": "1/2", "CUDA_VISIBLE_DEVICES": "0,1", "RANK": "1"},
)  # fmt: skip


def schedulers_reader(folder: Path):
    """The environment of a process of a job, as JSON."""
    file = folder / "environment.json"
    words = st.text("0123456789-+,./:()[]x \0\n\u0663", max_size=9)
    value = words | VALUES.map(str) | st.sampled_from(["9" * 30, "1_0", "-0", "0x1"])

    @st.composite
    def changed(draw) -> bytes:
        environ = dict(draw(st.sampled_from(ENVIRONMENTS)))
        for name in draw(st.lists(st.sampled_from([*environ]), max_size=3)):
            environ[name] = draw(value)
        return json.dumps(environ).encode()

    def read() -> None:
        environ = json.loads(file.read_text())
        find_cluster({}, environ)
        find_cluster({"num_processes": 4, "coordinator": "a:1"}, environ)
        gpus_seen(environ)

    return file, changed(), read


def adapters_reader(folder: Path, name: str = peft.CONFIG):
    state = _adapted()
    places = reading._places(reading._trained(state), PLACES)
    found = {x for place in places.values() for x in place.names}
    shapes = {x: (2, 4) if "lora_A" in x else (4, 2) for x in found}
    tensors = {x: np.ones(shape, np.float32) for x, shape in shapes.items()}
    safetensors.numpy.save_file(tensors, folder / peft.TENSORS)
    content = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 4.0, "target_modules": ["weight"],
        "bias": "none", "base_model_name_or_path": "owner/model", "use_dora": False,
        "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False,
    }  # fmt: skip
    (folder / peft.CONFIG).write_text(json.dumps(content))
    if name == peft.CONFIG:
        strategy = changed_json(content).map(str.encode)
    else:
        strategy = changed_bytes((folder / name).read_bytes(), 300)

    def read() -> None:
        check_adapters(folder, state, PLACES)
        check_base(folder, None)
        read_adapters(folder, state, PLACES)

    return folder / name, strategy, read


def adapter_tensors_reader(folder: Path):
    return adapters_reader(folder, peft.TENSORS)


def _saved(folder: Path) -> Path:
    with Checkpointer(folder / "run") as checkpointer:
        checkpointer.save(_adapted())
    return folder / "run" / "0"


def database_reader(folder: Path, kind: str = "manifest"):
    """The database of a checkpoint's arrays: its own manifest, or its data."""
    step = _saved(folder)
    place = Path(database(step / "state")["base"]["path"])
    data = max((place / "d").iterdir(), key=lambda file: file.stat().st_size)
    file = data if kind == "data" else place / "manifest.ocdbt"
    return (
        file,
        changed_bytes(file.read_bytes(), 200),
        lambda: restore_state(step, _adapted()),
    )


def database_data_reader(folder: Path):
    return database_reader(folder, "data")


def zarr_reader(folder: Path):
    """What the database says of one array."""
    step, file = _saved(folder), folder / "zarr.json"
    store = tensorstore.KvStore.open(database(step / "state")).result()
    keys = [x.decode() for x in store.list().result() if x.endswith(b"zarr.json")]
    key = next(x for x in sorted(keys) if "kernel" in x)
    content = store.read(key).result().value
    strategy = changed_json(json.loads(content)).map(str.encode)

    def read() -> None:
        store.write(key, file.read_bytes()).result()
        try:
            restore_state(step, _adapted())
        finally:
            store.write(key, content).result()

    return file, strategy, read


def arrow_reader(folder: Path):
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"text": ["one", "two", ""], "n": [[1], [], None]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return _records(folder / "data.arrow", sink.getvalue().to_pybytes())


def parquet_reader(folder: Path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"text": ["one", "two", ""], "n": [[1], [], None]})
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink)
    return _records(folder / "data.parquet", sink.getvalue().to_pybytes())


def _records(file: Path, content: bytes):
    def read() -> None:
        for part in cut(file, 16):
            list(read_records(part))
            list(read_texts(part, "text"))

    return file, changed_bytes(content, 200), read


MORE_READERS = (
    arrow_reader,
    parquet_reader,
    images_reader,
    run_reader,
    run_config_reader,
    metrics_reader,
    metrics_bytes_reader,
    steps_reader,
    schedulers_reader,
    adapters_reader,
    adapter_tensors_reader,
    database_reader,
    database_data_reader,
    zarr_reader,
)
# Those that change no names, which only a process in a jail may follow.
CONTENT_READERS = (
    images_reader,
    metrics_bytes_reader,
    schedulers_reader,
    adapter_tensors_reader,
    database_reader,
    database_data_reader,
)
SLOW_READERS = (database_reader, database_data_reader)
