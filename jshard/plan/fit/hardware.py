"""The GPUs that jshard knows, and the share of their peaks that it expects.

``FITTED`` is the default: what ``benchmarks/published.py`` fits to published steps.
``STATED`` are the constants before any fit. ``python -m jshard.plan --constants=NAME``
takes either name, or a file: for example the one that ``benchmarks/gpu.py`` writes
after measuring a GPU.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

from jshard.system.errors import UserError
from jshard.system.files.untrusted import read_json

# Dense bf16 peak in FLOP/s with sums in float32, from the vendor's data sheets (for
# GeForce and RTX: white papers of GA102, Ada and Blackwell). The first name that is
# part of `device_kind` counts.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "GB200": 2500e12,
    "GB300": 2500e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "RTX 4090": 165.2e12,
    "RTX 5090": 209.5e12,
    "L40S": 362.05e12,
    "RTX A6000": 154.8e12,
    "RTX 6000 Ada": 364.25e12,
    "RTX PRO 6000": 503.8e12,
}
# The rate of dense fp4 products by that of bf16 ones, as B200s and GB200s have it.
FP4 = 4.0
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
    # The same for those in MXFP8: of the 4.5 PFLOP/s of a B200 or B300, and the 5 of a
    # GB200 or GB300. No run confirms it.
    mxfp8: float = 0.72
    # And for those in NVFP4: of `GPU.fp4` times the peak. No run confirms it, either.
    nvfp4: float = 0.72
    attention: float = 0.72  # the same for flash attention, forward and backward
    memory: float = 0.85  # share of the device memory's bandwidth
    launch: float = 3e-6  # seconds added to each kernel
    link: float = 370 / 450  # share of the link's (NCCL's bus bandwidth on 8 x H100)
    # Seconds for which the slowest host holds up a collective between hosts, for each
    # doubling of their number. Nothing hides them.
    straggle: float = 0.0
    network_port: float = 370e9 / 8  # bytes/s of a port of 400 Gb/s (370 of them)
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
    link: float  # bytes/s in one direction to the others of its domain
    host: int = 8  # GPUs of a host
    domain: int = 8  # GPUs that the link joins: of a host, or of an NVLink rack
    links: str = "NVLink"  # or PCIe
    port: float = 1.0  # speed of its network port, in ports of 400 Gb/s
    bus: float = 1.0  # of its bus to the host, in PCIe 5.0 x16
    threads: int = 2048  # of a multiprocessor
    fp4: float = (
        FP4  # FLOP/s of dense fp4 products by those of bf16 ones, from Blackwell
    )
    constants: Constants = FITTED  # the share of these that programs reach
    source: str = ""  # the user's file that changes figures; no run confirms those

    def on_hosts(self, host: int) -> "GPU":
        """Returns it with so many in a host.

        The NVLink of a rack joins hosts of any size; any other one joins a host's GPUs.
        """
        domain = self.domain if self.domain > self.host else host
        return dataclasses.replace(self, host=host, domain=domain)

    @property
    def usable(self) -> int:
        """Bytes of memory that a program may use."""
        return int(_USABLE * self.memory)

    @property
    def network_port(self) -> float:
        """Bytes/s of its own network port."""
        return self.port * self.constants.network_port

    @property
    def host_bus(self) -> float:
        """Bytes/s to or from the host."""
        return self.bus * self.constants.host_bus

    def product_seconds(self, flops: float, limit: str = "matmul") -> float:
        """Seconds of so many FLOPs of bf16 products, limited by one of the shares.

        Those of NVFP4 count as if they had `FP4` times the rate of bf16.
        """
        rate = self.fp4 / FP4 if limit == "nvfp4" else 1.0
        return flops / (getattr(self.constants, limit) * rate * self.flops)

    def memory_seconds(self, nbytes: float) -> float:
        """Seconds to read or write so many bytes of the device's memory."""
        return nbytes / (self.constants.memory * self.bandwidth)

    def link_seconds(self, nbytes: float) -> float:
        """Seconds to receive so many bytes from others of its domain."""
        return nbytes / (self.constants.link * self.link)


_A100_SHARED = (49152, 167936, 166912)
_H100_SHARED = (49152, 233472, 232448)
_A6000_SHARED = (49152, 102400, 101376)
_PRO_SHARED = (49152, 131072, 101376)

_PCIE = {"links": "PCIe", "bus": 0.5, "threads": 1536}  # PCIe 4.0
_PCIE_5 = {"links": "PCIe", "threads": 1536}
# PFLOP/s of dense fp4, NVIDIA's data sheets: 108 in an HGX B300 (105 in earlier ones),
# 1080 in a GB300 NVL72; 72 in an HGX B200, 720 in a GB200 NVL72.
_ULTRA = 6.0  # fp4 by bf16
_RACK = {"host": 4, "domain": 72, "bus": 7.0}  # NVL72; NVLink-C2C to the CPU, 450 GB/s

