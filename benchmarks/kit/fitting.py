"""The planner's constants, from what single kernels took."""

import statistics
from typing import Any

from jshard.plan.fit.hardware import GPU, GPUS

# What the shares are of, where there is no card (--tiny): any would do.
_TINY = "h200"
LARGE = 2**28  # bytes
Measured = dict[str, dict[str, Any]]


def fit(found: dict[str, Measured], card: str | None) -> dict[str, Any]:
    """Constants by name; those that nothing measured are left out.

    A share is the median over the kernels of its kind, less the launch that the
    planner adds to each.

    Args:
      found: of the stage "kernels": by part, then by kernel.
      card: the planner's name of the GPU.
    """
    gpu = GPUS[card or _TINY]
    launch = _median(found, "launches", lambda x: x["seconds"])

    def share(part: str, amount: str, peak: float, prefix: str = "") -> float | None:
        return _median(
            found,
            part,
            lambda x: x[amount] / (x["seconds"] - (launch or 0.0)) / peak,
            prefix,
        )

    fitted = {
        "launch": launch,
        # Of bfloat16 products: the other dtypes' rates are relative to these.
        "matmul": share("products", "flops", gpu.flops, "bf16 "),
        "float8": share("products", "flops", 2 * gpu.flops, "fp8 "),
        "attention": share("attention", "flops", gpu.flops),
        "memory": share("memory", "bytes", gpu.bandwidth),
        "link": _link(found, gpu),
        "host_bus": _host_bus(found, gpu),
    }
    known = {name: value for name, value in fitted.items() if value is not None}
    return {"source": f"fitted to one {gpu.name}", **known}


def _median(
    found: dict[str, Measured], part: str, value: Any, prefix: str = ""
) -> float | None:
    values = [
        value(kernel)
        for name, kernel in found.get(part, {}).items()
        if name.startswith(prefix) and "seconds" in kernel
    ]
    return statistics.median(values) if values else None


def _link(found: dict[str, Measured], gpu: GPU) -> float | None:
    """Of gathers and scatters that are large enough to fill the links."""
    large = [
        kernel["bytes_per_second"]
        for name, kernel in found.get("collectives", {}).items()
        if not name.startswith(("all-reduce", "skipped"))
        and int(name.split()[1]) >= LARGE
    ]
    return statistics.median(large) / gpu.link if large else None


def _host_bus(found: dict[str, Measured], gpu: GPU) -> float | None:
    """Of PCIe 5.0; the planner has one speed for both ways."""
    speeds = [x["bytes_per_second"] for x in found.get("host", {}).values()]
    return min(speeds) / gpu.bus if speeds else None
