"""After a kill, RUN@best is the best checkpoint in each of the commands."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bucket_servers import S3, Folder, running
from jobs import environment

pytestmark = pytest.mark.slow

# The loss falls: its highest value is the first, and no longer among the newest.
BEST = "2"
KEYS = (
    "--config=gpt.py", "--config.data.path=text", "--config.batch_size=8",
    "--config.model.width=32", "--config.model.num_layers=1",
    "--config.model.sequence_length=32", "--config.mesh.cpu_devices=2",
)  # fmt: skip
RUN = (
    *KEYS, "--config.steps=4000", f"--config.eval_every={BEST}",
    "--config.eval_batches=1", "--config.checkpoint.keep=1",
    "--config.checkpoint.best=eval_loss", "--config.checkpoint.best_is=highest",
)  # fmt: skip
# Runs a module whose bucket is a folder, as `Folder` is in this process.
IN_FOLDER = """
import runpy, sys
from jshard.storage.checkpoint.buckets.objects import Objects

root, module, *words = sys.argv[1:]
Objects.spec = lambda self, path="": {
    "driver": "file", "path": f"{root}/{self.url}/{path}".replace("s3://", "")
}
sys.argv = [module, *words]
if module == "-c":
    program = sys.argv.pop(1)
    exec(program)
else:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
PREDICT = """
import sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
import jshard

config = {word.partition("=")[0].removeprefix("--config."): word.partition("=")[2]
          for word in sys.argv[2:] if word.startswith("--config.")}
config = {key: int(x) if x.isdigit() else x for key, x in config.items()}
trainer = jshard.Trainer("gpt.py", config=config, workdir=sys.argv[1])
tokens = {"inputs": np.zeros((2, 32), np.int32)}
best = trainer.predict(tokens, step="best")
assert int(trainer.state.step) == 2
assert not np.array_equal(best, trainer.predict(tokens, step="newest"))
loss = trainer.evaluate(step="best")["eval_loss"]
(logged,) = [x["eval_loss"] for x in trainer.metrics
             if x["step"] == 2 and "eval_loss" in x]
assert abs(loss - logged) < 1e-6, (loss, logged)
print("predicted with step", int(trainer.state.step))
"""


def shell(folder: Path, log: str, *words: str) -> subprocess.Popen:
    """Starts a command; what it prints is in the file `log`."""
    if (folder / "in_folder.py").exists():
        words = ("in_folder.py", str(folder / "bucket"), *words)
        words = tuple(word for word in words if word != "-m")
    with open(folder / log, "w") as file:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env=environment() | {"JAX_COMPILATION_CACHE_DIR": str(folder / "programs")},
            stdout=file,
            stderr=file,
        )


def output(folder: Path, *words: str) -> str:
    code = shell(folder, "log", *words).wait(300)
    printed = (folder / "log").read_text()
    assert code == 0, printed
    return printed


@pytest.fixture(
    scope="module", params=["disk", Folder, S3], ids=["disk", "folder", "s3"]
)
def killed(request, tmp_path_factory) -> Iterator[tuple[Path, str]]:
    """The folder to work in, and the run in it that was killed while it trained."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "text").mkdir()
    text = "the quick brown fox jumps over the lazy dog, and again. " * 200
    (folder / "text/a.txt").write_text(text)
    if request.param == "disk":
        yield folder, kill(folder, "run")
        return
    if request.param is Folder:
        (folder / "in_folder.py").write_text(IN_FOLDER)
        yield folder, kill(folder, f"{Folder.url}/run")
        return
    with running(request.param, tmp_path_factory.mktemp("server")) as server:
        yield folder, kill(folder, f"{server.url}/run")


def kill(folder: Path, run: str) -> str:
    log = folder / "killed.log"
    process = shell(folder, log.name, "-m", "jshard.train", *RUN, f"--workdir={run}")
    try:
        while log.read_text().count("checkpoint saved") < 5 and process.poll() is None:
            time.sleep(0.01)
    finally:
        process.kill()
    assert process.wait(60) == -9, log.read_text()
    return run


def test_inspect_marks_the_best_and_shows_it(killed):
    folder, run = killed
    (line,) = [
        line
        for line in output(folder, "-m", "jshard.inspect", run).splitlines()
        if ", best: eval_loss " in line
    ]
    assert line.split()[0] == BEST
    for words in ([f"{run}@best"], [run, "--step=best"], [f"{run}@{BEST}"]):
        shown = output(folder, "-m", "jshard.inspect", *words)
        assert f"step        {BEST}, saved" in shown
    whole = output(folder, "-m", "jshard.inspect", f"{run}@best", "--verify")
    assert "intact" in whole


def test_restore_starts_from_the_best(killed):
    folder, run = killed
    words = (*KEYS, "--config.steps=1", "--config.eval_every=0", "--workdir=restored")
    said = output(
        folder, "-m", "jshard.train", *words, f"--config.checkpoint.restore={run}@best"
    )
    (line,) = [x for x in said.splitlines() if x.startswith("starting from the param")]
    assert f"/checkpoints/{BEST}" in line


def test_export_writes_the_best(killed):
    folder, run = killed
    written = []
    for number, words in enumerate(([f"{run}@best"], [run, f"--step={BEST}"], [run])):
        out = f"exported-{number}"
        output(folder, "-m", "jshard.export", *words, f"--output={out}")
        written.append((folder / out / "model.safetensors").read_bytes())
    assert written[0] == written[1] != written[2]


@pytest.mark.parametrize(
    "words",
    [
        ("jshard.generate", "--prompt=the quick", "--length=4"),
        ("jshard.perplexity", "--text=text/a.txt", "--context=16"),
        ("jshard.evaluate", "--tasks=fox.yaml"),
    ],
    ids=["generate", "perplexity", "evaluate"],
)
def test_a_command_takes_the_best_model(words, killed):
    folder, run = killed
    if "jshard.evaluate" in words:
        pytest.importorskip("lm_eval")
        (folder / "fox.jsonl").write_text('{"text": "the quick", "answer": 0}\n')
        (folder / "fox.yaml").write_text(
            "task: fox\ndataset_path: json\n"
            "dataset_kwargs: {data_files: {test: fox.jsonl}, cache_dir: cache}\n"
            "test_split: test\noutput_type: multiple_choice\n"
            'doc_to_text: "{{text}}"\ndoc_to_choice: [brown, lazy]\n'
            "doc_to_target: answer\nmetric_list: [{metric: acc}]\n"
        )
    for given in ([f"--model={run}@best"], [f"--model={run}", "--step=best"]):
        said = output(folder, "-m", *words, *given)
        (line,) = [x for x in said.splitlines() if x.startswith("jshard: model: ")]
        assert f"/checkpoints/{BEST}" in line


def test_predict_and_evaluate_in_python_take_the_best(killed):
    folder, run = killed
    said = output(folder, "-c", PREDICT, run, *RUN[1:])
    assert f"predicted with step {BEST}" in said


def test_the_report_is_of_the_best(killed):
    folder, run = killed
    output(folder, "-m", "jshard.report", f"{run}@best", "--output=best.html")
    page = (folder / "best.html").read_text()
    assert f"validation loss at step {BEST}" in page
    assert f"{BEST}, best: eval_loss" in page
