"""The GPUs that jshard knows, and the share of their peaks that it expects.

``FITTED`` is the default: what ``benchmarks/published.py`` fits to published steps.
``STATED`` are the constants before any fit. ``python -m jshard.plan --constants=NAME``
takes either name, or a file: for example the one that ``benchmarks/gpu.py`` writes
after measuring a GPU.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from jshard.errors import UserError

# Dense bf16 peak in FLOP/s, from the vendor's data sheets. The first name that is part
# of `device_kind` counts.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
}
GPUS_A_HOST = 8
_USABLE = 0.95  # of the memory; CUDA's context, NCCL and cuDNN take the rest


def peak_flops(device_kind: str) -> float | None:
    """Returns a device's dense bf16 peak in FLOP/s, or None if it is unknown."""
    return PEAK_FLOPS.get(short_name(device_kind))


def short_name(device_kind: str) -> str:
    """Returns "H100" of "NVIDIA H100 80GB HBM3"; the same name if it is unknown."""
    return next((name for name in PEAK_FLOPS if name in device_kind), device_kind)


@dataclasses.dataclass(frozen=True)
class Constants:
    """The constants of the cost model."""

    matmul: float = 0.72  # share of the dense peak that matrix products reach
    float8: float = 0.72  # the same for products in float8, of twice the peak
    attention: float = 0.72  # the same for flash attention, forward and backward
    memory: float = 0.85  # share of the device memory's bandwidth
    launch: float = 3e-6  # seconds added to each kernel
    link: float = 370 / 450  # share of NVLink's (NCCL's bus bandwidth on 8 x H100)
    # Seconds for which the slowest host holds up a collective between hosts, for each
    # doubling of their number. Nothing hides them.
    straggle: float = 0.0
    network_port: float = 370e9 / 8  # bytes/s of a GPU's own port (370 of 400 Gb/s)
    host_bus: float = 55e9  # bytes/s to or from the host (PCIe 5.0 x16, each direction)
    # The least and the largest measured step over its prediction, of the steps that
    # confirm the constants; 1 if none do.
    low: float = 1.0
    high: float = 1.0
    # What these steps were, like "float8 on H100"; None is whatever they are used for.
    confirmed: tuple[str, ...] | None = None
    source: str = "stated"  # where they come from, in a few words

    def range_of(self, seconds: float, kind: str) -> tuple[float, float] | None:
        """Between what a step may take; None if nothing confirms steps of its kind."""
        known = self.confirmed is None or kind in self.confirmed
        if self.low == self.high or not known:
            return None
        return self.low * seconds, self.high * seconds


STATED = Constants()
FITTED = dataclasses.replace(
    STATED,
    matmul=0.637,
    float8=0.712,
    attention=0.403,
    memory=0.833,
    straggle=0.203e-3,
    low=0.92,
    high=1.11,
    confirmed=("bf16 on H100", "bf16 on H200", "float8 on H100"),
    source="fitted to 22 published runs of MaxText, each within 10 % if left out",
)


@dataclasses.dataclass(frozen=True)
class GPU:
    """What the planner and XLA's compiler know of a GPU."""

    name: str  # as the driver reports it
    capability: tuple[int, int]  # CUDA's, (major, minor)
    cores: int  # streaming multiprocessors
    fpus: int  # fp32 lanes of each
    memory: int  # bytes
    bandwidth: float  # of the memory, bytes/s
    l2: int  # bytes of cache
    clock: float  # GHz
    shared: tuple[int, int, int]  # bytes of a block, a multiprocessor, an opt-in block
    flops: float  # FLOP/s of dense bf16 products, the vendor's figure
    nvlink: float  # bytes/s in one direction
    constants: Constants = FITTED  # the share of these that programs reach

    @property
    def usable(self) -> int:
        """Bytes of memory that a program may use."""
        return int(_USABLE * self.memory)

    def product_seconds(self, flops: float, limit: str = "matmul") -> float:
        """Seconds of so many FLOPs of bf16 products, limited by one of the shares."""
        return flops / (getattr(self.constants, limit) * self.flops)

    def memory_seconds(self, nbytes: float) -> float:
        """Seconds to read or write so many bytes of the device's memory."""
        return nbytes / (self.constants.memory * self.bandwidth)

    def link_seconds(self, nbytes: float) -> float:
        """Seconds to receive so many bytes over NVLink."""
        return nbytes / (self.constants.link * self.nvlink)


_A100_SHARED = (49152, 167936, 166912)
_H100_SHARED = (49152, 233472, 232448)

# Sources: XLA's device descriptions (tools/hlo_opt/gpu_specs/*.txtpb), and the data
# sheets for the last two figures.
GPUS = {
    "a100": GPU(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 85_100_068_864, 2.03904e12,
        41_943_040, 1.41, _A100_SHARED, PEAK_FLOPS["A100"], 300e9,
    ),
    "h100": GPU(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 84_942_979_072, 3.35232e12,
        52_428_800, 1.98, _H100_SHARED, PEAK_FLOPS["H100"], 450e9,
    ),
    "h200": GPU(
        "NVIDIA H200", (9, 0), 132, 128, 151_397_597_184, 4.8e12,
        52_428_800, 1.98, _H100_SHARED, PEAK_FLOPS["H200"], 450e9,
    ),
    "b200": GPU(
        "NVIDIA B200", (10, 0), 148, 128, 191_514_411_008, 7.67232e12,
        132_644_864, 1.965, _H100_SHARED, PEAK_FLOPS["B200"], 900e9,
    ),
}  # fmt: skip


def overlapped(busy: float, wire: float) -> float:
    """Estimates the seconds of products and collectives that run side by side.

    Part of the shorter one is never hidden: the ends of each micro-batch.
    """
    return max(busy, wire) + 0.1 * min(busy, wire)


def find_constants(name: str | Path) -> Constants:
    """Returns the constants called "stated" or "fitted", or those of a JSON file.

    Those that a file's object omits stay as stated.

    Raises:
      UserError: the file cannot be read, or a name or value is invalid.
    """
    if name in ("stated", "fitted"):
        return STATED if name == "stated" else FITTED
    try:
        found = json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--constants={name}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"--constants={name}: is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise UserError(f"--constants={name}: must be an object of names and numbers")
    names = [field.name for field in dataclasses.fields(Constants)]
    names.remove("confirmed")  # a file says what holds wherever it is used
    for key, value in found.items():
        if key not in names:
            raise UserError(
                f"--constants={name}: unknown constant {key!r}; possible: "
                f"{', '.join(names)}"
            )
        expected = "text" if key == "source" else "a number above 0"
        if not (isinstance(value, str) if key == "source" else _is_positive(value)):
            raise UserError(f"--constants={name}: {key}={value!r} must be {expected}")
    return Constants(**{"source": str(name), **found})


def _is_positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0
