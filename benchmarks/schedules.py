"""A step's time, exposed communication, traffic and memory, jshard beside GSPMD.

    JAX_PLATFORMS=cpu python benchmarks/schedules.py --topology=h100:64

Llama steps of one sequence a GPU, compiled for GPUs that are not there; their schedules
replayed with the cost model of docs/plan.md. Prints a markdown table: milliseconds of a
step, those in which nothing hides a collective, and the floor, a step with none; GB
that a device receives; GiB of its memory. GSPMD is the same model under MaxText's
sharding and published options. "bound" is what a device receives where every sharded
weight is gathered twice in bf16 and its gradient scattered once.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax
from compiling import Row, compile_row, make_mesh, trace

GIB = 2**30
HEADS = [
    "model",
    "GPUs",
    "remat",
    "bound GB",
    *(
        f"{system} {cell}"
        for system in ("jshard", "GSPMD")
        for cell in ("step", "exposed", "%", "floor", "GB", "GiB")
    ),
    "step ratio",
]


def bound(row: Row) -> float:
    """Bytes that a device must receive with every weight sharded and dropped."""
    mesh = make_mesh(row)
    _, _, parameters = trace(row, mesh)
    number = mesh.size
    whole = sum(x.size for x in jax.tree.leaves(parameters) if not is_small(x))
    return 3 * 2 * whole * (number - 1) / number


def is_small(parameter: Any) -> bool:
    """Whether a parameter is replicated."""
    return parameter.sharding.shard_shape(parameter.shape) == parameter.shape


def cells(found: dict[str, Any]) -> list[str]:
    """The columns of one system."""
    step, exposed = found["step"], found["exposed"]
    return [
        f"{step * 1e3:.1f}",
        f"{exposed * 1e3:.2f}",
        f"{exposed / step:.2%}",
        f"{(step - exposed) * 1e3:.1f}",
        f"{found['wire'] / 1e9:.2f}",
        f"{found['total'] / GIB:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="llama2_7b,llama3_8b,llama3_70b")
    parser.add_argument("--topology", default="h100:8,h100:64,h100:256")
    parser.add_argument("--remat", default="full,dots")
    parser.add_argument("--cache", type=Path, help="folder of results to reuse")
    options = parser.parse_args()

    print(f"JAX {jax.__version__}; ms, GB received, GiB of memory\n")
    print("| " + " | ".join(HEADS) + " |")
    print("|---" * len(HEADS) + "|")
    for recipe in options.recipe.split(","):
        for topology in options.topology.split(","):
            for remat in options.remat.split(","):
                row = Row(recipe=recipe, topology=topology, remat=remat)
                ours = compile_row(row, options.cache)
                maxtext = {"system": "gspmd", "rules": "maxtext", "options": "maxtext"}
                theirs = compile_row(dataclasses.replace(row, **maxtext), options.cache)
                first = [recipe, topology.partition(":")[2], remat]
                first.append(f"{bound(row) / 1e9:.2f}")
                ratio = f"{ours['step'] / theirs['step']:.3f}"
                line = [*first, *cells(ours), *cells(theirs), ratio]
                print("| " + " | ".join(line) + " |", flush=True)


if __name__ == "__main__":
    main()
