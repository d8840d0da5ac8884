"""How fast a run goes: tokens or examples a second, and MFU."""

import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

# Dense bf16 peak in FLOP/s by device name, from the vendor's data sheets; the first
# name found in `device_kind` counts.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
}


class Throughput:
    """Measures the speed of steps by wall time."""

    def __init__(self, batch: Any, mesh: Mesh, flops_per_token: float | None = None):
        """Starts the clock.

        Args:
          batch: This process's part of a batch; all steps have as much.
          mesh: The devices that share the work.
          flops_per_token: Model FLOPs of one token, forward and backward; without it,
            or on a device whose peak is not known, there is no MFU.
        """
        self._unit, items = count_items(batch)
        self._items = items * jax.process_count()
        peak = peak_flops(mesh.devices.flat[0].device_kind)
        self._flops = flops_per_token if self._unit == "tokens" else None
        self._peak = peak * mesh.size if peak else None
        self.restart()

    def restart(self) -> None:
        """Starts the clock anew: what was before is not the steps' time."""
        self._since = time.perf_counter()

    def measure(self, steps: int) -> dict[str, float]:
        """Returns what `metrics.jsonl` says of the steps since the last restart."""
        step_time = (time.perf_counter() - self._since) / steps
        per_second = self._items / step_time
        values = {"step_time": step_time, f"{self._unit}_per_second": per_second}
        if self._flops and self._peak:
            values["mfu"] = per_second * self._flops / self._peak
        return values


def peak_flops(device_kind: str) -> float | None:
    """Returns a device's dense bf16 peak in FLOP/s, or None when it is not known."""
    for name, peak in PEAK_FLOPS.items():
        if name in device_kind:
            return peak
    return None


def count_items(batch: Any) -> tuple[str, int]:
    """Counts what a batch holds.

    Args:
      batch: A pytree of arrays with a leading batch dimension.

    Returns:
      `("tokens", n)` when the batch has integers of shape (batch, time), else
      `("examples", n)`.
    """
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]
    for leaf in leaves:
        if leaf.ndim == 2 and np.issubdtype(leaf.dtype, np.integer):
            return "tokens", leaf.size
    return "examples", len(leaves[0])
