"""The largest models that fit H100s of 80 GB, compiled; no GPU needed.

    JAX_PLATFORMS=cpu python benchmarks/fits.py

Llama 2 13B on eight and on one, with one or more sequences of 4096 tokens each. Then
the largest decoder on one H100 of a family with one number, the layers L: Llama-shaped,
of width 128 L and hidden width 8/3 of that (up to a multiple of 256), so that L = 32 is
Llama 2 7B and L = 40 is 13B; found by bisection.
"""

import argparse
from pathlib import Path
from typing import Any

import jax

from compiling import Row, compile_row
from jshard.plan import GPUS

GIB = 2**30
# Of the memory, what the CUDA context, NCCL and cuDNN's workspaces do not take.
USABLE = GPUS["h100"].usable


def family(layers: int) -> tuple[tuple[str, Any], ...]:
    """The model settings of the decoder with so many layers."""
    width = 128 * layers
    hidden = -(-8 * width // 3 // 256) * 256
    return (
        ("num_layers", layers),
        ("num_heads", layers),
        ("num_kv_heads", layers),
        ("width", width),
        ("hidden", hidden),
    )


def show(label: str, row: Row, cache: Path | None) -> bool:
    """Prints one row; whether it fits."""
    found = compile_row(row, cache)
    fits = found["total"] <= USABLE
    offload = dict(row.policy).get("offload") or ""
    billions = found["elements"] / 1e9
    print(
        f"| {label} | {row.topology.partition(':')[2]} | {billions:.1f} | {row.remat} "
        f"| {row.batch} | {offload} | {found['total'] / GIB:.1f} "
        f"| {found['host'] / GIB:.1f} | {'yes' if fits else 'no'} |",
        flush=True,
    )
    return fits


def largest(row: Row, low: int, high: int, cache: Path | None) -> None:
    """Bisects the layers: ``low`` fits and ``high`` does not."""
    while high - low > 1:
        middle = (low + high) // 2
        at = Row(**(vars(row) | {"model": family(middle)}))
        if show(f"L = {middle}", at, cache):
            low = middle
        else:
            high = middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="13b-8,13b-1,largest")
    parser.add_argument("--offload", default="none,optimizer,all")
    parser.add_argument("--cache", type=Path, help="folder of results to reuse")
    options = parser.parse_args()
    offloads = [None if x == "none" else x for x in options.offload.split(",")]

    print(f"JAX {jax.__version__}; fits: at most {USABLE / GIB:.1f} GiB\n")
    heads = "model,GPUs,10^9 parameters,remat,sequences,offload,GiB,host GiB,fits"
    print("| " + heads.replace(",", " | ") + " |")
    print("|---" * (heads.count(",") + 1) + "|")
    big = {"recipe": "llama:2-13b"}
    if "13b-8" in options.part:
        for remat, batch in (("full", 1), ("full", 4), ("full", 8), ("dots", 1)):
            row = Row(topology="h100:8", remat=remat, batch=batch, **big)
            show("Llama 2 13B", row, options.cache)
        show("Llama 2 13B", Row(remat="dots", batch=2, **big), options.cache)
    for offload in offloads:
        policy = (("offload", offload),) if offload else ()
        one = {"topology": "h100:1", "policy": policy}
        if "13b-1" in options.part:
            show("Llama 2 13B", Row(**big, **one), options.cache)
        if "largest" in options.part:
            largest(Row(**one), 8, 64, options.cache)


if __name__ == "__main__":
    main()
