"""Device memory of Llama-2-7B on H100s, by part, jshard beside GSPMD; no GPU needed.

    JAX_PLATFORMS=cpu python benchmarks/llama_memory.py --topology=h100:8,h100:64

Prints a markdown table. Of a step's temporary memory, what grows with depth is found by
compiling half the layers too: that is a shard of a layer's gradient and the activations
that a layer keeps. The rest does not: gathered weights, logits, and workspace.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
from compiling import OPTIONS, STRATEGIES, Row, compile_row

GIB = 2**30
SYSTEMS = {"jshard": STRATEGIES, "gspmd": ("zero3", "hybrid", "ddp")}


def parts(row: Row, cache: Path | None) -> dict[str, Any]:
    """The parts of one device's memory, in bytes, and what compiling said."""
    full = compile_row(row, cache)
    layers = row.layers or 32
    half = compile_row(_with(row, layers=layers // 2), cache)
    growth = 2 * (full["temporary"] - half["temporary"])
    layer_parameters = 2 * (full["parameters"] - half["parameters"])
    return full | {
        "gradients": full["parameters"],
        "activations": growth - layer_parameters,
        "rest": full["temporary"] - growth + layer_parameters - full["parameters"],
    }


def _with(row: Row, **changes: Any) -> Row:
    return Row(**(vars(row) | changes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    lists = {
        "topology": "h100:8,h100:64,h100:256",
        "strategy": ",".join(STRATEGIES),
        "remat": "full,dots,none",
        "attention": "cudnn",
        "jshard-options": "default",
        "gspmd-options": "maxtext,default",
    }
    for name, default in lists.items():
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--cache", type=Path, help="folder of results to reuse")
    options = vars(parser.parse_args())
    chosen = {name: options[name.replace("-", "_")].split(",") for name in lists}

    print(f"jax {jax.__version__}, GiB of one device")
    columns = "parameters optimizer gradients activations rest total".split()
    print("| GPUs | strategy | remat | attention | system | options |", end="")
    print(*columns, sep=" | ", end=" |\n")
    print("|---" * (6 + len(columns)) + "|")
    for topology in chosen["topology"]:
        for strategy in chosen["strategy"]:
            if strategy == "hybrid" and topology.endswith(":8"):
                continue  # one host: ZeRO-3
            for remat in chosen["remat"]:
                for attention in chosen["attention"]:
                    for system, can in SYSTEMS.items():
                        if strategy not in can:
                            continue
                        for name in chosen[f"{system}-options"]:
                            row = Row(
                                system, topology, strategy, remat, attention, name
                            )
                            found = parts(row, options["cache"])
                            cells = [f"{found[c] / GIB:.2f}" for c in columns]
                            print(
                                "",
                                topology.partition(":")[2],
                                *(strategy, remat, attention, system, name),
                                *cells,
                                "",
                                sep=" | ",
                                flush=True,
                            )


if __name__ == "__main__":
    main()
