"""Runs the same training again and again, looking for a hang or another loss.

One cell is a number of devices, a width, remat, reshard, a way to start (cold, or with
programs from a compilation cache) and a number of cores. Every run of a cell must end,
with the losses of every other to the last bit, and those of one device within rounding.

    python tests/stress.py --minutes=60 PYTHON [PYTHON ...]

goes through all cells in an order of its own, with each of the interpreters in turn,
and fails at the first that is wrong.
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
from collections.abc import Iterator
from pathlib import Path

STEPS = 6
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
    """

    devices: int
    width: int
    remat: str
    reshard: bool
    cores: int | None = None


def every_cell() -> Iterator[Cell]:
    """All there are."""
    return itertools.starmap(
        Cell,
        itertools.product(
            (1, 2, 3, 4, 8),
            (32, 64, 128, 256, 512),
            ("full", "dots", "none"),
            (True, False),
            (1, 2, None),
        ),
    )


def losses(cell: Cell, cache: Path | None, python: str = sys.executable) -> list[str]:
    """The losses of one run in a process of its own, as hexadecimal numbers.

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
        "PYTHONPATH": str(Path(__file__).parents[1]),
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


def check(cell: Cell, runs: int, python: str = sys.executable) -> None:
    """Runs a cell ``runs`` times cold, and as often with a cache.

    Raises:
      AssertionError: a run hangs or fails, or its losses are others.
    """
    with tempfile.TemporaryDirectory() as cache:
        found = [losses(cell, None, python) for _ in range(runs)]
        found += [losses(cell, Path(cache), python) for _ in range(runs + 1)]
    assert all(other == found[0] for other in found), f"{cell}: {found}"
    alone = losses(dataclasses.replace(cell, devices=1), None, python)
    for ours, theirs in zip(found[0], alone, strict=True):
        ours, theirs = float.fromhex(ours), float.fromhex(theirs)
        assert abs(ours - theirs) <= 2e-5 * theirs, f"{cell}: {found[0]} {alone}"


def run_cell(cell: Cell) -> list[str]:
    """In the process of its own: a small GPT, some steps."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: cell.cores])
    import jax
    import numpy as np
    import optax

    import jshard
    from models.gpt import GPT, GPTConfig

    large = cell.width >= 256
    config = GPTConfig(
        vocab_size=259,
        sequence_length=128 if large else 32,
        num_layers=6 if large else 3,
        num_heads=4,
        width=cell.width,
        tied=False,
    )
    policy = jshard.Policy(remat=cell.remat, reshard_after_forward=cell.reshard)
    fsdp = jshard.FSDP(jshard.make_mesh(), policy)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = fsdp.init(lambda rngs: GPT(config, rngs=rngs), optimizer)
    train_step = fsdp.train_step(
        lambda model, batch: model.loss(batch["x"], batch["y"], batch["weights"]),
        optimizer,
    )
    tokens = np.random.RandomState(0).randint(0, 256, (24, config.sequence_length + 1))
    batch = fsdp.shard_batch(
        {
            "x": tokens[:, :-1],
            "y": tokens[:, 1:],
            "weights": np.ones((24, config.sequence_length), np.float32),
        }
    )
    found = []
    for _ in range(STEPS):
        state, metrics = train_step(state, batch)
        found.append(float(jax.device_get(metrics["loss"])).hex())
    return found


def main() -> None:
    """Runs one cell, or all of them for a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("pythons", nargs="*", default=[sys.executable])
    arguments = parser.parse_args()
    if arguments.cell:
        print(json.dumps(run_cell(Cell(**json.loads(arguments.cell)))))
        return
    cells = list(every_cell())
    random.Random(0).shuffle(cells)
    end, done = time.monotonic() + 60 * arguments.minutes, 0
    for cell in cells:
        for python in arguments.pythons:
            if time.monotonic() > end:
                break
            check(cell, arguments.runs, python)
            done += 1
            print(f"{python}: {cell}", flush=True)
    print(f"{done} cells, {done * (2 * arguments.runs + 1)} runs: all equal")


if __name__ == "__main__":
    main()
