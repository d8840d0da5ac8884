"""Traces of real steps on two CPU devices, in each of which one fault is injected.

``host`` and ``device`` stall one step of a trace: Python sleeps, or a device waits
within a kernel. ``padded`` and ``flag`` make an operation slower in every step, and the
trace is compared with one without them: a collective has a larger payload, and kernels
are compiled with a flag of XLA that makes them slower.

    python tests/helpers/traced_faults.py              # how many of 20 are found
    python tests/helpers/traced_faults.py --steps=20000 --hosts=6  # what reading takes
"""

import argparse
import functools
import multiprocessing
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard.plan import compare
from jshard.plan.output import comparison_text
from jshard.plan.trace.profile_reader import read_profile

STEPS, DEVICES, WIDTH = 5, 2, 192
STALL = "read the batch"
PLANNED = 1024  # elements of the collective that may be padded
# XLA's own levels and code generator, which conftest.py changes for all tests.
USUAL: dict[str, Any] = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
if jax.__version_info__ < (0, 11):
    USUAL["xla_cpu_use_fusion_emitters"] = True
SLOWER: dict[str, Any] = USUAL | {"xla_backend_optimization_level": 0}


class Program:
    """A step of two devices, in the variants that faults need.

    Each device calls Python between two products, and sums an array of any size.
    """

    def __init__(self, *, heavy: bool = False):
        """With a kernel that takes most of the step, for "flag"; else it is small."""
        mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("fsdp",))
        self.spec = PartitionSpec("fsdp")
        self.sharded = NamedSharding(mesh, self.spec)
        self.step = jax.jit(
            jax.shard_map(
                functools.partial(_local, 2048 if heavy else WIDTH),
                mesh=mesh,
                in_specs=self.spec,
                out_specs=self.spec,
            )
        )
        self.compiled: dict[tuple[int, bool], Any] = {}

    def compile(self, elements: int = PLANNED, *, flagged: bool = False) -> Any:
        """Returns the step that sums so many elements."""
        key = elements, flagged
        if key not in self.compiled:
            lowered = self.step.lower(*self.arguments(elements, [0.0] * DEVICES))
            options = SLOWER if flagged else USUAL
            self.compiled[key] = lowered.compile(compiler_options=options)
        return self.compiled[key]

    def arguments(self, elements: int, seconds: list[float]) -> Any:
        """Returns arguments with which the devices wait for so long."""
        x = np.full((DEVICES, WIDTH, WIDTH), 0.01, np.float32)
        padded = np.ones((DEVICES, elements), np.float32)
        values = (x, np.array(seconds, np.float32), padded)
        return jax.device_put(values, self.sharded)


def _local(
    rows: int, x: jax.Array, seconds: jax.Array, padded: jax.Array
) -> tuple[jax.Array, jax.Array]:
    with jax.named_scope("flagged"):
        y = jnp.tile(x[0, 0], rows)
        for i in range(100):
            y = y * y + 0.001 * i
        y = y[: WIDTH**2].reshape(WIDTH, WIDTH) + jnp.sum(y)
    one = jax.pure_callback(_wait, jax.ShapeDtypeStruct((), np.float32), seconds[0])
    z = jnp.tanh(x[0] @ y)
    with jax.named_scope("padded"):
        padded = jax.lax.psum(padded, "fsdp")
    return jax.lax.psum(z @ (z * one), "fsdp")[None], padded


def _wait(seconds: Any) -> Any:
    time.sleep(float(seconds))
    return np.float32(1)


def trace(
    folder: Path,
    program: Program,
    fault: str = "",
    size: float = 0.0,
    at: int = 0,
    on: int = 0,
) -> Path:
    """Traces steps; a stall is in step ``at``, on device ``on``."""
    elements = round(size) if fault == "padded" else PLANNED
    step = program.compile(elements, flagged=fault == "flag")
    usual = program.arguments(elements, [0.0] * DEVICES)
    waits = [size * (device == on) for device in range(DEVICES)]
    stalled = program.arguments(elements, waits) if fault == "device" else usual
    jax.block_until_ready(step(*usual))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=options):
        for number in range(STEPS):
            with jax.profiler.StepTraceAnnotation("step", step_num=number):
                if number == at and fault == "host":
                    with jax.profiler.TraceAnnotation(STALL):
                        time.sleep(size)
                jax.block_until_ready(step(*(stalled if number == at else usual)))
    return folder


