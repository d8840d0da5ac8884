"""What goes to the Hub, and what a config names there: with its client, on loopback."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from exports import init, save
from jshard.data.text.token_writer import write_token_files
from jshard.export import export
from loopback_hub import LoopbackHub
from small_tokenizer import TEXT, make_tokenizer
from tiny_llama import make_llama

pytest.importorskip("huggingface_hub", reason="needs jshard[hub]")

CLIENT = """
import json, os, sys
from pathlib import Path
from jshard.storage.checkpoint.buckets.mirror import on_disk
from jshard.system.errors import UserError
from jshard.storage.hub.online.download import data_path
from jshard.storage.hub.online.outputs import names_at, write_text
from jshard.data.text.token_writer import write_token_files
from jshard.export import export
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config

def config_of(name):
    keys = ("model.from", "checkpoint.restore", "data.tokenizer")
    with open_recipe(find_recipe("llama.py:3-1b")) as recipe:
        config = make_config(recipe, dict.fromkeys(keys, name), Path("run"))
    return config.model.width, *(config[a][b] for a, b in (x.split(".") for x in keys))

for line in sys.stdin:
    function, arguments, os.environ["HF_TOKEN"] = json.loads(line)
    if function in ("export", "write_token_files"):
        arguments = [Path(x) if x[:1] == "/" else x for x in arguments]
    if function == "write_token_files":
        arguments[0] = [arguments[0]]
    try:
        answer = str(globals()[function](*arguments))
    except UserError as error:
        answer = str(error)
    with open("answers", "a") as file:
        print(json.dumps(answer), file=file)
    print("answered", file=sys.__stdout__, flush=True)
"""
WRITES, READS, UNKNOWN = "hf_granted", "hf_member", "hf_nobody"


class Client:
    """A process that uses a hub of its own."""

    def __init__(self, hub: LoopbackHub, folder: Path):
        self.hub, self._answers = hub, folder / "answers"
        self._process = subprocess.Popen(
            [sys.executable, "-c", CLIENT],
            cwd=folder,
            env=os.environ
            | hub.environment(folder / "hf")
            | {"JSHARD_CACHE": str(folder / "jshard")}
            | {"PYTHONPATH": str(Path(__file__).parents[3])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *questions: tuple) -> list[str]:
        """What functions answer there: their results or errors."""
        self._answers.unlink(missing_ok=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for question in questions:
            print(json.dumps(question), file=self._process.stdin, flush=True)
            while (line := self._process.stdout.readline()) != "answered\n":
                assert line, "it ended"
        return [json.loads(x) for x in self._answers.read_text().splitlines()]

    def close(self) -> None:
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[Client]:
    with LoopbackHub() as hub:
        client = Client(hub, tmp_path_factory.mktemp("client"))
        yield client
        client.close()


def test_what_is_written_to_the_hub_is_what_a_folder_gets(client, tmp_path):
    pytest.importorskip("tokenizers")
    run = save(tmp_path / "run", init())
    export(run, tmp_path / "out")
    tokenizer = make_tokenizer(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    write_token_files([tmp_path / "text.txt"], tokenizer, tmp_path / "tokens")
    text, tokens = f"{tmp_path}/text.txt", "hf://datasets/me/tokens@small/v1"
    hub = client.hub
    hub.add("me/tokens", {".gitattributes": ""}, kind="datasets", revision="small")
    answers = client.ask(
        ("export", [str(run), "hf://me/model"], WRITES),
        ("export", [str(run), "hf://me/model"], WRITES),
        ("write_token_files", [text, str(tokenizer), tokens], WRITES),
        ("data_path", [tokens], READS),
        ("write_text", ["hf://datasets/me/tokens/plan.html", "a plan"], WRITES),
    )
    assert hub.private == {"me/model"}
    model = hub.files("me/model")
    small = hub.files("me/tokens", kind="datasets", revision="small")
    assert "plan.html" not in small
    assert answers[:3:2] == ["None"] * 2
    assert answers[1].startswith("--output=hf://me/model holds ")
    written = {x.name: x.read_bytes() for x in (tmp_path / "out").iterdir()}
    assert model == {".gitattributes": b"", **written}
    for file in (tmp_path / "tokens").glob("*.bin"):
        assert small[f"v1/{file.name}"] == file.read_bytes()
        assert (Path(answers[3]) / file.name).read_bytes() == file.read_bytes()


def test_what_the_hub_refuses_is_one_line(client):
    client.hub.add("me/there", {"config.json": "{}"})
    commit = f"hf://me/there@{'0' * 40}"
    plan = "hf://datasets/me/plans/plan.html"
    answers = client.ask(
        ("names_at", ["hf://me/there"], ""),
        ("names_at", ["hf://me/there"], UNKNOWN),
        ("names_at", ["hf://me/there@new"], WRITES),
        ("names_at", [commit], WRITES),
        ("names_at", ["hf://me"], WRITES),
        ("names_at", ["hf://me/there"], READS),
        ("names_at", ["hf://me/other"], WRITES),
        ("write_text", [plan, ""], READS),
    )
    endpoint = client.hub.endpoint
    for answer, expected in zip(
        answers,
        (
            "writing hf://me/there needs a token of the Hub: run `hf auth login`, or",
            f"cannot write hf://me/there: {endpoint} answers 401",
            "hf://me/there@new: no such revision; it has main",
            f"{commit}: a commit cannot be changed; name a branch",
            "hf://me: no name on the Hugging Face Hub",
            "['config.json']",
            "[]",
            f"cannot write {plan}: {endpoint} answers 403",
        ),
        strict=True,
    ):
        assert answer.startswith(expected)


def test_all_keys_get_one_commit_and_only_the_config_is_downloaded(client, tmp_path):
    pytest.importorskip("tokenizers")
    hub = client.hub
    name = f"hf://org/tiny@{hub.add('org/tiny', make_llama(tmp_path, files=2))}"
    (answer,) = client.ask(("config_of", ["org/tiny"], ""))
    assert answer == str((32, name, name, name))
    assert hub.count("GET", "org/tiny/resolve/") == 1
    assert hub.count("GET", "config.json") == 1
    assert hub.count("GET", "/api/models/org/tiny") == 2  # the commit and its files
