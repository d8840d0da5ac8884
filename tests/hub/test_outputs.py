"""Exports, token files and plans go to the Hub: with its client, to one on loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from exports import init, save
from jshard.data.text.token_writer import write_token_files
from jshard.export import export
from loopback_hub import LoopbackHub
from small_tokenizer import TEXT, make_tokenizer

pytest.importorskip("huggingface_hub", reason="needs jshard[hub]")

CLIENT = """
import json, os, sys
from pathlib import Path
from jshard.checkpoint.buckets.mirror import on_disk
from jshard.errors import UserError
from jshard.hub.online.download import data_path
from jshard.hub.online.outputs import names_at, write_text
from jshard.data.text.token_writer import write_token_files
from jshard.export import export

answers = []
for function, arguments, os.environ["HF_TOKEN"] in json.load(sys.stdin):
    if function in ("export", "write_token_files"):
        arguments = [Path(x) if x[:1] == "/" else x for x in arguments]
    if function == "write_token_files":
        arguments[0] = [arguments[0]]
    try:
        answer = str(globals()[function](*arguments))
    except UserError as error:
        answer = str(error)
    answers.append(answer)
Path("answers.json").write_text(json.dumps(answers))
"""
WRITES, READS, UNKNOWN = "hf_granted", "hf_member", "hf_nobody"


def ask(hub: LoopbackHub, folder: Path, *questions: tuple) -> list[str]:
    """What functions answer in a process that uses the hub: their results or errors."""
    subprocess.run(
        [sys.executable, "-c", CLIENT],
        input=json.dumps(questions),
        cwd=folder,
        env=os.environ
        | hub.environment(folder / "hf")
        | {"JSHARD_CACHE": str(folder / "jshard")}
        | {"PYTHONPATH": str(Path(__file__).parents[2])},
        text=True,
        check=True,
    )
    return json.loads((folder / "answers.json").read_text())


def test_what_is_written_to_the_hub_is_what_a_folder_gets(tmp_path):
    pytest.importorskip("tokenizers")
    run = save(tmp_path / "run", init())
    export(run, tmp_path / "out")
    tokenizer = make_tokenizer(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    write_token_files([tmp_path / "text.txt"], tokenizer, tmp_path / "tokens")
    text, tokens = f"{tmp_path}/text.txt", "hf://datasets/me/tokens@small/v1"
    with LoopbackHub() as hub:
        hub.add("me/tokens", {".gitattributes": ""}, kind="datasets", revision="small")
        answers = ask(
            hub,
            tmp_path,
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


def test_what_the_hub_refuses_is_one_line(tmp_path):
    with LoopbackHub() as hub:
        hub.add("me/model", {"config.json": "{}"})
        commit = f"hf://me/model@{'0' * 40}"
        plan = "hf://datasets/me/plans/plan.html"
        answers = ask(
            hub,
            tmp_path,
            ("names_at", ["hf://me/model"], ""),
            ("names_at", ["hf://me/model"], UNKNOWN),
            ("names_at", ["hf://me/model@new"], WRITES),
            ("names_at", [commit], WRITES),
            ("names_at", ["hf://me"], WRITES),
            ("names_at", ["hf://me/model"], READS),
            ("names_at", ["hf://me/other"], WRITES),
            ("write_text", [plan, ""], READS),
        )
        endpoint = hub.endpoint
    for answer, expected in zip(
        answers,
        (
            "writing hf://me/model needs a token of the Hub: run `hf auth login`, or",
            f"cannot write hf://me/model: {endpoint} answers 401",
            "hf://me/model@new: no such revision; it has main",
            f"{commit}: a commit cannot be changed; name a branch",
            "hf://me: no name on the Hugging Face Hub",
            "['config.json']",
            "[]",
            f"cannot write {plan}: {endpoint} answers 403",
        ),
        strict=True,
    ):
        assert answer.startswith(expected)