# Sources: XLA's device descriptions (backends/gpu/target_config/specs/*.txtpb), and the
# data sheets from `flops` on. XLA has none of rtx4090 and l40s: the white paper of Ada
# (cores, clock, caches), CUDA's programming guide (capability 8.9), and the memory that
# CUDA reports, as users quote it (23.65 and 44.42 GiB). Their links are PCIe 4.0 x16.
# Network ports: HGX and GB200 have ConnectX-7, B300 and GB300 ConnectX-8, L40S the 200
# Gb/s a GPU of NVIDIA's reference design 2-8-5-200; 100 Gb/s are a guess for the rest.
# The H100 of 96 GB and 500 W is that of torchtitan's published runs, with 2.4 TB/s and
# a lower peak that they do not know; its memory here is 96/80 of the other H100's.
# XLA has none of rtx5090 and rtx6000ada, either: CUDA's deviceQuery and the memory that
# PyTorch reports, as users quote them (NVIDIA/nccl#1637, 44.43 GiB with ECC).
GPUS = {
    "a100": GPU(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 85_100_068_864, 2.03904e12,
        41_943_040, 1.41, _A100_SHARED, PEAK_FLOPS["A100"], 300e9, bus=0.5,
    ),
    "a100-40": GPU(
        "NVIDIA A100-SXM4-40GB", (8, 0), 108, 64, 42_331_013_120, 1.5552e12,
        41_943_040, 1.41, _A100_SHARED, PEAK_FLOPS["A100"], 300e9, bus=0.5,
    ),
    "h100": GPU(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 84_942_979_072, 3.35232e12,
        52_428_800, 1.98, _H100_SHARED, PEAK_FLOPS["H100"], 450e9,
    ),
    "h100-96": GPU(
        "NVIDIA H100 96GB HBM2e", (9, 0), 132, 128, 101_931_574_886, 2.4e12,
        52_428_800, 1.98, _H100_SHARED, PEAK_FLOPS["H100"], 450e9,
    ),
    "h100-pcie": GPU(
        "NVIDIA H100 PCIe", (9, 0), 114, 128, 84_942_979_072, 2.03904e12,
        52_428_800, 1.755, _H100_SHARED, PEAK_FLOPS["H100 PCIe"], 64e9, links="PCIe",
    ),
    "h200": GPU(
        "NVIDIA H200", (9, 0), 132, 128, 151_397_597_184, 4.8e12,
        52_428_800, 1.98, _H100_SHARED, PEAK_FLOPS["H200"], 450e9,
    ),
    "b200": GPU(
        "NVIDIA B200", (10, 0), 148, 128, 191_514_411_008, 7.67232e12,
        132_644_864, 1.965, _H100_SHARED, PEAK_FLOPS["B200"], 900e9,
    ),
    "b300": GPU(
        "NVIDIA B300", (10, 3), 158, 128, 297_021_865_984, 7.936e12,
        135_528_448, 1.965, _H100_SHARED, PEAK_FLOPS["B300"], 900e9, port=2.0,
        fp4=_ULTRA,
    ),
    "gb200": GPU(
        "NVIDIA GB200", (10, 0), 152, 128, 197_897_748_480, 7.928064e12,
        135_528_448, 2.062, _H100_SHARED, PEAK_FLOPS["GB200"], 900e9, **_RACK,
    ),
    "gb300": GPU(
        "NVIDIA GB300", (10, 3), 152, 128, 297_021_079_552, 7.928064e12,
        135_528_448, 2.07, _H100_SHARED, PEAK_FLOPS["GB300"], 900e9, port=2.0,
        fp4=_ULTRA, **_RACK,
    ),
    "rtx4090": GPU(
        "NVIDIA GeForce RTX 4090", (8, 9), 128, 128, 25_393_994_137, 1.008e12,
        75_497_472, 2.52, _A6000_SHARED, PEAK_FLOPS["RTX 4090"], 32e9, port=0.25,
        **_PCIE,
    ),
    "rtx5090": GPU(
        "NVIDIA GeForce RTX 5090", (12, 0), 170, 128, 33_677_180_928, 1.792e12,
        100_663_296, 2.407, _A6000_SHARED, PEAK_FLOPS["RTX 5090"], 64e9, port=0.25,
        fp4=8.0, **_PCIE_5,
    ),
    "rtx6000ada": GPU(
        "NVIDIA RTX 6000 Ada Generation", (8, 9), 142, 128, 47_695_611_822, 9.6e11,
        100_663_296, 2.505, _A6000_SHARED, PEAK_FLOPS["RTX 6000 Ada"], 32e9,
        port=0.25, **_PCIE,
    ),
    "rtxpro6000": GPU(
        "NVIDIA RTX PRO 6000 Blackwell", (12, 0), 188, 128, 103_079_215_104, 1.792e12,
        134_217_728, 2.6, _PRO_SHARED, PEAK_FLOPS["RTX PRO 6000"], 64e9, port=0.25,
        **_PCIE_5,
    ),
    "l40s": GPU(
        "NVIDIA L40S", (8, 9), 142, 128, 47_695_611_822, 8.64e11,
        100_663_296, 2.52, _A6000_SHARED, PEAK_FLOPS["L40S"], 32e9, port=0.5, **_PCIE,
    ),
    "a6000": GPU(
        "NVIDIA RTX A6000", (8, 6), 84, 128, 51_041_271_808, 7.68096e11,
        6_291_456, 1.8, _A6000_SHARED, PEAK_FLOPS["RTX A6000"], 32e9, port=0.25,
        **_PCIE,
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
        found = read_json(Path(name))
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
