"""Runs the same training again and again, looking for a hang or another loss.

One cell is a number of devices, a width, remat, reshard and a number of cores. A
process starts cold, another with programs from a compilation cache; each trains four
times from the same values. Every run of a cell must end, with the losses of every other
to the last bit, and those of one device within rounding.

    python tests/helpers/stress.py --minutes=60 PYTHON [PYTHON ...]

goes on until all pairs of values, interpreters too, were in a cell, then again with
others, and fails at the first that is wrong.
"""

import argparse
import dataclasses
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

STEPS = 4
RUNS = 4  # of a process
LIMIT = 600  # seconds; XLA itself ends a hang after one minute


@dataclasses.dataclass(frozen=True)
class Cell:
    """A program, and how it is run.

    Attributes:
      devices: virtual devices of the CPU.
      width: of the model.
      remat: as ``Policy.remat``.
      reshard: as ``Policy.reshard_after_forward``.
      cores: it may use; None is all.
      batch: examples of a step.
    """

    devices: int
    width: int
    remat: Any
    reshard: bool
    cores: int | None = None
    batch: int = 8


def cells(pythons: Sequence[str]) -> Iterator[tuple[bool, str, Cell]]:
    """Cells and their interpreters; first, or again, after all pairs were there.

    The next one has as many new pairs of values as any (a greedy covering array).
    """
    left = list(
        itertools.product(
            (2, 4, 8, 3, 1),
            (32, 64, 128, 256, 512),
            ("full", "dots", "none"),
            (True, False),
            (1, 2, None),
            pythons,
        )
    )
    random.Random(0).shuffle(left)
    seen: set[Any] = set()
    while left:
        values = max(left, key=lambda values: len(_pairs(values) - seen))
        first = not _pairs(values) - seen
        seen = _pairs(values) if first else seen | _pairs(values)
        left.remove(values)
        batch = 9 if values[0] == 3 else 8
        yield first, values[-1], Cell(*values[:-1], batch=batch)


def _pairs(values: Sequence[Any]) -> set[Any]:
    return set(itertools.combinations(enumerate(values), 2))


def losses(
    cell: Cell, cache: Path | None, python: str = sys.executable
) -> list[list[str]]:
    """The losses and norms of each run of a process of its own, as hexadecimal numbers.

    Raises:
      AssertionError: it failed, or did not end.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_"))
    }
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(cell.devices),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    if cache is not None:
        environment |= {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    done = subprocess.run(
        [python, __file__, "--cell", json.dumps(dataclasses.asdict(cell))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, (
        f"{cell}: exit {done.returncode}\n{done.stderr[-4000:]}"
    )
    return json.loads(done.stdout.splitlines()[-1])


def check(cell: Cell, python: str = sys.executable) -> None:
    """Runs a cell with a cache that it fills, and with the full cache.

    Raises:
      AssertionError: a run hangs or fails, or its losses are others.
    """
    with tempfile.TemporaryDirectory() as cache:
        found = losses(cell, Path(cache), python)
        assert any(Path(cache).iterdir())
        found += losses(cell, Path(cache), python)
    assert all(other == found[0] for other in found), f"{cell}: {found}"
    alone = losses(dataclasses.replace(cell, devices=1), None, python)[0]
    for ours, theirs in zip(found[0], alone, strict=True):
        ours, theirs = float.fromhex(ours), float.fromhex(theirs)
        assert abs(ours - theirs) <= 2e-5 * theirs, f"{cell}: {found[0]} {alone}"


def run_cell(cell: Cell) -> list[list[str]]:
    """In the process of its own: a small GPT, some steps, and again."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: cell.cores])
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    import jshard
    from jshard.models.gpt import GPT, GPTConfig

    config = GPTConfig(
        vocab_size=256,
        sequence_length=128,
        num_layers=6 if cell.width >= 256 else 4,
        num_heads=4,
        width=cell.width,
        tied=False,
    )
    policy = jshard.Policy(remat=cell.remat, reshard_after_forward=cell.reshard)
    fsdp = jshard.FSDP(jshard.make_mesh(), policy)
    # What hangs without one order depends on such details; this did, most often.
    adamw = optax.adamw(
        optax.warmup_cosine_decay_schedule(1e-4, 1e-3, 2, 20),
        weight_decay=0.1,
        mask=lambda params: nnx.map_state(lambda path, _: path[-1] != "bias", params),
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    start = fsdp.init(lambda rngs: GPT(config, rngs=rngs), optimizer)
    train_step = fsdp.train_step(
        lambda model, batch: model.loss(batch["x"], batch["y"], batch["weights"]),
        optimizer,
    )
    tokens = np.random.RandomState(0).randint(0, 256, (cell.batch, 129))
    batch = fsdp.shard_batch(
        {
            "x": tokens[:, :-1],
            "y": tokens[:, 1:],
            "weights": np.ones((cell.batch, 128), np.float32),
        }
    )
    found = []
    for _ in range(RUNS):
        state, run = jax.tree.map(jnp.copy, start), []
        for _ in range(STEPS):
            state, metrics = train_step(state, batch)
            run += [float(metrics[name]).hex() for name in ("loss", "grad_norm")]
        found.append(run)
    return found


def main() -> None:
    """Runs one cell, or all of them for a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("pythons", nargs="*", default=[sys.executable])
    arguments = parser.parse_args()
    if arguments.cell:
        print(json.dumps(run_cell(Cell(**json.loads(arguments.cell)))))
        return
    end = time.monotonic() + 60 * arguments.minutes
    done, all_pairs = 0, 0
    for first, python, cell in cells(arguments.pythons):
        if time.monotonic() > end:
            break
        check(cell, python)
        done, all_pairs = done + 1, all_pairs + first
        print(f"{python}: {cell}", flush=True)
    print(f"{done} cells, {all_pairs} times all pairs: all equal")


if __name__ == "__main__":
    main()
