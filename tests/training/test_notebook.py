"""examples/trainer.ipynb runs from top to bottom, and draws its picture."""

import base64
import json
from pathlib import Path

import pytest

from jobs import environment

NOTEBOOK = Path(__file__).parents[2] / "examples" / "trainer.ipynb"

pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")
nbclient = pytest.importorskip("nbclient")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of Jupyter, about its own event loop
def test_the_notebook_runs_and_draws(tmp_path):
    import nbformat  # pyright: ignore[reportMissingImports]  # with nbclient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=environment())
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    assert "step 300/300" in text
    (picture,) = [x for o in outputs if (x := o.get("data", {}).get("image/png"))]
    (tmp_path / "picture.png").write_bytes(base64.b64decode(picture))
    assert len(picture) > 10_000
    pages = [x for o in outputs if (x := o.get("data", {}).get("text/html"))]
    assert "iframe" in pages[-1]
    assert not json.dumps(outputs).count("Traceback")
