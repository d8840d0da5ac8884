"""Memory and traffic of each strategy, for Llama-2-7B on absent H100s.

    JAX_PLATFORMS=cpu python benchmarks/strategies.py --topology=h100:8

Prints a markdown table: bytes of one device, as compiled, and what it receives in a
step, counted in the program that is compiled, by kind of collective. With micro-batches
each has as many tokens as the one of the other rows.
"""

import argparse
from pathlib import Path
from typing import Any

import jax

from compiling import Row, compile_row, make_mesh, trace
from jshard.plan.start_up import traffic

GIB = 2**30
KINDS = ("all-gather", "reduce-scatter", "all-reduce")
GROUPS: dict[str, Any] = {"reshard_after_forward": 8}
# name: strategy, micro-batches, further settings of the policy
STRATEGIES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "DDP": ("ddp", 1, {}),
    "ZeRO-1": ("zero1", 1, {}),
    "ZeRO-2": ("zero2", 1, {}),
    "ZeRO-3": ("zero3", 1, {}),
    "ZeRO-3, groups of 8 for the backward": ("zero3", 1, GROUPS),
    "hybrid": ("hybrid", 1, {}),
    "DDP, 4 micro-batches": ("ddp", 4, {}),
    "ZeRO-1, 4 micro-batches (no_sync)": ("zero1", 4, {}),
    "ZeRO-2, 4 micro-batches": ("zero2", 4, {}),
    "ZeRO-3, 4 micro-batches": ("zero3", 4, {}),
    "hybrid, 4 micro-batches": ("hybrid", 4, {}),
}


def received(row: Row) -> dict[str, int]:
    """Bytes that a device receives in a step, by kind of collective."""
    mesh = make_mesh(row)
    found = traffic(trace(row, mesh)[0].jaxpr.jaxpr, dict(mesh.shape))
    return {
        kind: sum(t.wire_bytes for (name, _), t in found.items() if name == kind)
        for kind in KINDS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="h100:64")
    parser.add_argument("--remat", default="full")
    parser.add_argument("--cache", type=Path, help="folder of results to reuse")
    options = parser.parse_args()
    single = options.topology.endswith(":8")  # one host: hybrid and groups are ZeRO-3

    print(f"jax {jax.__version__}, {options.topology}, remat {options.remat}, GiB")
    print("| strategy | state | in all |", *(f" {kind}s |" for kind in KINDS))
    print("|---" * (3 + len(KINDS)) + "|")
    for name, (strategy, accumulate, knobs) in STRATEGIES.items():
        if single and (strategy == "hybrid" or knobs):
            continue
        settings = (("accumulate", accumulate), *knobs.items())
        row = Row(
            topology=options.topology,
            strategy=strategy,
            remat=options.remat,
            batch=accumulate,
            policy=settings,
        )
        found, moved = compile_row(row, options.cache), received(row)
        state = found["parameters"] + found["optimizer"]
        cells = [state, found["total"], *moved.values()]
        print("|", name, *(f"| {x / GIB:.2f}" for x in cells), "|", flush=True)


if __name__ == "__main__":
    main()
