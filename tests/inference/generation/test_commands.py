"""`python -m jshard.generate` and `python -m jshard.perplexity`, on a small run."""

import importlib
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jshard
from jobs import environment
from jshard.inference.generation import generate
from jshard.inference.generation.weight_placement import sharded
from jshard.inference.trained.generate_command import run_generate
from jshard.inference.trained.trained_model import open_model
from jshard.models.gpt import GPT, GPTConfig
from jshard.perplexity import mean_nats, run_perplexity, windows
from jshard.system.cli.command import run_command

REPOSITORY = Path(__file__).parents[3]
COMMANDS = {"generate": run_generate, "perplexity": run_perplexity}


def train(folder: Path, *words: str, devices: int = 8) -> Path:
    """Runs two steps of gpt.py, whose model is tiny, on CPU devices."""
    keys = {
        "steps": 2,
        "batch_size": 24,
        "model.num_layers": 2,
        "model.width": 24,
        "model.num_heads": 2,
        "model.sequence_length": 32,
        "eval_every": 0,
        "checkpoint.every": 2,
        "sample.length": 0,
        "data.path": REPOSITORY / "LICENSE",
        "data.tokenizer": "",
    }
    words = (*(f"--config.{key}={value}" for key, value in keys.items()), *words)
    done = python("jshard.train", "--config=gpt.py", *words, cwd=folder, count=devices)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def python(module: str, *words: str, cwd: Path, count: int) -> Any:
    """Runs a module with a number of CPU devices; a run's folder is ``run``."""
    own = ["--workdir=run"] if module == "jshard.train" else []
    return subprocess.run(
        [sys.executable, "-m", module, *words, *own],
        cwd=cwd,
        env=environment() | {"XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": str(count)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs a command in this process; returns the exit code and what it printed."""
    monkeypatch.setattr(
        "jshard.inference.trained.model_command.cache_compilations", lambda: None
    )

    def run(name: str, *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [name, *words])
        monkeypatch.setattr("warnings.formatwarning", None)
        code = 0
        try:
            run_command(COMMANDS[name])
        except SystemExit as error:
            code = int(error.code or 0)
        return code, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_one_prompt_streams_and_several_are_the_same_texts(run, call, tmp_path):
    options = (f"--model={run}", "--length=9", "--temperature=0")
    code, out, err = call("generate", *options, "--prompt=permission")
    assert (code, out.startswith("permission")) == (0, True), err
    assert "whole on one device" in err
    file = tmp_path / "prompts.txt"
    file.write_text("permission\nTHE\n")
    code, lines, err = call(
        "generate", *options, f"--prompts={file}", "--format=jsonl", "--batch_size=1"
    )
    first, second = map(json.loads, lines.splitlines())
    assert (first["prompt"], second["prompt"]) == ("permission", "THE")
    assert len(first["tokens"]) == len(second["tokens"]) == 9
    sharded = call("generate", *options, "--prompt=permission", "--weights=sharded")
    assert sharded[:2] == (0, out)
    assert "sharded over 8 devices" in sharded[2]


@pytest.mark.slow
def test_the_perplexity_is_that_of_the_loss(run, call, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("Permission is hereby granted, ")
    code, out, err = call("perplexity", f"--model={run}", f"--text={file}")
    assert code == 0, err
    with open_model(run) as model:
        whole: Any = model.load_whole(jax.devices()[0])
    tokens = np.frombuffer(file.read_bytes(), np.uint8).astype(np.int32)[None]
    loss = whole.loss(tokens[:, :-1], tokens[:, 1:], np.ones((1, 29), np.float32))
    assert float(out.split()[0]) == pytest.approx(float(loss.compute()), abs=2e-6)
    file.write_text("Permission is hereby granted, " * 3)
    code, out, err = call("perplexity", f"--model={run}", f"--text={file}")
    assert "in windows of 32 tokens, 16 apart" in out


@pytest.mark.parametrize("stride", [1, 3, 4])
def test_windows_count_every_token_once(stride):
    tokens = np.arange(11, dtype=np.int32)
    found = windows(tokens, 4, stride)
    assert [*np.concatenate([new for _, new in found])] == list(range(1, 11))
    for number, (before, new) in enumerate(found):
        assert [*before, *new] == [*tokens[number * stride :][:5]]
        assert len(before) >= (5 - stride if number else 1)


@pytest.mark.slow
def test_windows_of_several_devices_give_the_mean_over_tokens():
    config = GPTConfig(
        vocab_size=50, sequence_length=8, num_layers=1, num_heads=2, width=16
    )
    make_model = lambda rngs: GPT(config, rngs=rngs)
    tokens = np.random.default_rng(0).integers(0, 50, 90).astype(np.int32)
    found = []
    for devices in (jax.devices(), jax.devices()[:1]):
        fsdp = jshard.FSDP(jshard.make_mesh(devices=devices))
        placement = sharded(fsdp, fsdp.init(make_model, optax.identity()))
        found.append(mean_nats(placement, tokens, 8, 4))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt="], "prompt 1 of 1 is empty"),
        (["--prompt=" + "x" * 32], "prompt 1 of 1 has 32 tokens"),
        ([], "give one of --prompt=TEXT and --prompts=FILE"),
        (["--prompts=missing"], "--prompts=missing: cannot be read: No such file"),
        (["--prompt=a", "--tokenizer=missing"], "missing: no tokenizer.json here"),
        (["--prompt=a", "--temperature=-1"], "temperature=-1.0: must be 0 or more"),
        (["--prompt=a", "--model=missing"], "missing does not exist"),
        (["--prompt=a", "--model=."], ". holds no checkpoint"),
    ],
)
def test_bad_input_is_one_line(run, call, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call("generate", f"--model={run}", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert "weights:" not in err  # which are read last
    lines = err.splitlines()
    assert sum("error" in line for line in lines) == 1


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 3])
def test_runs_of_any_mesh_that_choose_by_memory_continue_prompts(
    devices, call, tmp_path
):
    fit = ("--config.policy.remat=fit", "--config.policy.accumulate=fit")
    run = train(tmp_path, *fit, devices=devices)
    options = (f"--model={run}", "--prompt=permission", "--length=9", "--seed=3")
    code, out, err = call("generate", *options)
    assert code == 0, err
    assert len(out) > len("permission")
    assert call("generate", *options, "--weights=sharded")[:2] == (0, out)


@pytest.mark.slow
def test_several_processes_print_once_what_one_prints(run, call, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Permission is hereby granted, " * 5)
    for command, words in (
        ("generate", ("--prompt=permission", "--length=9", "--temperature=0")),
        ("perplexity", (f"--text={text}",)),
    ):
        options = (f"--model={run}", *words)
        launch = ("jshard.launch", f"--command={command}", "--num_processes=2", "--")
        done = python(*launch, *options, cwd=tmp_path, count=2)
        assert (done.returncode, done.stdout) == call(command, *options)[:2]
        model, *rest = done.stderr.splitlines()
        assert model.startswith("jshard: model: ")
        assert len(rest) == (command == "generate")  # where the weights are
        assert "sharded over 4 devices" in "".join(rest) or command != "generate"
    launch = ("jshard.launch", "--command=generate", "--num_processes=2", "--")
    options = (f"--model={run}", "--prompt=permission", "--weights=replicated")
    done = python(*launch, *options, cwd=tmp_path, count=2)
    assert (done.returncode, done.stdout) == (2, "")
    assert "weights of several processes are always sharded" in done.stderr


@pytest.fixture(scope="module")
def encoder_decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    keys = {
        "steps": 2,
        "batch_size": 24,
        "model.width": 24,
        "model.num_heads": 2,
        "model.head_width": 8,
        "model.hidden": 32,
        "eval_every": 0,
        "checkpoint.every": 2,
        "sample.fill": False,
        "data.path": REPOSITORY / "LICENSE",
    }
    words = (f"--config.{key}={value}" for key, value in keys.items())
    done = python("jshard.train", "--config=t5.py", *words, cwd=folder, count=3)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.slow
def test_an_encoder_decoder_answers_prompts(encoder_decoder, call, tmp_path):
    options = (f"--model={encoder_decoder}", "--length=9", "--temperature=0")
    code, out, err = call("generate", *options, "--prompt=permission")
    assert code == 0, err
    assert "permission" not in out
    file = tmp_path / "prompts.txt"
    file.write_text("permission\nTHE\nx\n")
    texts = []
    for weights in ("replicated", "sharded"):
        words = (f"--prompts={file}", f"--weights={weights}", "--batch_size=2")
        code, lines, err = call("generate", *options, *words, "--format=jsonl")
        assert code == 0, err
        rows = list(map(json.loads, lines.splitlines()))
        assert [row["prompt"] for row in rows] == ["permission", "THE", "x"]
        code, text, _ = call("generate", *options, *words)
        assert text == "".join(f"{row['text']}\n" for row in rows)
        texts.append(text)
    assert texts[0] == texts[1]
    for words, message in (
        (["--prompt="], "prompt 1 of 1 is empty"),
        (["--prompt=a", "--base=."], "--base=.: "),
    ):
        code, out, err = call("generate", *options, *words)
        assert (code, out) == (2, "")
        assert message in err
    code, out, err = call("perplexity", options[0], f"--text={file}")
    assert (code, out) == (2, "")
    assert "T5 is an encoder-decoder" in err


def test_no_import_puts_a_module_in_place_of_the_function():
    with pytest.raises(ImportError, match=r"run python -m jshard\.generate"):
        importlib.import_module("jshard.generate")
    assert jshard.generate is generate
    assert COMMANDS["generate"].__module__ != "jshard.generate"


def test_the_command_is_found_by_its_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate", "--help"])
    with pytest.raises(SystemExit) as ended:  # as of python -m
        runpy.run_module("jshard.generate", run_name="__main__")
    said = capsys.readouterr()
    assert (ended.value.code or 0, said.err) == (0, "")
    assert said.out.startswith("usage: python -m jshard.generate")
