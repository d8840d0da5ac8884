"""Runs by names on the Hub: with the real client, of a hub on loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import free_port
from loopback_hub import LoopbackHub
from tiny_llama import make_llama

pytest.importorskip("huggingface_hub", reason="needs jshard[hub]")
pytest.importorskip("tokenizers", reason="needs jshard[text]")

MAKE_CONFIG = """
from pathlib import Path
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config

keys = ("model.from", "checkpoint.restore", "data.tokenizer")
with open_recipe(find_recipe("llama.py:3-1b")) as recipe:
    config = make_config(recipe, dict.fromkeys(keys, "org/tiny"), Path("run"))
print(config.model.width, config.model["from"], config.checkpoint.restore,
      config.data.tokenizer)
"""
SMALL = (
    "--config.batch_size=4",
    "--config.eval_every=0",
    "--config.mesh.cpu_devices=2",
    "--config.policy.accumulate=1",
    "--config.policy.remat=full",
    "--config.policy.unroll=False",
)
PROMPT = ("--prompt=The quick", "--length=4", "--temperature=0", "--format=jsonl")


class Hub(LoopbackHub):
    """A hub with a model, and commands of jshard that use it, in a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.commit = self.add("org/tiny", make_llama(folder / "made", files=2))
        self.variables = os.environ | self.environment(folder / "hf")
        self.variables["PYTHONPATH"] = str(Path(__file__).parents[3])

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=self.folder,
            env=self.variables | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, **environment: str) -> str:
        started = self.start(*words, **environment)
        out, errors = started.communicate(timeout=500)
        assert started.returncode == 0, errors
        return out


@pytest.fixture
def hub(tmp_path):
    with Hub(tmp_path) as hub:
        yield hub


# By default test_outputs.py makes a config.
@pytest.mark.slow
def test_a_run_keeps_what_it_has_recorded_also_if_the_cache_is_gone(hub):
    name = f"hf://org/tiny@{hub.commit}"
    assert hub.run("-c", MAKE_CONFIG).split() == ["32", name, name, name]
    (hub.folder / "run").mkdir()
    model = {"from": name, "width": 64}
    config = {"model": model, "checkpoint": {"restore": name}, "data": {}}
    (hub.folder / "run/config.json").write_text(json.dumps(config))
    hub.add("org/tiny", {"config.json": "{}"})
    before = hub.requests.copy()
    assert hub.run("-c", MAKE_CONFIG).split() == ["32", name, name, name]
    empty = {"HF_HUB_CACHE": str(hub.folder / "empty")}
    assert hub.run("-c", MAKE_CONFIG, **empty).split() == ["64", name, name, name]
    assert hub.requests == before


@pytest.mark.slow
def test_a_run_starts_resumes_and_generates_by_name(hub):
    name = f"hf://org/tiny@{hub.commit}"
    keys = ("model.from", "checkpoint.restore", "data.tokenizer")
    train = (
        *("-m", "jshard.train", "--config=finetune.py", "--workdir=run", *SMALL),
        *(f"--config.{key}=org/tiny" for key in keys),
        *("--config.data.sequence_length=16", "--config.sample.length=0"),
    )
    said = hub.run(*train, "--config.steps=2")
    assert f"starting from the parameters of {name}" in said
    weights = [x for x in hub.requests if x.startswith("GET") and "model-0000" in x]
    assert [hub.requests[x] for x in weights] == [1, 1]
    config = json.loads((hub.folder / "run/config.json").read_text())
    assert config["checkpoint"]["restore"] == name
    (step,) = (hub.folder / "run/checkpoints").glob("2")
    description = json.loads((step / "description.json").read_text())
    assert description["frozen_from"]["path"] == name

    # The main branch moves on, and the run keeps its commit: without a request.
    make_llama(hub.folder / "moved", seed=1)
    hub.add("org/tiny", hub.folder / "moved")
    before = hub.requests.copy()
    assert "resuming run after step 2" in hub.run(*train, "--config.steps=3")
    assert hub.requests == before

    # In another place, with an empty cache, the frozen weights come from the Hub again.
    generate = ("-m", "jshard.generate", *PROMPT)
    again = hub.run(*generate, "--model=run", HF_HUB_CACHE=str(hub.folder / "new"))
    assert [hub.requests[x] for x in weights] == [2, 2]
    assert again == hub.run(*generate, "--model=run", HF_HUB_OFFLINE="1")
    hub.run("-m", "jshard.export", "run", "--output=out", "--format=huggingface")
    assert (hub.folder / "out/tokenizer.json").exists()
    hub.run("-m", "jshard.export", "run", "--output=peft", "--format=peft")
    adapters = json.loads((hub.folder / "peft/adapter_config.json").read_text())
    assert adapters["base_model_name_or_path"] == "org/tiny"
    assert adapters["revision"] == hub.commit


@pytest.mark.slow
def test_two_processes_of_a_job_download_once(hub):
    job = (f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2")
    words = ("-m", "jshard.generate", "--model=org/tiny", *PROMPT, *job)
    processes = [hub.start(*words, f"--process_id={i}") for i in range(2)]
    (out, said), (_, also_said) = (x.communicate(timeout=500) for x in processes)
    assert [x.returncode for x in processes] == [0, 0], said + also_said
    assert json.loads(out)["prompt"] == "The quick"
    assert hub.count("GET", "/revision/main") == 1  # process 0 asks, and tells
    assert max(hub.requests.values()) == 1
    assert (said + also_said).count("downloading 2 files of weights") == 1


@pytest.mark.slow
def test_text_is_tokenized_by_names(hub):
    texts = ["The quick brown fox jumps over the lazy dog.", "A token is a part."]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    hub.add("org/text", {"data/train.jsonl": lines * 50}, kind="datasets")
    data = "hf://datasets/org/text/data"
    hub.run("-m", "jshard.tokenize", data, "--tokenizer=org/tiny", "--output=tokens")
    assert list((hub.folder / "tokens").glob("*.bin"))
    assert hub.count("GET", "tokenizer.json") == 1
    hub.run(
        *("-m", "jshard.train", "--config=gpt.py", "--workdir=run", *SMALL),
        *(f"--config.data.path={data}", "--config.data.tokenizer=org/tiny"),
        *("--config.steps=2", "--config.sample.length=0"),
        *("--config.model.width=32", "--config.model.sequence_length=16"),
    )
    config = json.loads((hub.folder / "run/config.json").read_text())["data"]
    assert config["path"].startswith("hf://datasets/org/text@")
    assert config["tokenizer"] == f"hf://org/tiny@{hub.commit}"
