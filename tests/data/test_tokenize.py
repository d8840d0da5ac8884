"""`python -m jshard.tokenize`: what it writes, and what it does when killed."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jshard.data.text import token_writer
from jshard.data.text.corpus import UNFINISHED
from jshard.data.text.token_writer import write_token_files
from jshard.data.tokenizers.tokenizer import load_tokenizer
from jshard.system.errors import UserError
from small_tokenizer import TEXT, make_tokenizer
from texts import text, tokens_of, window

pytest.importorskip("tokenizers")
DOCUMENTS = [f"{i}. {TEXT}" for i in range(60)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "val").mkdir(parents=True)
    lines = [json.dumps({"text": document}) + "\n" for document in DOCUMENTS]
    (folder / "a.jsonl").write_text("".join(lines[:40]))
    (folder / "b.jsonl").write_text("".join(lines[40:50]))
    (folder / "val/c.jsonl").write_text("".join(lines[50:]))
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def run(*words, **options) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "jshard.tokenize", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **options,
    )


def in_threads(monkeypatch):
    """Lets threads do what processes do, each of which imports for seconds."""
    made = []

    def pool(workers: int, *_) -> ThreadPoolExecutor:
        made.append(workers)
        return ThreadPoolExecutor(workers)

    monkeypatch.setattr(token_writer, "ProcessPoolExecutor", pool)
    return made


@pytest.mark.parametrize(
    "processes", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_token_files_hold_what_text_holds(
    processes, corpus, tokenizer, tmp_path, capsys, monkeypatch
):
    made = [2] if processes else in_threads(monkeypatch)
    output = tmp_path / "tokens"
    write_token_files([corpus], tokenizer, output, workers=2, part_bytes=5000)
    assert made == [2]
    printed = capsys.readouterr().out
    assert "tokenized 0.0 MB in " in printed
    assert " MB/s; " in printed
    assert "--config.data.token_dtype=uint16" in printed
    assert len(list(output.glob("train-*.bin"))) > 2
    assert [file.name for file in output.glob("val-*.bin")] == ["val-00000.bin"]
    options = {"tokenizer": str(tokenizer), "vocab_size": 350, "sequence_length": 50}
    for pack in (False, True):
        held_out = list(text(output, "validation", pack=pack, **options))
        expected = list(text(corpus, "validation", pack=pack, **options))
        for one, other in zip(held_out, expected, strict=True):
            for key in other:
                np.testing.assert_array_equal(one[key], other[key])
    data, expected = text(output, **options), text(corpus, **options)
    seen, wanted = (
        {window(d, i)["inputs"].tobytes() for i in range(200)} for d in (data, expected)
    )
    assert seen == wanted


def test_large_vocabularies_are_uint32(corpus, tokenizer, tmp_path):
    large = tmp_path / "large"
    large.mkdir()
    contents = json.loads((tokenizer / "tokenizer.json").read_text())
    contents["added_tokens"].append(
        contents["added_tokens"][0] | {"id": 70_000, "content": "<end>"}
    )
    contents["model"]["vocab"]["<end>"] = 70_000
    (large / "tokenizer.json").write_text(json.dumps(contents))
    (large / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    if load_tokenizer(large).eos_id != 70_000:
        pytest.skip("this version of tokenizers numbers added tokens itself")
    write_token_files([corpus / "b.jsonl"], large, tmp_path / "tokens")
    data = text(tmp_path / "tokens", token_dtype="uint32", validation_fraction=0)
    assert max(window(data, i)["targets"].max() for i in range(100)) == 70_000
    with pytest.raises(UserError, match="tokens of uint32, which does not match"):
        text(tmp_path / "tokens")


def test_a_text_is_a_document_and_a_long_one_several(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("".join(DOCUMENTS))
    for part_bytes, documents in ((2**26, 1), (3000, 5)):
        output = tmp_path / str(part_bytes)
        write_token_files(
            [tmp_path / "a.txt"], tokenizer, output, part_bytes=part_bytes
        )
        about = json.loads((output / "tokens.json").read_text())
        assert about["documents"] == documents
        tokens = tokens_of(text(output, "validation", validation_fraction=0.999))
        assert load_tokenizer(tokenizer).decode(tokens).endswith(DOCUMENTS[-1])


def test_the_same_command_continues_and_another_is_refused(
    corpus, tokenizer, tmp_path, capsys
):
    whole, output = tmp_path / "whole", tmp_path / "output"
    options: Any = {"part_bytes": 3000}
    write_token_files([corpus], tokenizer, whole, **options)
    unfinished = output / UNFINISHED
    shutil.copytree(whole, unfinished)
    about = json.loads((whole / "tokens.json").read_text())
    del about["tokens"], about["documents"]
    (unfinished / "tokens.json").write_text(json.dumps(about))
    (unfinished / "train-00001.idx").unlink()
    (unfinished / "train-00002.bin").rename(output / "train-00002.bin")
    (unfinished / "train-00002.idx").rename(output / "train-00002.idx")
    with pytest.raises(UserError, match=r"jshard\.tokenize has not finished here"):
        text(output)
    with pytest.raises(UserError, match="made with another text_key; give another"):
        write_token_files([corpus], tokenizer, output, **options, text_key="body")
    capsys.readouterr()
    write_token_files([corpus], tokenizer, output, **options)
    assert capsys.readouterr().out.startswith("continuing: ")
    assert files_of(output) == files_of(whole)
    write_token_files([corpus], tokenizer, output, **options)
    assert capsys.readouterr().out == f"{output} is complete already\n"
    (corpus / "b.jsonl").write_text('{"text": "changed"}\n')
    with pytest.raises(UserError, match="made with another files; give another"):
        write_token_files([corpus], tokenizer, output, **options)


@pytest.mark.slow
def test_killed_commands_end_with_the_same_bytes(tokenizer, tmp_path):
    lines = [json.dumps({"text": d}) + "\n" for d in DOCUMENTS] * 40
    (tmp_path / "a.jsonl").write_text("".join(lines))
    options: Any = {"part_bytes": 20_000}
    write_token_files([tmp_path / "a.jsonl"], tokenizer, tmp_path / "whole", **options)
    script = (
        "from pathlib import Path; import sys\n"
        "from jshard.data.text.token_writer import write_token_files\n"
        "if __name__ == '__main__':\n"
        "    a, t, o = map(Path, sys.argv[1:])\n"
        "    write_token_files([a], t, o, workers=2, part_bytes=20_000)\n"
    )
    (tmp_path / "script.py").write_text(script)
    output = tmp_path / "output"
    command = [sys.executable, str(tmp_path / "script.py")]
    command += [str(tmp_path / "a.jsonl"), str(tokenizer), str(output)]
    kills = 0
    for parts in (1, 4, 8, None):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while parts is not None and process.poll() is None:
            if len(list((output / UNFINISHED).glob("*.idx"))) >= parts:
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.001)
        process.wait(timeout=120)
    assert kills >= 2
    assert files_of(output) == files_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nosuch.jsonl"], "nosuch.jsonl: no such file or folder"),
        (["{corpus}", "--tokenizer={corpus}"], "no tokenizer.json here"),
        (["{corpus}", "--text_key=body"], "'body' is not there, not a text; set"),
        pytest.param(
            ["{corpus}", "--text_key=body", "--workers=2"],
            "'body' is not there, not a text; set",
            marks=pytest.mark.slow,  # by default, below, an error's way from a process
        ),
        (["{corpus}", "--workers=0"], "must be a whole number, at least 1"),
        (["{bin}"], "holds tokens already"),
        (["{empty}"], "has no text"),
        (["{half}"], "has a text that is not valid Unicode"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    corpus, tokenizer, tmp_path, words, message, monkeypatch, capsys
):
    import jshard.tokenize

    (tmp_path / "a.bin").write_bytes(b"12")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "half.jsonl").write_text('{"text": "\\ud800"}')
    named = {
        "corpus": corpus,
        "bin": tmp_path / "a.bin",
        "empty": tmp_path / "empty.txt",
        "half": tmp_path / "half.jsonl",
    }
    words = [word.format_map(named) for word in words]
    if not any("--tokenizer" in word for word in words):
        words.append(f"--tokenizer={tokenizer}")
    if not any("--workers" in word for word in words):
        words.append("--workers=1")  # more are processes, that import for seconds
    argv = ["jshard-tokenize", *words, f"--output={tmp_path / 'tokens'}"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as exit:
        jshard.tokenize.main()
    assert exit.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jshard: error: ")
    assert message in line
    assert not list(tmp_path.glob("tokens/*.bin"))


def test_an_error_comes_from_a_process_as_it_was():
    error = pickle.loads(pickle.dumps(UserError("a.jsonl: not valid")))
    assert (type(error), str(error)) == (UserError, "a.jsonl: not valid")


@pytest.mark.slow
def test_the_command_runs_as_a_module(corpus, tokenizer, tmp_path):
    process = run(
        corpus, f"--tokenizer={tokenizer}", f"--output={tmp_path / 'tokens'}",
        "--workers=1", env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert "tokenized 0.0 MB" in out
    assert (tmp_path / "tokens/tokens.json").exists()
