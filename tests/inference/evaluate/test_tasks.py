"""Scores are those of lm_eval's transformers backend on the same tiny random model."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx

import jshard
from filled import filled
from jobs import environment
from jshard.data.tokenizers.tokenizer import load_tokenizer
from jshard.evaluate import run_evaluate
from jshard.inference.evaluate.tasks import load_tasks
from jshard.inference.generation import Sampling
from jshard.inference.generation.weight_placement import replicated
from jshard.models.gpt import GPT, GPTConfig
from jshard.system.errors import UserError
from local_tasks import TASKS, write_tasks
from small_tokenizer import CHATML, make_tokenizer
from tiny_llama import make_llama

pytest.importorskip("lm_eval", reason="needs jshard[evaluate]")
pytestmark = [
    pytest.mark.slow,
    # Of lm_eval and of what it imports.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
# Some of the options that the command has in common with lm_eval.
CASES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {"num_fewshot": 2, "gen_kwargs": "max_gen_toks=9,until=o"},
    "GPT2Config": {"apply_chat_template": True, "limit": 7.0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(params=CASES, scope="module")
def model(request, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = getattr(transformers, request.param)(
        **(LLAMA if request.param == "LlamaConfig" else GPT2),
        vocab_size=400,
        eos_token_id=0,
        bos_token_id=None,
        initializer_range=0.2,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    begins = request.param == "LlamaConfig"
    named = {"bos_token": "<s>"} if begins else {"chat_template": CHATML}
    make_tokenizer(path, begins=begins, **named)
    return path, CASES[request.param]


@pytest.fixture
def own_tasks_alone(monkeypatch):
    """Leaves out lm_eval's own tasks: to list all 14,000 takes seconds each time."""
    from lm_eval import tasks  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(
        "jshard.inference.trained.model_command.cache_compilations", lambda: None
    )
    own = functools.partial(tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", own)


def ours(model: Path, folder: Path, tasks: str, output: Path, *words: str) -> Any:
    given = [f"--model={model}", f"--tasks={tasks}", f"--include_path={folder}"]
    run_evaluate([*given, f"--output={output}", "--log_samples", *words])
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def theirs(model, folder) -> Any:
    """The results of the peer."""
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import (  # pyright: ignore[reportMissingImports]
        HFLM,
    )
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    path, options = model
    peer = HFLM(pretrained=str(path), device="cpu", dtype="float32", batch_size=4)
    return lm_eval.simple_evaluate(
        peer,
        tasks=[*TASKS],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        fewshot_as_multiturn=options.get("apply_chat_template", False),
        bootstrap_iters=0,
        **options,
    )


def words_of(options: dict[str, Any]) -> list[str]:
    return [f"--{k}" if v is True else f"--{k}={v}" for k, v in options.items()]


@pytest.mark.usefixtures("own_tasks_alone")
@pytest.mark.parametrize("weights", ["sharded", "replicated"])
def test_scores_and_answers_are_those_of_transformers(
    model, theirs, folder, weights, tmp_path, capsys
):
    path, options = model
    tasks = ",".join(TASKS)
    words = (*words_of(options), f"--weights={weights}", "--batch_size=4")
    with pytest.warns(UserWarning, match="do not fit into the model's context of 64"):
        got = ours(path, folder, tasks, tmp_path / "found.json", *words)
    table = capsys.readouterr().out
    want = theirs
    assert {*got["results"]} == {*TASKS} == {*want["results"]}
    for task, metrics in want["results"].items():
        assert f"|{task}" in table
        assert {*got["results"][task]} == {*metrics}
        for name, value in metrics.items():
            found = got["results"][task][name]
            if "stderr" in name:
                continue  # drawn at random, as often as asked
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
    stop = "o" if "gen_kwargs" in options else "e"
    assert not any(stop in text for text in texts)


def _check_equal(answer: Any, reply: Any) -> None:
    """A log-likelihood, with or without whether it is greedy, or a text."""
    if isinstance(reply, str):
        assert answer == reply
    elif isinstance(reply, float):
        assert answer == pytest.approx(reply, abs=1e-4)
    else:
        assert answer[0] == pytest.approx(reply[0], abs=1e-4)
        assert answer[1] == reply[1]


@pytest.mark.usefixtures("own_tasks_alone")
def test_two_processes_score_as_one_does(folder, tmp_path, capsys):
    base, tasks = make_llama(tmp_path / "base"), ["letter", "end", "write"]
    with pytest.warns(UserWarning, match="do not fit into the model's context of 64"):
        want = ours(base, folder, ",".join(tasks), tmp_path / "one.json")
    table = capsys.readouterr().out
    launch = ("jshard.launch", "--command=evaluate", "--num_processes=2", "--")
    given = (f"--model={base}", f"--tasks={','.join(tasks)}", "--output=two.json")
    more = (f"--include_path={folder}", "--log_samples")
    done = subprocess.run(
        [sys.executable, "-m", *launch, *given, *more],
        cwd=tmp_path,
        env=environment() | {"XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "sharded over 4 devices" in done.stderr
    got = json.loads((tmp_path / "two.json").read_text())
    assert done.stdout.count("|acc") == table.count("|acc") > 0
    for task in tasks:
        pairs = zip(got["samples"][task], want["samples"][task], strict=True)
        for mine, other in pairs:
            for (answer,), (reply,) in zip(mine["resps"], other["resps"], strict=True):
                _check_equal(answer, reply)
        scores = {k: v for k, v in want["results"][task].items() if "stderr" not in k}
        for name, value in scores.items():
            near = pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            assert got["results"][task][name] == near, (task, name)


def test_a_task_that_is_not_to_be_had_is_named():
    with pytest.raises(UserError, match="no such task; did you mean hellaswag"):
        load_tasks("--tasks", ["helaswag"])
    with pytest.raises(UserError, match="hellaswag: its dataset is neither in the"):
        load_tasks("--tasks", ["hellaswag"])  # HF_HUB_OFFLINE is set


@pytest.mark.usefixtures("own_tasks_alone")
def test_tasks_that_do_not_load_are_told_in_a_line(tmp_path):
    folder = write_tasks(tmp_path, choose={"dataset_kwargs": {"data_files": "gone"}})
    with pytest.raises(UserError, match=r"tasks=choose: the task cannot be loaded: "):
        load_tasks("--tasks", ["choose"], folder)


@pytest.mark.usefixtures("own_tasks_alone")
def test_a_run_scores_its_model_as_the_command_does(folder, tmp_path):
    files = [str(folder / f"{name}.yaml") for name in ("end", "write")]
    trainer = jshard.Trainer(
        "gpt.py",
        config={
            "steps": 2,
            "batch_size": 8,
            "eval_every": 1,
            "eval_batches": 1,
            "eval_tasks": files,
            "eval_limit": 5,
            "checkpoint.every": 2,
            "checkpoint.best": "eval_end_perplexity",
            "model.num_layers": 2,
            "model.width": 24,
            "model.num_heads": 2,
            "model.sequence_length": 64,
            "sample.length": 0,
            "data.path": __file__,
            "data.tokenizer": "",
        },
        workdir=tmp_path / "run",
    )
    with pytest.warns(UserWarning, match="1 of 5 requests do not fit"):
        trainer.fit()
    first, last = (x for x in trainer.metrics if "eval_loss" in x)
    assert first["eval_end_perplexity"] != last["eval_end_perplexity"]
    assert {"eval_end_acc", "eval_write_exact_match"} < {*last}
    page = (tmp_path / "run/report.html").read_text()
    assert "end_perplexity at step 2" in page
    got = ours(tmp_path / "run", folder, "end", tmp_path / "x.json", "--limit=5")
    score = got["results"]["end"]["perplexity,none"]
    assert last["eval_end_perplexity"] == pytest.approx(score, rel=1e-5)


STRIPPING = CHATML.replace("message['content']", "message['content'] | trim")
WITHOUT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('no system messages') }}{% endif %}" + CHATML
)
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "It is "},
]


