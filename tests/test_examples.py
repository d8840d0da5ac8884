"""The examples, run as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def losses(name: str, folder: Path, *words: str) -> list[float]:
    """Runs an example on eight devices; returns the losses that it prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment |= {
        "PYTHONPATH": str(REPOSITORY),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
    }
    run = subprocess.run(
        [sys.executable, "-W", "error", str(REPOSITORY / "examples" / name), *words],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return [
        float(loss) for loss in re.findall(r"^step .*loss ([\d.]+)", run.stdout, re.M)
    ]


@pytest.mark.slow
def test_bare_functions(tmp_path):
    first, *_, last = losses("bare_functions.py", tmp_path, "--steps=60")
    assert last < first - 1


@pytest.mark.slow
def test_an_equinox_model(tmp_path):
    pytest.importorskip("equinox")
    first, *_, last = losses("equinox_model.py", tmp_path)
    assert last < 0.1 < first


@pytest.mark.slow
def test_a_linen_transformer_that_goes_on(tmp_path):
    words = ("linen_transformer.py", tmp_path, "--folder=run")
    first, *_, middle = losses(*words, "--steps=100")
    assert middle < first - 1.5
    assert losses(*words, "--steps=101")[0] < middle + 0.5
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()
