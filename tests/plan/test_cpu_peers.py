"""benchmarks/cpu_peers.py: jshard, GSPMD and PyTorch's FSDP2 train alike on CPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cpu_peers.py"
TINY = "--layers=2 --width=64 --length=32 --rounds=2 --backend=aot_eager"


@pytest.mark.slow
def test_from_the_same_values_the_losses_are_the_same():
    pytest.importorskip("torch")
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *TINY.split()],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows = [line.split("|") for line in done.stdout.splitlines() if line[:1] == "|"]
    cells = {row[1].strip(): [cell.strip() for cell in row[2:-1]] for row in rows[2:]}
    assert list(cells) == ["jshard", "GSPMD, plain JAX", "PyTorch FSDP2"]
    losses = {name: [float(x) for x in row[3].split()] for name, row in cells.items()}
    assert losses["jshard"][-1] < losses["jshard"][0]
    for name, found in losses.items():
        assert found == pytest.approx(losses["jshard"], abs=2e-4), name
