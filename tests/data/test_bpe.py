"""A tokenizer of one's own text, and the line that says when one is needed."""

import json
import sys
from pathlib import Path

import pytest

import jshard.tokenize
from jshard.data.files.noting import noted
from jshard.data.text.text_data import text_data
from jshard.data.tokenizers.tokenizer import load_tokenizer

pytest.importorskip("tokenizers")
PYTHON = Path(json.__file__).read_text()
CHINESE = "今天天气很好，我们去公园散步。" * 200


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["jshard.tokenize", *map(str, words)])
    jshard.tokenize.main()


def refused(monkeypatch, *words):
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, *words)
    return end.value.code


def test_a_tokenizer_of_a_text_writes_it_in_few_tokens(tmp_path, monkeypatch, capsys):
    (tmp_path / "chinese.txt").write_text(CHINESE)
    chat = {"messages": [{"role": "user", "content": "散步"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat))
    files = [tmp_path / "chinese.txt", tmp_path / "chats.jsonl"]
    words = [*files, "--vocab_size=300", f"--output={tmp_path / 'made'}"]
    run(monkeypatch, *words)
    loaded = load_tokenizer(tmp_path / "made")
    assert f"--config.model.vocab_size={loaded.vocab_size}" in capsys.readouterr().out
    (tokens,) = loaded.encode_documents([CHINESE[:15] + "é"])
    assert tokens[-1] == loaded.eos_id
    assert len(tokens) < 15
    assert loaded.decode(tokens) == CHINESE[:15] + "é"
    assert refused(monkeypatch, *words) == 2
    assert "tokenizer.json exists; give another folder" in capsys.readouterr().err


def test_what_to_write_is_said_once(tmp_path, monkeypatch, capsys):
    assert refused(monkeypatch, tmp_path, f"--output={tmp_path}") == 2
    assert "or --vocab_size to train a tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(("written", "told"), [(CHINESE, True), (PYTHON, False)])
def test_a_text_that_is_spelled_byte_by_byte_is_told_of(written, told, tmp_path):
    (tmp_path / "a.txt").write_text(written)
    with noted() as said:
        text_data(
            str(tmp_path / "a.txt"),
            "train",
            sequence_length=8,
            seed=0,
            tokenizer="python",
        )
    assert any("--vocab_size=8192" in line for line in said) is told
