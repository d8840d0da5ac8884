"""What pages show of names on the Hub, run against a hub on loopback."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from loopback_hub import LoopbackHub
from tiny_llama import make_llama

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
BLOCKS = runpy.run_path(str(REPOSITORY / "docs" / "blocks.py"))
PAGES = {
    "how_to/hugging_face.md": "--model=",
    "how_to/datasets.md": "--config.data.dataset=",
}
SHORT = (
    *("--config.steps=2", "--config.eval_every=2", "--config.mesh.cpu_devices=2"),
    *("--config.model.width=16", "--config.model.num_layers=1"),
    *("--config.sample.length=0", "--config.data.validation_rows=20"),
)


@pytest.mark.parametrize("page", PAGES)
def test_it_runs_as_the_page_says(page, tmp_path):
    if "datasets" in page:
        pytest.importorskip("datasets", reason="needs jshard[datasets]")
    text = (REPOSITORY / "docs" / page).read_text()
    (block,) = [x.text for x in BLOCKS["blocks"](text) if PAGES[page] in x.text]
    assert block.startswith("pip install 'jshard[")
    (command,) = block.splitlines()[1:]
    name = command.split(PAGES[page])[1].split()[0]
    with LoopbackHub() as hub:
        if "generate" in command:
            hub.add(name, make_llama(tmp_path / "made"))
        else:
            rows = [
                json.dumps({"text": f"Once upon {i} times. " * 9}) for i in range(99)
            ]
            hub.add(name, {"data/train.jsonl": "\n".join(rows)}, kind="datasets")
            command += " " + " ".join(SHORT)
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=tmp_path,
            env=os.environ
            | hub.environment(tmp_path / "cache")
            | {
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PYTHONPATH": str(REPOSITORY),
                "JAX_PLATFORMS": "cpu",
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert hub.count("GET", f"{name}/resolve/") > 0
    assert ("Once upon" if "generate" in command else "done in") in done.stdout
