"""Checkpoints: what a save holds up, how fast saves and restores are, what they take.

    python benchmarks/checkpoints.py

The state is a GPT's with AdamW's moments, on 8 virtual CPU devices. Every repetition
measures jshard, plain Orbax with its defaults, and the disk (``dd``) in turn. "Cold" is
with the files dropped from the page cache. Linux only.

Before each repetition free memory is filled with page cache, as it is on a machine that
has been up for a while. A virtual machine may else have to ask its host for every page
that a save touches first, and that would be all one measures.
"""

import argparse
import contextlib
import ctypes
import io
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax.traverse_util import unflatten_dict  # noqa: E402
from orbax.checkpoint import v1 as ocp  # noqa: E402

import jshard  # noqa: E402
from jshard.export import export  # noqa: E402
from jshard.models.gpt import GPT, GPTConfig  # noqa: E402
from jshard.storage.checkpoint import manifest, metadata  # noqa: E402
from jshard.storage.checkpoint.checkpointer import Checkpointer, Save  # noqa: E402
from jshard.storage.checkpoint.restore import find_damage, restore_state  # noqa: E402
from jshard.storage.checkpoint.stored_arrays import ARRAYS  # noqa: E402
from jshard.storage.hub.safetensors_read import load_safetensors  # noqa: E402

OPTIMIZER = optax.adamw(1e-3)
OPERATIONS = ("save", "restore", "export", "import")  # whose memory is measured


class Setup:
    """The model of the options, on a mesh."""

    def __init__(self, options: argparse.Namespace, replica: int = 1, fsdp: int = 8):
        self.options = options
        config = GPTConfig(
            vocab_size=options.vocab, sequence_length=options.sequence,
            num_layers=options.layers, width=options.width,
            num_heads=options.width // 64,
        )  # fmt: skip
        self.make = lambda rngs: GPT(config, rngs=rngs)
        self.fsdp = jshard.FSDP(jshard.make_mesh(replica=replica, fsdp=fsdp))
        self.abstract = self.fsdp.abstract_state(self.make, OPTIMIZER)
        self.size, self.model_size = map(nbytes, (self.abstract, self.abstract.params))

    def state(self) -> jshard.TrainState:
        """A new state."""
        return jax.block_until_ready(self.fsdp.init(self.make, OPTIMIZER))

    def step(self) -> Callable[[jshard.TrainState], jshard.TrainState]:
        """A step on a batch of random tokens, which waits for its end."""

        def loss_fn(model, batch):
            return model.loss(batch["tokens"], batch["tokens"], batch["weights"])

        step = self.fsdp.train_step(loss_fn, OPTIMIZER)
        shape = self.options.batch, self.options.sequence
        tokens = np.random.default_rng(0).integers(self.options.vocab, size=shape)
        batch = {"tokens": np.int32(tokens), "weights": np.ones(shape, np.float32)}
        batch = self.fsdp.shard_batch(batch)
        return lambda state: jax.block_until_ready(step(state, batch)[0])


def nbytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


