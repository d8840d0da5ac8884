"""Cards: what a job takes on a kind of GPU, planned, beside the best measured peer.

    JAX_PLATFORMS=cpu python benchmarks/cards.py > docs/figures/cards.md

Each card is a recipe with its own settings, but for the keys of its command, compiled
for GPUs that are absent. The page is written by this command alone.
"""

import datetime
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jshard.plan.planning import plan_recipe
from jshard.recipe.configured import configure
from jshard.recipe.load import open_recipe
from jshard.recipe.make_config import make_config
from jshard.recipe.recipe_path import find_recipe
from jshard.system.formatting import format_bytes, format_count, format_seconds

HEADING = """\
# Planned cards

<!-- not run on this page: the command takes minutes -->
```bash
JAX_PLATFORMS=cpu python benchmarks/cards.py > docs/figures/cards.md
```

Each row is a job as its command would train it, compiled for absent GPUs and replayed
with the [cost model](../plan.md#the-model). The range is that of published runs; "not
confirmed" says that none is of this kind. No GPU has run one of these yet, so the
column *measured* is empty. *Best peer* is the fastest published figure of the same job
that we know, in tokens/s per GPU.
"""
COLUMNS = (
    "job", "GPUs", "mesh", "remat, micro-batches", "step", "range",
    "tokens/s per GPU", "MFU", "exposed", "memory", "measured", "best peer",
)  # fmt: skip


class Job(NamedTuple):
    """A recipe on GPUs, and what the best peer made of it."""

    name: str
    recipe: str
    topology: str
    keys: dict[str, Any]
    peer: str = ""


FLOAT8 = {"policy.precision.products": "float8"}
JOBS = (
    Job("GPT-2 124M", "gpt2_124m.py", "h100:8", {}, "468k, llm.c"),
    Job("GPT-2 124M", "gpt2_124m.py", "a100:8", {}),
    Job(
        "Llama 3 8B",
        "llama.py:3-8b",
        "h100:8",
        {"batch_size": 16},
        "6.67k, torchtitan (H100s with 2.4 TB/s)",
    ),
    Job("Llama 3 8B", "llama.py:3-8b", "h100:64", {"batch_size": 128}),
    Job(
        "Llama 3 8B, float8",
        "llama.py:3-8b",
        "h200:32",
        {"batch_size": 64, **FLOAT8},
        "10.9k, torchtitan",
    ),
    Job("Llama 3 8B", "llama.py:3-8b", "b200:8", {"batch_size": 16}),
    Job("Llama 3 8B", "llama.py:3-8b", "gb200:64", {"batch_size": 128}),
    Job(
        "Llama 3 70B",
        "llama.py:3-70b",
        "h100:128",
        {"batch_size": 256},
        "1.05k, MaxText",
    ),
    Job(
        "Llama 3 70B",
        "llama.py:3-70b",
        "h200:256",
        {"batch_size": 512},
        "1.06k, MaxText",
    ),
)


def card(job: Job) -> list[str]:
    """Returns the cells of a job, as of ``COLUMNS``."""
    with open_recipe(find_recipe(job.recipe)) as recipe:
        plan = plan_recipe(
            configure(recipe, make_config(recipe, job.keys)), job.topology
        )
    timeline, policy = plan.timeline, plan.program.job.fsdp.policy
    assert timeline is not None
    spread = plan.seconds_range
    each = plan.program.items / timeline.seconds / plan.devices
    mesh = " x ".join(f"{axis} {n}" for axis, n in plan.program.mesh.shape.items())
    keys = "".join(f" --config.{key}={value}" for key, value in job.keys.items())
    print(f"{job.name} on {job.topology}", file=sys.stderr)
    return [
        f"{job.name}: `--config={job.recipe}{keys}`",
        job.topology,
        mesh,
        f"{policy.remat}, {policy.accumulate}",
        format_seconds(timeline.seconds),
        " to ".join(map(format_seconds, spread)) if spread else "not confirmed",
        format_count(each),
        f"{plan.mfu:.1%}" if plan.mfu is not None else "",
        f"{timeline.exposed / timeline.seconds:.1%}",
        format_bytes(plan.memory.total),
        "",
        job.peer,
    ]


def main() -> None:
    root = Path(__file__).parents[1]
    git = ("git", "-C", str(root), "rev-parse", "--short", "HEAD")
    commit = subprocess.check_output(git, text=True).strip()
    print(HEADING)
    print(f"{datetime.date.today()} at {commit}, JAX {jax.__version__}.\n")
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|")
    for job in JOBS:
        print("| " + " | ".join(card(job)) + " |", flush=True)


if __name__ == "__main__":
    main()
