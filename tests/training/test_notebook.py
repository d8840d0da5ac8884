"""The notebooks in examples run from top to bottom, and draw their pictures."""

import base64
import json
import re
from pathlib import Path

import pytest

from jobs import environment

EXAMPLES = Path(__file__).parents[2] / "examples"

pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")
nbclient = pytest.importorskip("nbclient")


def executed(
    name: str, folder: Path, **variables: str
) -> tuple[str, list[str], list[str]]:
    """Runs a notebook; returns what it printed, its pictures, and its HTML."""
    import nbformat  # pyright: ignore[reportMissingImports]  # with nbclient

    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=240, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment() | variables)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not json.dumps(outputs).count("Traceback")
    text = "".join(output.get("text", "") for output in outputs)
    data = [output.get("data", {}) for output in outputs]
    pictures = [x for d in data if (x := d.get("image/png"))]
    for i, picture in enumerate(pictures):
        (folder / f"picture-{i}.png").write_bytes(base64.b64decode(picture))
    assert all(len(picture) > 5_000 for picture in pictures)
    return text, pictures, [x for d in data if (x := d.get("text/html"))]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of Jupyter, about its own event loop
def test_the_trainer_draws_and_reports(tmp_path):
    text, pictures, pages = executed("trainer.ipynb", tmp_path)
    assert "step 300/300" in text
    assert len(pictures) == 1
    assert "iframe" in pages[-1]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_library_learns_and_shows_memory_by_policy(tmp_path):
    text, pictures, _ = executed("library.ipynb", tmp_path)
    assert len(pictures) == 2
    first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", text)[0])
    assert last < first / 2
    needed = dict(re.findall(r"^(\w[\w, -]*?) +([\d.]+) MiB$", text, re.MULTILINE))
    assert float(needed["full"]) < float(needed["dots"]) < float(needed["none"])
    assert "(6, 32, 1024) on each device" in text
    assert "60 (6, 64, 1024) on each device" in text


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_digits_are_read_and_shown(tmp_path):
    pytest.importorskip("sklearn")
    # Convolutions that are not optimized take minutes.
    optimized = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    text, pictures, _ = executed("digits.ipynb", tmp_path, **optimized)
    assert len(pictures) == 2
    assert float(re.findall(r"([\d.]+)% of 360 are right", text)[0]) > 80