class Table:
    """Seconds, by what they were taken for."""

    def __init__(self):
        self.rows: dict[str, list[float]] = {}

    def add(self, what: str, seconds: float) -> None:
        """Adds a repetition."""
        self.rows.setdefault(what, []).append(seconds)

    def time(self, what: str, call: Callable[..., Any], *arguments: Any) -> None:
        """Times a call; arrays that it returns are waited for, and freed."""
        start = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        self.add(what, time.perf_counter() - start)

    def median(self, what: str) -> float:
        """Of the repetitions so far."""
        return statistics.median(self.rows[what])

    def print(self, title: str, size: float = 0.0) -> None:
        """Prints medians; rates are of ``size`` bytes."""
        print(f"\n| {title} | median, ms | least to most | MB/s |\n|---|---|---|---|")
        for what, seconds in self.rows.items():
            rate = f"{size / self.median(what) / 1e6:,.0f}" if size else ""
            spread = f"{min(seconds) * 1e3:,.0f} to {max(seconds) * 1e3:,.0f}"
            spread = spread if len(seconds) > 1 else "once"
            print(f"| {what} | {self.median(what) * 1e3:,.0f} | {spread} | {rate} |")
        sys.stdout.flush()


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def drop(folder: Path) -> None:
    """Drops files from the page cache."""
    for path in files_of(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def dd(*arguments: str) -> None:
    subprocess.run(["dd", "bs=4M", *arguments], check=True, capture_output=True)


def dd_read(folder: Path) -> None:
    for path in files_of(folder):
        dd(f"if={path}", "of=/dev/null")


def kilobytes(file: str, name: str) -> int:
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def fill(folder: Path, leave: int = 512 << 20) -> None:
    """Fills free memory with page cache: of a file's hole, which takes no disk."""
    ctypes.CDLL(None).malloc_trim(0)  # what restores have freed
    free = kilobytes("/proc/meminfo", "MemFree") << 10
    if free > leave:
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.truncate(free - leave)
        dd(f"if={file.name}", "of=/dev/null")


def quiet_export(step: Path, output: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        export(step, output)


# The measurements. They leave a checkpoint in work/jshard and one in work/orbax.


def measure_saves(setup: Setup, work: Path, state: jshard.TrainState) -> None:
    """Saves while nothing else runs, each into an empty folder."""
    table, saves = Table(), list[Save]()
    ours = Checkpointer(work / "jshard", report=saves.append)
    orbax = ocp.training.Checkpointer(work / "orbax")
    arrays = unflatten_dict(metadata.arrays_by_name(state), sep=".")
    step = int(state.step)
    folder, zeros = work / "jshard" / str(step), work / "zeros"
    for i in range(setup.options.repeats + 1):
        which = "save" if i else "first save"
        if i:
            shutil.rmtree(folder)
            orbax.delete(step)
        fill(work)
        source = "if=/dev/zero", f"count={setup.size >> 22}"
        table.time("dd conv=fsync", dd, *source, f"of={zeros}", "conv=fsync")
        zeros.unlink()

        ours.save(state)
        ours.wait()
        assert not saves[-1].error, saves[-1].error
        table.add(f"jshard, {which}: blocked", saves[-1].blocked)
        table.add(f"jshard, {which}: until whole", saves[-1].took)
        table.time("jshard: of that, checksums", manifest.checksum, folder, ARRAYS)

        start = time.perf_counter()
        response = orbax.save_async(step, arrays)
        table.add(f"Orbax, {which}: blocked", time.perf_counter() - start)
        assert response is not None
        response.result()
        table.add(f"Orbax, {which}: until whole", time.perf_counter() - start)
    orbax.close()
    table.print("saving", setup.size)
    for name in ("jshard", "orbax"):
        stored = sum(path.stat().st_size for path in files_of(work / name))
        print(f"\n{name}: {stored / setup.size:.3f} bytes a byte of the state")


def measure_steps(setup: Setup, work: Path, state: jshard.TrainState) -> None:
    """Steps with a save meanwhile and without."""
    options, table, saves = setup.options, Table(), list[Save]()
    step = setup.step()
    state = step(step(state))  # compiles
    steps = f"{options.steps} steps of {options.batch} x {options.sequence} tokens"
    for _ in range(options.repeats):
        fill(work)
        ours = Checkpointer(work / "steps", report=saves.append)
        for how in ("no save", "a save meanwhile"):
            start = time.perf_counter()
            if how != "no save":
                ours.save(state)
            for _ in range(options.steps):
                state = step(state)
            table.add(f"{steps}, {how}", time.perf_counter() - start)
        ours.wait()
        shutil.rmtree(ours.folder)
        table.add("that save: blocked", saves[-1].blocked)
        table.add("that save: until whole", saves[-1].took)
    one = table.median(f"{steps}, no save") / options.steps
    lost = table.median(f"{steps}, a save meanwhile") - one * options.steps
    table.print("training")
    print(
        f"\na save blocks for {table.median('that save: blocked') / one:.1%} of a step "
        f"and costs {lost * 1e3:,.0f} ms in all, {lost / one:.0%} of a step"
    )


def measure_restores(setup: Setup, work: Path, step: int) -> None:
    """Restores onto the mesh that saved and onto others."""
    table, plain = Table(), work / "orbax"
    folder = work / "jshard" / str(step)
    others = {(1, 8): setup} | {m: Setup(setup.options, *m) for m in [(2, 4), (1, 1)]}
    arrays = unflatten_dict(metadata.arrays_by_name(setup.abstract), sep=".")
    ours, orbax = Checkpointer(work / "jshard"), ocp.training.Checkpointer(plain)
    ours.restore(setup.abstract)  # once for imports and the like
    orbax.load(step, arrays)
    for _ in range(setup.options.repeats):
        fill(work)
        drop(folder)
        table.time("dd of=/dev/null, cold", dd_read, folder)
        for how in ("cold", "warm"):

            def measure(what: str, files: Path, *call: Any) -> None:
                if how == "cold":  # noqa: B023
                    drop(files)
                table.time(f"{what}, {how}", *call)  # noqa: B023

            measure("jshard, verify", folder, find_damage, folder)
            measure("jshard, read", folder, restore_state, folder, setup.abstract)
            for (replica, shards), other in others.items():
                what = f"jshard, both, 1x8 to {replica}x{shards}"
                measure(what, folder, ours.restore, other.abstract)
            measure("Orbax, load", plain, orbax.load, step, arrays)
    orbax.close()
    table.print("restoring", setup.size)


def measure_exports(setup: Setup, work: Path, step: int) -> None:
    """Exports the model of a checkpoint as safetensors, and imports it."""
    table, folder, output = Table(), work / "jshard" / str(step), work / "export"
    for _ in range(setup.options.repeats):
        for how in ("cold", "warm"):
            shutil.rmtree(output, ignore_errors=True)
            fill(work)
            if how == "cold":
                drop(folder)
            table.time(f"export, {how}; verifies all", quiet_export, folder, output)
        for how in ("cold", "warm"):
            if how == "cold":
                drop(output)
            table.time(f"import, {how}", load_safetensors, output, setup.abstract)
    table.print("safetensors, rates of the model's bytes", setup.model_size)


def measure_damage(setup: Setup, work: Path, step: int) -> None:
    """Restores with one byte of the largest data file flipped, at several places."""
    arrays = unflatten_dict(metadata.arrays_by_name(setup.abstract), sep=".")
    restores: dict[str, Callable[[], Any]] = {
        "jshard": lambda: Checkpointer(work / "jshard").restore(setup.abstract, step),
        "orbax": lambda: ocp.training.Checkpointer(work / "orbax").load(step, arrays),
    }
    print("\n| one byte flipped | error | loaded, wrong | loaded, right | an error |")
    print("|---|---|---|---|---|")
    for name, restore in restores.items():
        want, message = values(restore()), ""
        file = max(files_of(work / name), key=lambda path: path.stat().st_size)
        counts = {"error": 0, "wrong": 0, "right": 0}
        for place in np.linspace(0.1, 0.9, setup.options.repeats):
            offset = int(place * file.stat().st_size)
            flip(file, offset)
            try:
                right = all(map(np.array_equal, values(restore()), want))
                counts["right" if right else "wrong"] += 1
            except Exception as error:  # whatever it is
                counts["error"] += 1
                message = str(error).splitlines()[0].replace(str(work), "")[:99]
            flip(file, offset)
        print("|", " | ".join([name, *map(str, counts.values()), message]), "|")


def values(tree: Any) -> list[np.ndarray]:
    """All but random keys, which NumPy does not take."""
    arrays = jax.tree.leaves(tree)
    return [np.asarray(x) for x in arrays if isinstance(x.dtype, np.dtype)]


def flip(file: Path, offset: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 255]))


