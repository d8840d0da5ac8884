"""What others measured under any FSDP, beside jshard's plans of the same jobs.

    JAX_PLATFORMS=cpu python benchmarks/published_ratios.py [--group=NAME]

These runs are PyTorch's, but for Marin's: other kernels, so other times, but the same
ratios. Prints a markdown table for each group: seconds of a step and GB of memory,
measured and planned, and each step over that of the group's first row. No constant was
fitted to them.
"""

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from jshard.plan.planning import plan_recipe
from jshard.recipe.configured import configure
from jshard.recipe.load import open_recipe
from jshard.recipe.make_config import make_config
from jshard.recipe.recipe_path import find_recipe

GB = 1e9
GIB = 2**30 / GB


class Run(NamedTuple):
    """A published run: of which recipe with which keys, and what was measured."""

    name: str
    recipe: str
    topology: str  # "FOUR" stands for hosts of four H200s
    keys: dict[str, Any]
    seconds: float  # inf: it ran out of memory
    memory: float | None = None  # GB


def mpt(size: str, gpus: int, sequences: int, remat: str, seconds: float) -> Run:
    """An MPT of llm-foundry: GPT with biases, 2048 learned positions, untied from none.

    Whole weights are in float32, products and gathers in bf16, sums in float32.
    """
    layers, width = {
        "7B": (32, 4096), "13B": (40, 5120), "30B": (48, 7168), "70B": (80, 8192),
    }[size]  # fmt: skip
    keys = {
        "batch_size": sequences * gpus,
        "policy.remat": remat,
        "policy.accumulate": 1,
        "model.num_layers": layers,
        "model.width": width,
        "model.num_heads": width // 128,
        "model.sequence_length": 2048,
        "model.vocab_size": 50368,
    }
    return Run(f"{size} on {gpus}", "gpt2_124m.py", f"h100:{gpus}", keys, seconds)


def kempner(
    tensor: int, fsdp: int, batch: int, micro: int, seconds: float, memory: float | None
) -> Run:
    """A Llama 3 of 7B's shape by KempnerForge, in bf16, on hosts of four H200s.

    ``batch`` sequences of 4096 for each group of "tensor" and micro-batch. Gradients
    are kept whole between micro-batches, and are scattered once in float32.
    """
    keys = {
        "batch_size": batch * micro * fsdp,
        "mesh.tensor": tensor,
        "policy.remat": "full",
        "policy.accumulate": micro,
        "policy.defer_scatter": True,
        "policy.precision.param": "bfloat16",
        "model.sequence_length": 4096,
    }
    name = f"tensor {tensor} x fsdp {fsdp}"
    topology = f"FOUR:{tensor * fsdp}"
    return Run(name, "llama.py:3-8b", topology, keys, seconds, memory)


def titan(gpus: int, seconds: float, gib: float) -> Run:
    """Llama 3.1 8B by torchtitan, compiled, on H100s of 96 GB: float32 weights.

    What its selective checkpointing keeps, every other product, is less than "dots".
    """
    keys = {
        "batch_size": 2 * gpus,
        "policy.remat": "dots",
        "policy.accumulate": 1,
        "policy.precision.reduce": "float32",
    }
    name = f"8B on {gpus}"
    return Run(name, "llama.py:3-8b", f"h100-96:{gpus}", keys, seconds, gib * GIB)


def tune(name: str, remat: str, chunk: int, seconds: float, gib: float) -> Run:
    """Llama 3.2 3B by torchtune on one A100: weights and moments in bf16, AdamW."""
    keys = {
        "batch_size": 2,
        "policy.remat": remat,
        "policy.accumulate": 1,
        "policy.precision.param": "bfloat16",
        "model.num_layers": 28,
        "model.num_heads": 24,
        "model.width": 3072,
        "model.sequence_length": 4096,
        "model.loss_chunk": chunk,
    }
    return Run(name, "llama.py:3-1b", "a100:1", keys, seconds, gib * GIB)


def marin(unrolled: bool, batch: int, seconds: float) -> Run:
    """A mixture of experts by Marin in JAX, FSDP on eight H100s, with Muon."""
    keys = {
        "batch_size": batch,
        "policy.remat": "full",
        "policy.accumulate": 1,
        "policy.unroll": unrolled,
        "model.num_layers": 24,
        "model.width": 2048,
        "model.hidden": 1024,
        "model.num_heads": 16,
        "model.num_kv_heads": 4,
        "model.sequence_length": 4096,
        "model.num_experts": 64,
        "model.experts_per_token": 4,
        "model.shared_hidden": 2048,
        "model.window": 2048,
        "model.pattern": "sssf",
    }
    name = f"{'layers written out' if unrolled else 'a loop'}, batch {batch}"
    return Run(name, "llama.py:3-8b", "h100:8", keys, seconds)


