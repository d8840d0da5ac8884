"""Runs in real Jupyter kernels: the notebook of examples/, and an interrupted run."""

import asyncio
import base64
import json
import re
import threading
import time
from pathlib import Path

import pytest

from jobs import environment

NOTEBOOK = Path(__file__).parents[2] / "examples" / "demo.ipynb"


@pytest.mark.slow
@pytest.mark.h100  # it plans for 64 of them
@pytest.mark.filterwarnings("default")  # of Jupyter, about its own event loop
def test_the_notebook_shows_what_it_says(tmp_path):
    for module in ("ipykernel", "matplotlib", "nbclient"):
        pytest.importorskip(module, reason="needs jshard[notebook]")
    text, pictures, pages = executed(tmp_path)
    first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", text)[0])
    assert last < 0.7 * first
    assert "8 x cpu: replica 1 x fsdp 8" in text
    assert re.search(r"exit code -9 after step [4-7]\d", text)
    assert "resuming killed after step 30" in text
    assert "3 x cpu: replica 1 x fsdp 3" in text
    (difference,) = re.findall(r"largest difference (\S+)", text)
    assert 0 < float(difference) < 1e-2  # of float32 sums in another order
    assert re.search(r"^fits: [\d.]+ of 75.2 GiB$", text, re.MULTILINE)
    assert "config.json model.safetensors" in text
    lines = (tmp_path / "killed/metrics.jsonl").read_text().splitlines()
    losses = [x["eval_loss"] for x in map(json.loads, lines) if "eval_loss" in x]
    assert f"held-out loss {losses[-1]:.4f}" in text
    assert len(pictures) == 3
    assert "srcdoc=" in pages[-1]
    assert "demo on 64 x NVIDIA H100" in pages[-1]


INTERRUPTED = (
    """
import time, jax.numpy as jnp, jshard, numpy as np, optax
from flax import nnx

rows, pause = np.ones((64, 8), np.float32), 0.2
trainer = jshard.Trainer(
    make_model=lambda config, rngs: nnx.Linear(8, 1, rngs=rngs),
    make_optimizer=lambda config: optax.adamw(1e-2),
    loss_fn=lambda model, x: jshard.Mean(jnp.sum(model(x["x"]) ** 2), len(x["x"])),
    train_data={"x": rows}, workdir="run", on_step=lambda *_: time.sleep(pause),
    config={"steps": 200, "batch_size": 64},
)
""",
    "trainer.fit()",
    "pause, before = 0, int(trainer.state.step); trainer.fit(); before",
    "trainer.report()",
)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of Jupyter, about its own event loop
def test_jupyter_s_interrupt_is_one_line_and_fit_continues(tmp_path):
    for module in ("ipykernel", "nbclient"):
        pytest.importorskip(module, reason="needs jshard[notebook]")
    import nbclient  # pyright: ignore[reportMissingImports]
    import nbformat  # pyright: ignore[reportMissingImports]

    cells = [nbformat.v4.new_code_cell(cell) for cell in INTERRUPTED]
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(cells=cells),
        timeout=600,
        allow_errors=True,
        resources={"metadata": {"path": str(tmp_path)}},
    )

    def interrupt() -> None:
        lines = tmp_path / "run/metrics.jsonl"
        while not lines.exists() or lines.read_text().count('"loss"') < 2:
            time.sleep(0.1)
        asyncio.run(client.km.interrupt_kernel())

    with client.setup_kernel(env=environment() | {"XLA_FLAGS": ""}):
        for i, cell in enumerate(client.nb.cells):
            if i == 1:
                threading.Thread(target=interrupt, daemon=True).start()
            client.execute_cell(cell, i)
    _, fit, again, report = (cell.outputs for cell in client.nb.cells)
    error = fit[-1]
    assert error["ename"] == "Preempted"
    [line] = error["traceback"]
    said = re.fullmatch(r"interrupted by SIGINT at step (\d+): saved; fit.*", line)
    assert said
    for outputs in (fit, again):  # one line each, which was redrawn
        drawn = [x for x in outputs if x["output_type"] == "display_data"]
        assert len(drawn) == 1
        assert "<progress" in drawn[0]["data"]["text/html"]
    warned = "".join(x["text"] for x in fit if x.get("name") == "stderr")
    assert warned.count("\n") == 1  # that the step is finished first
    assert again[-1]["data"]["text/plain"] == said[1]
    assert again[0]["data"]["text/plain"].startswith("step 200/200 ")
    assert "&lt;title&gt;run&lt;" in report[-1]["data"]["text/html"]


def executed(folder: Path) -> tuple[str, list[bytes], list[str]]:
    """Runs the notebook; returns what it printed, its pictures, and its HTML."""
    import nbclient  # pyright: ignore[reportMissingImports]
    import nbformat  # pyright: ignore[reportMissingImports]

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=1200, resources={"metadata": {"path": str(folder)}}
    )
    # XLA_FLAGS would say how many devices there are, whatever the notebook asks for.
    client.execute(
        env=environment() | {"XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    )
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    assert "Traceback" not in text
    data = [output.get("data", {}) for output in outputs]
    pictures = [base64.b64decode(x) for d in data if (x := d.get("image/png"))]
    for i, picture in enumerate(pictures):
        (folder / f"picture-{i}.png").write_bytes(picture)
        assert len(picture) > 5_000
    return text, pictures, [x for d in data if (x := d.get("text/html"))]
