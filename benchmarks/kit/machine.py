"""What is measured on: the GPU as its driver tells, without JAX."""

import platform
import subprocess
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = (
    "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "optax",
    "orbax-checkpoint", "torch", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
    "nvidia-cublas", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
_ASKED = (
    "name", "driver_version", "memory.total", "clocks.max.sm", "clocks.current.sm",
    "clocks.current.memory", "power.limit", "power.draw", "temperature.gpu",
)  # fmt: skip
_CARDS = {"H100": "h100", "H200": "h200", "A100": "a100", "B200": "b200"}


@dataclass(frozen=True)
class Machine:
    """A machine's accelerators.

    Attributes:
      name: of the GPU as the driver reports it, or "CPU".
      count: of these.
      memory: of each, in bytes; 0 of a CPU.
      facts: all that the driver says of the first.
    """

    name: str
    count: int
    memory: int
    facts: dict[str, str]

    @property
    def card(self) -> str | None:
        """The planner's name of the GPU, if it knows it."""
        return next((x for part, x in _CARDS.items() if part in self.name), None)

    def about(self) -> dict[str, Any]:
        """Hardware, software and date."""
        return {
            "gpu": self.name,
            "gpus": self.count,
            "driver": self.facts,
            "host": platform.platform(),
            "python": platform.python_version(),
            "versions": _versions(),
            "commit": _commit(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }


def find_machine() -> Machine:
    """Asks ``nvidia-smi``; a machine without one is a CPU."""
    gpus = ask_driver()
    if not gpus:
        return Machine("CPU", 1, 0, {})
    memory = int(gpus[0]["memory.total"].split()[0]) * 2**20
    return Machine(gpus[0]["name"], len(gpus), memory, gpus[0])


def ask_driver() -> list[dict[str, str]]:
    """What the driver says of each GPU now; nothing where there is no driver."""
    words = ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return []
    lines = found.stdout.strip().splitlines()
    if found.returncode or not lines:
        raise SystemExit(f"nvidia-smi: {found.stdout}{found.stderr}".strip())
    values = [map(str.strip, line.split(",")) for line in lines]
    return [dict(zip(_ASKED, x, strict=True)) for x in values]


def _versions() -> dict[str, str]:
    there = {x.name.lower(): x.version for x in metadata.distributions() if x.name}
    return {name: there[name] for name in _PACKAGES if name in there}


def _commit() -> str:
    """Of this checkout; unknown where it came without its history."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=7"]
    try:
        found = subprocess.run(
            words, cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() or "unknown"