FOUNDRY = "https://github.com/mosaicml/llm-foundry, scripts/train/benchmarking"
TITAN = "https://github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412"
TUNE = "https://github.com/meta-pytorch/torchtune, README"
MARIN = "https://github.com/marin-community/marin/tree/4b384db, experiments/grug/moe"
KEMPNER = "https://github.com/KempnerInstitute/KempnerForge/tree/5666d0d"
GROUPS: dict[str, tuple[str, tuple[Run, ...]]] = {
    "mpt-7b": (
        FOUNDRY,
        (mpt("7B", 128, 6, "none", 1.1731), mpt("7B", 512, 6, "none", 1.2707)),
    ),
    "mpt-13b": (
        FOUNDRY,
        (mpt("13B", 256, 16, "full", 6.568), mpt("13B", 512, 16, "full", 6.6171)),
    ),
    "mpt-30b": (
        FOUNDRY,
        (mpt("30B", 128, 8, "full", 7.4507), mpt("30B", 512, 8, "full", 7.7466)),
    ),
    "mpt-70b": (
        FOUNDRY,
        (
            mpt("70B", 128, 8, "full", 15.4858),
            mpt("70B", 256, 8, "full", 15.83),
            mpt("70B", 512, 8, "full", 16.2701),
        ),
    ),
    "torchtitan": (TITAN, (titan(8, 2.4575, 77.0), titan(128, 2.5152, 62.0))),
    "torchtune": (
        TUNE,
        (
            tune("packed", "none", 8192, 1.1579, 60.0),
            tune("chunked loss", "none", 1024, 0.893, 42.9),
        ),
    ),
    "marin": (
        MARIN,
        (
            marin(False, 128, 2.9103),
            marin(False, 256, 5.1654),
            marin(False, 512, math.inf),
            marin(True, 64, 2.0556),
            marin(True, 128, 3.3905),
            marin(True, 256, math.inf),
        ),
    ),
    "kempner": (
        f"{KEMPNER}, benchmarks/mfu_scaling",
        (
            kempner(1, 1, 2, 4, 8 * 4096 / 10471, None),
            kempner(1, 32, 4, 4, 7.05, 51.3),
            kempner(1, 16, 8, 4, 13.98, 72.6),
            kempner(2, 1, 4, 2, 2.49, 57.8),
            kempner(2, 2, 4, 2, 2.52, 45.9),
            kempner(4, 2, 4, 2, 1.48, 32.7),
            kempner(4, 8, 4, 2, 1.68, 27.6),
        ),
    ),
}


def planned(run: Run, four: Path) -> tuple[float, float]:
    """Returns the seconds of a step and the bytes of a device's memory."""
    topology = run.topology.replace("FOUR", str(four))
    with open_recipe(find_recipe(run.recipe)) as recipe:
        configured = configure(recipe, make_config(recipe, run.keys))
        plan = plan_recipe(configured, topology)
    assert plan.timeline is not None
    return plan.timeline.seconds, plan.memory.total


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--group", choices=GROUPS, help="only this one")
    chosen = parser.parse_args().group
    with tempfile.TemporaryDirectory() as folder:
        four = Path(folder) / "four.toml"
        four.write_text('gpu = "h200"\ngpus_per_host = 4\n')
        for name in [chosen] if chosen else GROUPS:
            source, runs = GROUPS[name]
            print(f"{name}: {source}\n")
            print(
                "| run | measured | planned | | ratio measured | ratio planned | "
                "GB measured | GB planned |\n|---|---|---|---|---|---|---|---|"
            )
            first: tuple[float, float] | None = None
            for run in runs:
                seconds, memory = planned(run, four)
                first = first or (run.seconds, seconds)
                ran = math.isfinite(run.seconds)
                cells = [
                    run.name,
                    f"{run.seconds:.3f}" if ran else "out of memory",
                    f"{seconds:.3f}",
                    f"{seconds / run.seconds - 1:+.1%}" if ran else "",
                    f"{run.seconds / first[0]:.3f}" if ran else "",
                    f"{seconds / first[1]:.3f}",
                    "" if run.memory is None else f"{run.memory:.1f}",
                    f"{memory / GB:.1f}",
                ]
                print("| " + " | ".join(cells) + " |", flush=True)
            print()


if __name__ == "__main__":
    main()