def language_model(folder: Path, template: str) -> Any:
    from jshard.inference.evaluate.language_model import LanguageModel

    make_tokenizer(folder, chat_template=template)
    config = GPTConfig(vocab_size=400, num_layers=1, num_heads=2, width=16)
    placement = replicated(
        filled(lambda: GPT(config, rngs=nnx.Rngs(0))), jax.devices()[:1]
    )
    return LanguageModel(placement, load_tokenizer(folder), 4)


@pytest.mark.parametrize("template", [CHATML, STRIPPING])
def test_chats_are_written_as_transformers_writes_them(tmp_path, template):
    transformers = pytest.importorskip("transformers")
    model = language_model(tmp_path, template)
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for asks in (True, False):
        text = model.apply_chat_template(HISTORY, add_generation_prompt=asks)
        assert text == peer.apply_chat_template(
            HISTORY,
            tokenize=False,
            add_generation_prompt=asks,
            continue_final_message=not asks,
        )


def test_a_template_without_system_messages_says_so(tmp_path):
    model = language_model(tmp_path, WITHOUT_SYSTEM)
    with pytest.warns(UserWarning, match="written without their system messages"):
        text = model.apply_chat_template(HISTORY)
    assert "France" in text
    assert "brief" not in text


def test_what_is_asked_of_sampling_is_done_or_refused():
    from jshard.inference.evaluate.language_model import sampling_of

    asked = {"do_sample": True, "temperature": 0.5, "top_k": 3, "num_beams": 1}
    assert sampling_of(asked) == Sampling(0.5, 3, 1.0)
    assert sampling_of({"do_sample": False, "temperature": 0.0}) == Sampling(0)
    with pytest.raises(UserError, match="num_beams': 4"):
        sampling_of(asked | {"num_beams": 4})


def test_how_texts_are_generated_can_be_said():
    from jshard.inference.evaluate.language_model import read_gen_kwargs

    said = "temperature=0.5,do_sample=true,max_gen_toks=8"
    found = {"temperature": 0.5, "do_sample": True, "max_gen_toks": 8}
    assert read_gen_kwargs(said) == found
    assert read_gen_kwargs('{"until": ["a", "b"]}') == {"until": ["a", "b"]}
    for text, why in (
        ("num_beams=4", "jshard knows temperature"),
        ("temperature", "must be KEY=VALUE"),
        ("temperature=hot", "could not convert"),
        ("temperature=-1,do_sample=true", "must be 0 or more"),
        ("max_gen_toks=0", "must be at least 1"),
        ("until=3", "until must be texts"),
        ('{"until"', "Expecting"),
    ):
        with pytest.raises(UserError, match=f"^--gen_kwargs=.*: .*{why}") as error:
            read_gen_kwargs(text)
        assert "\n" not in str(error.value)
