"""Planned time and memory of a step with float8 products, beside bf16 ones.

    JAX_PLATFORMS=cpu python benchmarks/float8_plan.py --topology=h100:8

Llama steps of one sequence a GPU, compiled for absent GPUs; their schedules replayed
with stated constants, which give float8 products twice the rate of bf16 ones. Prints a
markdown table: milliseconds of a step, and those of them in which nothing hides a
collective; GB that a device receives; GiB of its memory; the speed-up.
"""

import argparse
from pathlib import Path

from compiling import UNROLLED, Row, compile_row

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="h100:8")
    parser.add_argument("--models", default="llama:3-8b")
    parser.add_argument("--remat", default="dots,full")
    parser.add_argument("--cache", type=Path, help="a folder for finished rows")
    options = parser.parse_args()
    print("| model | GPUs | remat | products | step | exposed | GB | GiB | speed-up |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model in options.models.split(","):
        for remat in options.remat.split(","):
            before = None
            for products in (None, "float8"):
                row = Row(
                    topology=options.topology,
                    remat=remat,
                    recipe=model,
                    products=products,
                    policy=UNROLLED,
                )
                found = compile_row(row, options.cache)
                before = before or found["step"]
                cells = [
                    model,
                    options.topology,
                    remat,
                    products or "bf16",
                    f"{found['step'] * 1e3:.1f}",
                    f"{found['exposed'] * 1e3:.2f}",
                    f"{found['wire'] / 1e9:.2f}",
                    f"{found['total'] / GIB:.2f}",
                    f"{before / found['step']:.3f}",
                ]
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
