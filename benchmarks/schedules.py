"""A step's time, exposed communication, traffic and memory, jshard beside GSPMD.

    JAX_PLATFORMS=cpu python benchmarks/schedules.py --topology=h100:64

Llama steps of one sequence a GPU, compiled for absent GPUs; their schedules replayed
with the cost model of docs/plan.md. Prints a markdown table: milliseconds of a
step, those in which nothing hides a collective, and the floor, a step with none; GB
that a device receives; GiB of its memory. jshard's layers are unrolled, unless
``--scan`` is given. GSPMD is the same model under MaxText's
sharding, compiled with each set of published options (``gspmd.OPTIONS``): its row is
the fastest of these, which "options" names. "ratio" is of the steps. "least" is what a
device receives where every sharded weight is gathered twice in bf16 and its gradient
scattered once; only ``--strategy=zero3`` has one.

The cost model has its stated constants by default, so that tables of different dates
compare; ``--constants=fitted`` takes the planner's default.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax

import gspmd
from compiling import STRATEGIES, UNROLLED, Row, compile_row, make_mesh, trace
from jshard.plan.fit.hardware import Constants, find_constants

GIB = 2**30
HEADS = [
    "model",
    "GPUs",
    "remat",
    "least GB",
    *(
        head
        for system in ("jshard", "GSPMD")
        for head in (f"{system} step", "exposed", "floor", "GB", "GiB")
    ),
    "options",
    "ratio",
]


def least(row: Row) -> float:
    """Bytes that a device must receive with every weight sharded and dropped."""
    mesh = make_mesh(row)
    _, _, parameters = trace(row, mesh)
    number = mesh.size
    whole = sum(x.size for x in jax.tree.leaves(parameters) if not is_replicated(x))
    return 3 * 2 * whole * (number - 1) / number


def is_replicated(parameter: Any) -> bool:
    """Whether each device has all of a parameter."""
    return parameter.sharding.shard_shape(parameter.shape) == parameter.shape


def cells(found: dict[str, Any]) -> list[str]:
    """The columns of one system."""
    step, exposed = found["step"], found["exposed"]
    return [
        f"{step * 1e3:.1f}",
        f"{exposed * 1e3:.2f} ({exposed / step:.2%})",
        f"{(step - exposed) * 1e3:.1f}",
        f"{found['wire'] / 1e9:.2f}",
        f"{found['total'] / GIB:.2f}",
    ]


def fastest_peer(
    row: Row, cache: Path | None, constants: Constants
) -> tuple[dict[str, Any], str]:
    """GSPMD's result with the options that make its step fastest, and their name."""
    found = {}
    for name in gspmd.OPTIONS:
        for scan in (True, False) if name in gspmd.ALSO_UNROLLED else (True,):
            peer = dataclasses.replace(
                row,
                system="gspmd",
                rules="maxtext",
                remat=gspmd.ALIKE.get(row.remat, row.remat),
                options=name,
                form=() if scan else (("scan", False),),
                policy=(),
            )
            label = name if scan else f"{name}, no scan"
            found[label] = compile_row(peer, cache, constants)
    best = min(found, key=lambda name: found[name]["step"])
    return found[best], best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="llama:2-7b,llama:3-8b,llama:3-70b")
    parser.add_argument("--topology", default="h100:8,h100:64,h100:256")
    parser.add_argument("--remat", default="full,dots")
    parser.add_argument("--strategy", default="zero3", choices=STRATEGIES)
    parser.add_argument("--scan", action="store_true", help="jshard: loop over layers")
    parser.add_argument("--cache", type=Path, help="folder of results to reuse")
    parser.add_argument("--constants", default="stated", help="or fitted, or a file")
    options = parser.parse_args()
    constants = find_constants(options.constants)

    print(
        f"JAX {jax.__version__}; ms, GB received, GiB of memory; constants "
        f"{constants.source}\n"
    )
    print("| " + " | ".join(HEADS) + " |")
    print("|---" * len(HEADS) + "|")
    for recipe in options.recipe.split(","):
        for topology in options.topology.split(","):
            for remat in options.remat.split(","):
                row = Row(
                    recipe=recipe,
                    topology=topology,
                    remat=remat,
                    strategy=options.strategy,
                    policy=() if options.scan else UNROLLED,
                )
                ours = compile_row(row, options.cache, constants)
                theirs, best = fastest_peer(row, options.cache, constants)
                bound = f"{least(row) / 1e9:.2f}" if row.strategy == "zero3" else ""
                line = [recipe, topology.partition(":")[2], remat, bound]
                line += [*cells(ours), *cells(theirs)]
                line += [best, f"{ours['step'] / theirs['step']:.3f}"]
                print("| " + " | ".join(line) + " |", flush=True)


if __name__ == "__main__":
    main()
