"""Scores are those of lm_eval's transformers backend on the same tiny random model."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from jshard.cli.command import run_command
from jshard.errors import UserError
from jshard.evaluate.__main__ import run_evaluate
from local_tasks import LONG, TASKS, write_tasks
from small_tokenizer import CHATML, make_tokenizer
from tiny_transformers import random_decoder

pytest.importorskip("lm_eval", reason="needs jshard[evaluate]")
pytestmark = [
    pytest.mark.slow,
    # Of lm_eval and of what it imports.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
# Some of the options that the command has in common with lm_eval.
CASES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {"num_fewshot": 2},
    "GPT2Config": {"apply_chat_template": True, "limit": 7.0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(params=CASES, scope="module")
def model(request, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("model")
    small = {"vocab_size": 400, "eos_token_id": 0, "bos_token_id": None}
    random_decoder(request.param, **small).save_pretrained(path)
    begins = request.param == "LlamaConfig"
    named = {"bos_token": "<s>"} if begins else {"chat_template": CHATML}
    make_tokenizer(path, begins=begins, **named)
    return path, CASES[request.param]


@pytest.fixture(autouse=True)
def programs_are_not_kept(monkeypatch):
    monkeypatch.setattr("jshard.trained.model_command.cache_compilations", lambda: None)


def ours(model: Path, folder: Path, tasks: str, output: Path, *words: str) -> Any:
    given = [f"--model={model}", f"--tasks={tasks}", f"--include_path={folder}"]
    run_evaluate([*given, f"--output={output}", "--log_samples", *words])
    return json.loads(output.read_text())


def theirs(model: Path, folder: Path, tasks: str, **options: Any) -> Any:
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import (  # pyright: ignore[reportMissingImports]
        HFLM,
    )
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    peer = HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=4)
    return lm_eval.simple_evaluate(
        peer,
        tasks=tasks.split(","),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        fewshot_as_multiturn=options.get("apply_chat_template", False),
        **options,
    )


def words_of(options: dict[str, Any]) -> list[str]:
    return [f"--{k}" if v is True else f"--{k}={v}" for k, v in options.items()]


@pytest.mark.parametrize("weights", ["sharded", "replicated"])
def test_scores_and_answers_are_those_of_transformers(
    model, folder, weights, tmp_path, capsys
):
    path, options = model
    tasks = ",".join(TASKS)
    words = (*words_of(options), f"--weights={weights}", "--batch_size=4")
    with pytest.warns(UserWarning, match="do not fit into the model's context of 64"):
        got = ours(path, folder, tasks, tmp_path / "found.json", *words)
    table = capsys.readouterr().out
    want = theirs(path, folder, tasks, **options)
    assert {*got["results"]} == {*TASKS} == {*want["results"]}
    for task, metrics in want["results"].items():
        assert f"|{task}" in table
        assert {*got["results"][task]} == {*metrics}
        for name, value in metrics.items():
            found = got["results"][task][name]
            if isinstance(value, float):
                assert found == pytest.approx(value, rel=1e-4, abs=1e-6), (task, name)
            else:
                assert found == value, (task, name)
    assert got["n-shot"] == want["n-shot"]
    for task in TASKS:
        pairs = list(zip(got["samples"][task], want["samples"][task], strict=True))
        assert pairs
        for mine, other in pairs:
            assert mine["prompt_hash"] == other["prompt_hash"]
            for (answer,), (reply,) in zip(mine["resps"], other["resps"], strict=True):
                _check_equal(answer, reply)
    texts = [resps for each in got["samples"]["write"] for (resps,) in each["resps"]]
    assert len(set(texts)) > 2
    assert not any("e" in text for text in texts)


def _check_equal(answer: Any, reply: Any) -> None:
    """A log-likelihood, with or without whether it is greedy, or a text."""
    if isinstance(reply, str):
        assert answer == reply
    elif isinstance(reply, float):
        assert answer == pytest.approx(reply, abs=1e-4)
    else:
        assert answer[0] == pytest.approx(reply[0], abs=1e-4)
        assert answer[1] == reply[1]
