"""Names on the Hub become folders: with the real client, of a hub on loopback."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

import pytest

from checkpoints import small_disk
from loopback_hub import LoopbackHub

pytest.importorskip("huggingface_hub", reason="needs jshard[hub]")

CLIENT = """
import json, os, sys
from jshard.system.errors import RunFailed, UserError
from jshard.storage.hub.huggingface_folder import model_path
from jshard.storage.hub.online.download import (
    cached_path,
    data_path,
    local_path,
    pin,
    pin_mixture,
)

def offline(function, *arguments):
    from huggingface_hub import constants  # which one test takes away

    constants.HF_HUB_OFFLINE = True  # as its variable sets it at the start
    try:
        return globals()[function](*arguments)
    finally:
        constants.HF_HUB_OFFLINE = False

for line in sys.stdin:
    function, arguments, os.environ["HF_TOKEN"] = json.loads(line)
    try:
        answer = str(globals()[function](*arguments))
    except (RunFailed, UserError) as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
"""


class Client:
    """A process that uses a hub, with a cache of its own."""

    def __init__(self, hub: LoopbackHub, folder: Path, **environment: str) -> None:
        self.cache = folder / "hf/hub"
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", CLIENT],
            cwd=folder,
            env=os.environ
            | hub.environment(folder / "hf")
            | {"PYTHONPATH": str(Path(__file__).parents[3])}
            | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )

    def ask(self, function: str, *arguments: Any, token: str = "") -> str:
        assert self._process.stdin
        assert self._process.stdout
        print(
            json.dumps([function, arguments, token]),
            file=self._process.stdin,
            flush=True,
        )
        return json.loads(self._process.stdout.readline() or self.said())

    def said(self) -> str:
        self._said.seek(0)
        return self._said.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()


@pytest.fixture(scope="module")
def hub():
    with LoopbackHub() as hub:
        yield hub


@pytest.fixture(scope="module")
def client(hub, tmp_path_factory):
    with Client(hub, tmp_path_factory.mktemp("client")) as client:
        yield client


def test_a_name_is_pinned_and_its_config_alone_is_downloaded(hub, client):
    files = {"config.json": "{}", "model.safetensors": "weights"}
    first = hub.add("pin/model", files, tag="v1")
    assert client.ask("pin", "pin/model") == f"hf://pin/model@{first}"
    assert client.ask("pin", "pin/model@v1") == f"hf://pin/model@v1@{first}"
    assert hub.count("GET", "pin/model/resolve") == 1
    second = hub.add("pin/model", {**files, "new": ""})
    assert client.ask("pin", "pin/model") == f"hf://pin/model@{second}"
    # What a run has recorded stays, without a request; another revision's does not.
    before = hub.requests.copy()
    recorded = [None, f"hf://pin/other@{second}", f"hf://pin/model@{first}"]
    assert client.ask("pin", "pin/model", "model", recorded) == recorded[2]
    assert client.ask("pin", recorded[2]) == recorded[2]
    assert hub.requests == before
    assert client.ask("pin", "pin/model@v1", "model", recorded) != recorded[2]
    assert client.ask("pin", "runs/a/b") == "runs/a/b"


def test_mixtures_of_datasets_are_pinned(hub, client):
    files = {"README.md": "", "train.jsonl": "{}"}
    a, b = (hub.add(f"mix/{x}", files, kind="datasets") for x in "ab")
    names = [f"hf://datasets/mix/a@{a}", f"hf://datasets/mix/b@{b}"]
    both = f"{names[0]}:0.7,{names[1]}:0.3"
    assert client.ask("pin_mixture", "mix/a", "stream") == names[0]
    assert client.ask("pin_mixture", "mix/a:0.7, mix/b:0.3", "stream") == both
    assert client.ask("pin_mixture", both, "stream") == both
    mixed = "hf://datasets/mix/a:1,local/:2"
    assert client.ask("pin_mixture", mixed, "dataset") == f"{names[0]}:1,local/:2"
    assert client.ask("pin_mixture", "a/:1,b c:x", "dataset") == "a/:1,b c:x"
    hub.add("mix/a", {**files, "new": ""}, kind="datasets")
    before = hub.requests.copy()
    assert client.ask("pin_mixture", "mix/a:1,mix/b:2", "stream", [both]) == (
        f"{names[0]}:1,{names[1]}:2"
    )
    assert hub.requests == before
    said = client.ask("pin_mixture", "mix/none:1", "stream")
    assert said.startswith("UserError: there is neither a folder mix/none here nor a")


def test_only_the_files_that_a_model_needs_are_downloaded(hub, client):
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[0]}}
    needed = {
        "config.json": "{}",
        "generation_config.json": "{}",
        "tokenizer.json": "{}",
        "tokenizer_config.json": "{}",
        "model.safetensors.index.json": json.dumps(index),
        **dict.fromkeys(shards, "weights"),
    }
    others = (
        ".gitattributes",
        "README.md",
        "consolidated.safetensors",
        "model.fp16.safetensors",
        "model.gguf",
        "original/consolidated.00.pth",
        "original/model.safetensors",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    )
    commit = hub.add("needed/model", needed | dict.fromkeys(others, "not needed"))
    folder = Path(client.ask("model_path", "needed/model"))
    assert folder.name == commit
    assert {x.name for x in folder.rglob("*")} == needed.keys()
    said = f"downloading 2 files of weights of hf://needed/model@{commit}"
    assert client.said().count(said) == 1
    # Of a single file beside an index transformers takes the file.
    hub.add("needed/both", needed | {"model.safetensors": "weights"})
    folder_of_both = Path(client.ask("model_path", "needed/both"))
    found = {x.name for x in folder_of_both.rglob("*.safetensors")}
    assert found == {"model.safetensors"}
    # A name with its commit is in the cache: not one request more.
    before = hub.requests.copy()
    assert client.ask("model_path", f"hf://needed/model@{commit}") == str(folder)
    assert client.ask("cached_path", f"needed/model@{commit}") == str(folder)
    assert hub.requests == before
    assert client.said().count(said) == 1


def test_data_is_a_file_or_a_folder_of_a_dataset(hub, client):
    files = {"README.md": "0", "a/train.jsonl": "1", "a/val.jsonl": "2", "b/c.bin": "3"}
    commit = hub.add("data/set", files, kind="datasets")
    name = client.ask("pin", "hf://datasets/data/set/a/val.jsonl", "dataset")
    assert name == f"hf://datasets/data/set@{commit}/a/val.jsonl"
    assert Path(client.ask("data_path", name)).read_text() == "2"
    assert hub.count("GET", "data/set/resolve") == 2
    folder = Path(client.ask("data_path", "hf://datasets/data/set/a"))
    assert {x.name for x in folder.iterdir()} == {"train.jsonl", "val.jsonl"}
    whole = Path(client.ask("data_path", f"hf://datasets/data/set@{commit}"))
    assert (whole / "b/c.bin").read_text() == "3"
    assert client.ask("data_path", "data/set") == "data/set"
    error = client.ask("data_path", "hf://datasets/data/set/val.jsonl")
    assert error == (
        f"UserError: hf://datasets/data/set@{commit}/val.jsonl has no val.jsonl, but "
        f"{', '.join(files)}"
    )


def test_names_that_are_wrong_are_one_line_with_a_remedy(hub, client):
    hub.add("wrong/model", {"config.json": "{}", "pytorch_model.bin": ""}, tag="v1")
    hub.add("wrong/set", {"README.md": ""}, kind="datasets")
    end = "a private one needs `hf auth login`, or set HF_TOKEN"

    def there(name: str, kind: str = "model") -> str:
        where = f"neither a folder {name} here nor a {kind} of that name"
        return f"there is {where} on {hub.endpoint}"

    expected = {
        ("pin", "wrong/mode"): (
            f"{there('wrong/mode')}; did you mean wrong/model?; {end}"
        ),
        ("pin", "runs/tuned"): f"{there('runs/tuned')}; {end}",
        ("pin", "wrong/set"): (
            "wrong/set is a dataset, where a model is needed: "
            "--config.data.path=hf://datasets/wrong/set reads its files"
        ),
        ("data_path", "hf://datasets/wrong/sat"): (
            f"{there('wrong/sat', 'dataset')}; did you mean wrong/set?; {end}"
        ),
        ("pin", "wrong/model@v2"): (
            "hf://wrong/model@v2: no such revision; it has main, v1"
        ),
        ("model_path", "wrong/model@v1"): (
            "has no model.safetensors or model.safetensors.index.json, but "
            "config.json, pytorch_model.bin"
        ),
    }
    for (function, name), message in expected.items():
        error = client.ask(function, name)
        assert error.startswith("UserError: ")
        assert message in error
        assert "\n" not in error


def test_gated_models_say_what_to_do(hub, client):
    commit = hub.add("gated/model", {"config.json": "{}"})
    hub.gated.add("gated/model")
    page = f"accept its licence at {hub.endpoint}/gated/model, and"
    error = client.ask("pin", "gated/model")
    login = f"{page} run `hf auth login`, or set HF_TOKEN"
    assert error == f"UserError: hf://gated/model is gated: {login}"
    error = client.ask("pin", "gated/model", token="hf_member")
    assert error.endswith(f"{page} wait until your token has access")
    pinned = client.ask("pin", "gated/model", token="hf_granted")
    assert pinned == f"hf://gated/model@{commit}"
    hub.add("gated/other", {"config.json": "{}"})
    error = client.ask("pin", "gated/other", token="hf_unknown")
    assert "refuses the token with which hf://gated/other is asked for" in error


def test_a_busy_hub_is_asked_again(hub, client):
    hub.add("busy/model", {"config.json": "{}", "model.safetensors": "weights"})
    hub.fail("/api/models/busy/model", 503)
    hub.fail("busy/model/resolve", 429)
    folder = Path(client.ask("model_path", "busy/model"))
    assert (folder / "model.safetensors").read_text() == "weights"
    assert f"trying again in 1 s: {hub.endpoint} answers 503\n" in client.said()


def test_a_download_that_is_cut_off_goes_on(hub, client):
    weights = os.urandom(24_000_000)  # the client keeps each 10 MiB
    hub.add("cut/model", {"config.json": "{}", "model.safetensors": weights})
    hub.cut("model.safetensors", after=15_000_000)
    folder = Path(client.ask("model_path", "cut/model"))
    assert (folder / "model.safetensors").read_bytes() == weights
    (path,) = (x for x in hub.ranges if "cut/model" in x)
    assert hub.ranges[path] == ["bytes=10485760-"]


def test_offline_the_cache_is_used(hub, client):
    commit = hub.add("offline/model", {"config.json": "{}", "model.safetensors": "1"})
    folder = client.ask("model_path", "offline/model")
    hub.add("offline/model", {"config.json": "{}", "model.safetensors": "2"})
    hub.add("offline/other", {"config.json": "{}"})
    before = hub.requests.copy()
    pinned = client.ask("offline", "pin", "offline/model")
    assert pinned == f"hf://offline/model@{commit}"
    assert client.ask("offline", "model_path", "offline/model") == folder
    assert client.ask("offline", "pin", "offline/modle") == (
        "UserError: there is neither a folder offline/modle here nor "
        f"hf://offline/modle in the cache {client.cache}; did you mean "
        "offline/model?; HF_HUB_OFFLINE is set, so it is not downloaded"
    )
    assert hub.requests == before


@pytest.mark.slow  # another process
def test_its_variable_makes_a_process_offline(hub, client):
    commit = hub.add("variable/model", {"config.json": "{}"})
    client.ask("pin", "variable/model")
    before = hub.requests.copy()
    with Client(hub, client.cache.parents[1], HF_HUB_OFFLINE="1") as offline:
        assert offline.ask("pin", "variable/model") == f"hf://variable/model@{commit}"
    assert hub.requests == before


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_one_line(client, hub, tmp_path):
    commit = hub.add("gone/model", {"config.json": "{}", "model.safetensors": "1"})
    folder = client.ask("model_path", "gone/model")
    nowhere = "http://127.0.0.1:9"
    with Client(hub, client.cache.parents[1], HF_ENDPOINT=nowhere) as alone:
        assert alone.ask("model_path", "gone/model") == folder
        assert alone.ask("pin", "gone/model").endswith(commit)
        assert alone.ask("pin", "gone/other") == (
            f"UserError: cannot download hf://gone/other to the cache {alone.cache}: "
            f"[Errno 111] Connection refused ({nowhere})"
        )


@pytest.mark.slow  # the client tries for most of a minute
def test_a_hub_that_leaves_within_a_file_is_one_line(tmp_path):
    with LoopbackHub() as hub:
        files = {"config.json": "{}", "model.safetensors": os.urandom(3_000_000)}
        commit = hub.add("org/model", files)
        hub.leave("model.safetensors", after=1_000_000)
        with Client(hub, tmp_path) as client:
            error = client.ask("model_path", "org/model")
            named = (
                f"cannot download hf://org/model@{commit} to the cache {client.cache}"
            )
            assert error.startswith(f"UserError: {named}: ")
            assert "refused" in error
            assert not list(client.cache.rglob("*.incomplete"))


@pytest.mark.slow
def test_a_full_disk_is_one_line(hub, tmp_path):
    files = {"config.json": "{}", "model.safetensors": os.urandom(3_000_000)}
    commit = hub.add("full/model", files)
    with small_disk(tmp_path / "hf", "1m"), Client(hub, tmp_path) as client:
        assert client.ask("model_path", "full/model") == (
            f"RunFailed: the disk of {client.cache} is full, to which "
            f"hf://full/model@{commit} is downloaded: make room, or set HF_HOME to a "
            "folder on another one"
        )


@pytest.mark.slow
def test_two_processes_download_once(hub, tmp_path):
    hub.add("two/model", {"config.json": "{}", "model.safetensors": os.urandom(10**6)})
    hub.rate = 10**6
    code = CLIENT.replace("for line in sys.stdin:", "for line in [os.environ['CALL']]:")
    call = json.dumps(["model_path", ["two/model"], ""])
    environment = os.environ | hub.environment(tmp_path) | {"CALL": call}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    (one, said), (other, also_said) = (x.communicate(timeout=60) for x in processes)
    hub.rate = 0
    assert one == other
    assert hub.count("GET", "two/model/resolve") == 2
    assert hub.count("HEAD", "two/model/resolve") == 2
    assert (said + also_said).count("downloading 1 file of weights") == 1


@pytest.mark.slow
def test_a_missing_library_is_one_line(hub, tmp_path):
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError")
    root = Path(__file__).parents[3]
    paths = os.pathsep.join(map(str, (tmp_path, root)))
    with Client(hub, tmp_path, PYTHONPATH=paths) as client:
        assert client.ask("pin", "org/model") == (
            "UserError: org/model: there is no such folder here, and a name on the "
            "Hugging Face Hub needs huggingface_hub: pip install 'jshard[hub]'"
        )
