"""The notebook runs from top to bottom, and draws its pictures."""

import base64
import json
import re
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
    assert "plan.html" in pages[-1]


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