def misses(
    folder: Path, program: Program, fault: str, size: float, draws: int = 20
) -> Iterator[str]:
    """Yields, of each draw in which the fault is not first and named, what is said."""
    for draw in range(draws):
        rng = np.random.default_rng(draw)
        at, on = int(rng.integers(1, STEPS)), int(rng.integers(DEVICES))
        before = None
        if fault in ("padded", "flag"):
            before = trace(folder / f"{draw}-before", program)
        traced = trace(folder / f"{draw}", program, fault, size, at, on)
        found = compare(program.compile(), traced, before)
        if found.first is None:
            yield "nothing deviates"
            continue
        x, said = found.deviations[found.first], comparison_text.first(found)
        about = found.module.instructions.get(x.place.name)
        source = about.source if about else ""
        named = {
            "host": x.step == at and said.endswith(f"its host was in {STALL}."),
            "device": (x.step, x.device, x.cause) == (at, on, "kernel slower")
            and "pure_callback" in said,
            "padded": x.cause == "collective slower" and "padded" in source,
            "flag": x.cause == "kernel slower" and "flagged" in source,
        }
        if not named[fault]:
            yield said


SIZES = {
    "device": (0.005, 0.02, 0.05, 0.25, 1.0),
    "host": (0.005, 0.02, 0.05, 0.25, 1.0),
    "padded": (1 << 24,),
    "flag": (1,),
}


def show_found(folder: Path) -> None:
    """Prints of each fault and size how many of 20 are found."""
    for fault, sizes in SIZES.items():
        program = Program(heavy=fault == "flag")
        for size in sizes:
            missed = len(list(misses(folder / f"{fault}-{size}", program, fault, size)))
            print(f"{fault} {size}: {20 - missed} of 20", flush=True)


def show_size(folder: Path, steps: int, hosts: int) -> None:
    """Prints what it takes to read and to compare a trace of so many steps.

    Each host has the file of the first: to trace takes JAX more memory than to read.
    """
    # In a process of its own, whose memory does not count.
    tracing = multiprocessing.get_context("spawn").Process(
        target=_trace_long, args=(folder, steps)
    )
    tracing.start()
    tracing.join()
    (file,) = folder.rglob("*.xplane.pb")
    for host in range(1, hosts):
        shutil.copy(file, file.with_name(f"host{host}.xplane.pb"))
    step = Program().compile()
    size = hosts * file.stat().st_size
    print(f"{size / 1e6:.0f} MB; before, {_peak()}", flush=True)
    since = time.process_time()
    profile = read_profile(folder)
    print(f"read in {time.process_time() - since:.0f} CPU s; {_peak()}", flush=True)
    if hosts > 1:  # which the program does not have
        profile = read_profile(file)
    since = time.process_time()
    compare(step, profile)
    size = file.stat().st_size / 1e6
    print(
        f"{size:.0f} MB compared in {time.process_time() - since:.0f} CPU s; {_peak()}"
    )


def _trace_long(folder: Path, steps: int) -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    program = Program()
    step, arguments = program.compile(), program.arguments(PLANNED, [0.0] * DEVICES)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=options):
        for number in range(steps):
            with jax.profiler.StepTraceAnnotation("step", step_num=number):
                jax.block_until_ready(step(*arguments))


def _peak() -> str:
    return f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Traces of two CPU devices.")
    parser.add_argument("--steps", type=int, help="trace so many, without a fault")
    parser.add_argument("--hosts", type=int, default=1, help="of as many hosts")
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    with tempfile.TemporaryDirectory() as temporary:
        if given.steps:
            show_size(Path(temporary), given.steps, given.hosts)
        else:
            show_found(Path(temporary))
