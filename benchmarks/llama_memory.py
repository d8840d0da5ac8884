"""Device memory of Llama-2-7B on H100s, by part, jshard beside GSPMD; no GPU needed.

    JAX_PLATFORMS=cpu python benchmarks/llama_memory.py --topology=h100:8,h100:64

Prints a markdown table in GiB of one device, with one sequence of 4096 tokens on each.
What layers keep for the backward (with ZeRO-2 their weights, too) is what a step's
temporary memory grows by with depth, beyond gradients: half the layers are compiled as
well, for 8 GPUs. The rest does not grow: gathered weights of the layers at work,
logits, workspace.

jshard stands there three times: with a loop over layers, of which the parts are; with
its layers unrolled, as in the recipe; and with a loop but without prefetch, which holds
one layer's weights and gradients at a time. GSPMD stands there twice: as MaxText has
it, sharding and options, and where it needs least: with XLA's defaults, and of two
shardings, MaxText's and that of the first dimension, the better.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax

import gspmd
from compiling import STRATEGIES, UNROLLED, Row, compile_row

GIB = 2**30
LAYERS = 32
HEADS = [
    "GPUs",
    "strategy",
    "remat",
    "parameters",
    "optimizer",
    "gradients",
    "kept",
    "rest",
    "jshard",
    "unrolled",
    "without prefetch",
    "GSPMD, MaxText",
    "GSPMD, least",
]


def kept(row: Row, cache: Path | None) -> float:
    """Bytes that all layers keep for the backward; they do not depend on the mesh."""
    strategy = "zero3" if row.strategy == "hybrid" else row.strategy
    row = dataclasses.replace(row, topology="h100:8", strategy=strategy)
    whole = compile_row(row, cache)
    half = compile_row(dataclasses.replace(row, layers=LAYERS // 2), cache)
    growth = {
        part: 2 * (whole[part] - half[part]) for part in ("temporary", "parameters")
    }
    return growth["temporary"] - growth["parameters"]


def sizes(row: Row, cache: Path | None) -> list[float | None]:
    """Bytes for the columns after ``remat``; None where GSPMD has no such strategy."""
    whole = compile_row(row, cache)
    parts = [whole["parameters"], whole["optimizer"], whole["parameters"]]
    parts.append(kept(row, cache))

    def total(**changes: Any) -> int:
        return compile_row(dataclasses.replace(row, **changes), cache)["total"]

    totals: list[float | None] = [whole["total"], total(policy=UNROLLED)]
    totals += [total(policy=(("prefetch", False),)), None, None]
    if row.strategy in ("zero3", "hybrid", "ddp"):
        remat = gspmd.ALIKE.get(row.remat, row.remat)
        peer = {"system": "gspmd", "remat": remat}
        totals[3] = total(rules="maxtext", options="maxtext", **peer)
        totals[4] = min(total(rules=rules, **peer) for rules in ("maxtext", "first"))
    return [*parts, whole["total"] - sum(parts), *totals]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="h100:8,h100:64,h100:256")
    parser.add_argument("--strategy", default=",".join(STRATEGIES))
    parser.add_argument("--remat", default="full,dots,none")
    parser.add_argument("--attention", default="cudnn", help="or xla")
    parser.add_argument("--cache", type=Path, help="folder of results to reuse")
    options = parser.parse_args()

    print(f"JAX {jax.__version__}, attention by {options.attention}, GiB\n")
    print("| " + " | ".join(HEADS) + " |")
    print("|---" * len(HEADS) + "|")
    for topology in options.topology.split(","):
        number = topology.partition(":")[2]
        for strategy in options.strategy.split(","):
            if strategy == "hybrid" and int(number) <= 8:
                continue  # one host: ZeRO-3
            for remat in options.remat.split(","):
                row = Row(
                    topology=topology,
                    strategy=strategy,
                    remat=remat,
                    attention=options.attention,
                )
                cells = [number, strategy, remat]
                for size in sizes(row, options.cache):
                    cells.append("" if size is None else f"{size / GIB:.2f}")
                print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
