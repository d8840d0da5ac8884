"""Jobs of several real processes, `python -m jshard.train`, that tests do harm to."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from resumable import RECIPE

MARK = "JSHARD_TEST_JOB"  # in the environment of all processes of a job

# Leaves each process's part of each batch in the folder $SEEN.
RECORDING = """
import os
import pathlib

if "SEEN" in os.environ:
    shard_batch, steps = jshard.FSDP.shard_batch, iter(range(10**9))

    def recording(fsdp, batch):
        name = f"{next(steps):04}-{jax.process_index()}.npy"
        np.save(pathlib.Path(os.environ["SEEN"]) / name, batch["tokens"])
        return shard_batch(fsdp, batch)

    jshard.FSDP.shard_batch = recording
"""


def free_port() -> int:
    """A port that is free just now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def write_recipe(folder: Path, change: Callable[[str], str] = str) -> None:
    """Writes `tiny.py`, tests/helpers/resumable.py's recipe, changed."""
    (folder / "tiny.py").write_text(change(RECIPE + RECORDING))


class Job:
    """A job; a context manager, which kills what is left of it.

    Args:
      folder: where its processes run, with `tiny.py`; they print into files there.
      count: how many.
      devices: of each.
      words: of the command line.
      env: of all processes.
      each: of the command line, more by process.
      prefix: of the command, by process: one that runs it elsewhere.
      coordinator: the host of process 0.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        devices: int,
        *words: str,
        env: Mapping[str, str] | None = None,
        each: Mapping[int, Sequence[str]] | None = None,
        prefix: Callable[[int], Sequence[str]] = lambda index: (),
        coordinator: str = "127.0.0.1",
    ):
        self.mark = uuid.uuid4().hex
        self.folder = folder
        address = f"{coordinator}:{free_port()}"
        self.processes = []
        for index in range(count):
            options = [
                f"--coordinator={address}",
                f"--num_processes={count}",
                f"--process_id={index}",
                f"--config.mesh.cpu_devices={devices}",
            ]
            own = (each or {}).get(index, ())
            train = [sys.executable, "-m", "jshard.train", "--config=tiny.py"]
            with (
                open(folder / f"out-{index}", "w") as out,
                open(folder / f"err-{index}", "w") as err,
            ):
                process = subprocess.Popen(
                    [*prefix(index), *train, *options, *words, *own],
                    cwd=folder,
                    env=environment() | {MARK: self.mark, **(env or {})},
                    stdout=out,
                    stderr=err,
                )
            self.processes.append(process)

    def out(self, index: int = 0) -> str:
        """What a process has printed."""
        return (self.folder / f"out-{index}").read_text()

    def err(self, index: int | None = None) -> str:
        """What a process, or all, sent to standard error."""
        which = range(len(self.processes)) if index is None else [index]
        return "".join((self.folder / f"err-{i}").read_text() for i in which)

    def wait(self, timeout: float = 120) -> list[int]:
        """The exit codes; all must end in time."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"still running\n{self.err()}") from None
        return [process.returncode for process in self.processes]

    def wait_for_step(self, run: Path, step: int, timeout: float = 90) -> None:
        """Returns when a run has logged a step."""
        deadline = time.monotonic() + timeout
        metrics = run / "metrics.jsonl"
        while last_step(metrics) < step:
            assert time.monotonic() < deadline, self.err()
            ended = [p.poll() for p in self.processes]
            assert any(code is None for code in ended), f"{ended}\n{self.err()}"
            time.sleep(0.01)

    def worker(self, index: int) -> int:
        """The process that trains, under its parent."""
        return int(children(self.processes[index].pid)[0])

    def leftovers(self) -> list[int]:
        """Processes of the job that live."""
        return marked(self.mark)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for pid in self.leftovers():
            os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


def environment() -> dict[str, str]:
    """That of a user with CPUs alone, whose programs compile fast."""
    drop = ("JAX_", "XLA_", "JSHARD_", "SLURM", "OMPI_", "PMI", "RANK", "WORLD_SIZE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    return kept | {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PYTHONUNBUFFERED": "1",
    }


def marked(mark: str) -> list[int]:
    """Processes that live and have a mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "environ").read_bytes().split(b"\0")
            zombie = (folder / "stat").read_text().rpartition(") ")[2][0] == "Z"
        except OSError:  # it has ended
            continue
        if f"{MARK}={mark}".encode() in words and not zombie:
            found.append(int(folder.name))
    return found


def children(pid: int) -> list[str]:
    """The processes that a process started."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def last_step(metrics: Path) -> int:
    """The step of the last whole line of metrics; 0 where there is none."""
    if not metrics.exists():
        return 0
    lines = metrics.read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    return json.loads(whole[-1])["step"] if whole else 0


def tokens_seen(folder: Path) -> list[list[Any]]:
    """The global batch of each step, that the processes left in $SEEN."""
    import numpy as np

    steps: dict[str, list[Any]] = {}
    for file in sorted(folder.glob("*.npy")):
        steps.setdefault(file.name.partition("-")[0], []).append(np.load(file))
    return [np.concatenate(parts).tolist() for _, parts in sorted(steps.items())]