def operate(setup: Setup, what: str, work: Path, state: Any = None) -> Any:
    """One of the operations whose memory is measured; needs those before it."""
    step = work / "jshard" / "0"
    match what:
        case "save":
            with Checkpointer(step.parent) as checkpointer:
                checkpointer.save(state)
        case "restore":
            return Checkpointer(step.parent).restore(setup.abstract)
        case "export":
            quiet_export(step, work / "export")
        case "import":
            return load_safetensors(work / "export", setup.abstract)


def measure_memory(options: argparse.Namespace, what: str, work: Path) -> None:
    """Prints the peak of this process in an operation, beyond start and result."""
    small = {**vars(options), "layers": 1, "width": 64, "vocab": 64}
    tiny, setup = Setup(argparse.Namespace(**small)), Setup(options)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        for each in OPERATIONS:  # imports, threads
            operate(tiny, each, Path(folder), tiny.state())
    state = setup.state() if what == "save" else None
    ctypes.CDLL(None).malloc_trim(0)
    before = kilobytes("/proc/self/status", "VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM
    result = jax.block_until_ready(operate(setup, what, work, state))
    peak = (kilobytes("/proc/self/status", "VmHWM") - before) << 10
    shards = [s for x in jax.tree.leaves(result) for s in x.addressable_shards]
    peak -= sum(shard.data.nbytes for shard in shards)
    size = setup.size if what in ("save", "restore") else setup.model_size
    print(f"| {what} | {peak / 2**20:,.0f} MiB | {peak / size:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="Times checkpoints.")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument(
        "--steps", type=int, default=2, help="to time, longer than a save"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="where; by default /tmp or the like"
    )
    parser.add_argument("--memory", choices=OPERATIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        return measure_memory(options, options.memory, options.folder)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        setup, work = Setup(options), Path(folder)
        print(
            f"jax {jax.__version__}, {jax.device_count()} {jax.default_backend()} "
            f"devices; {len(jax.tree.leaves(setup.abstract))} arrays, "
            f"{setup.size / 2**30:.2f} GiB; load average {os.getloadavg()[0]:.1f}"
        )
        state = setup.step()(setup.state())  # whose moments are not zeros
        step = int(state.step)
        measure_saves(setup, work, state)
        measure_steps(setup, work, state)
        del state
        measure_restores(setup, work, step)
        measure_exports(setup, work, step)
        measure_damage(setup, work, step)
        print(
            "\n| memory beyond state and result | peak | of its bytes |\n|---|---|---|",
            flush=True,
        )
        (work / "memory").mkdir()
        for what in OPERATIONS:
            again = [sys.executable, *sys.argv, f"--memory={what}"]
            subprocess.run([*again, f"--folder={work / 'memory'}"], check=True)


if __name__ == "__main__":
    main()
