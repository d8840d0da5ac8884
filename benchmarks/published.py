"""Published step times beside predictions, and the constants that fit them.

    JAX_PLATFORMS=cpu python benchmarks/published.py --cache=published

Compiles each run of ``kit/published_runs.py`` as it was run, for absent GPUs, replays
its schedule over its own network, and prints

- what the schedule holds, in seconds at the stated constants;
- the constants: shares from single kernels (``kit/published_kernels.py``), one factor
  on those of matrix products and attention fitted to the runs, the others as stated;
- of each run the step measured and predicted, and the error of the prediction by
  constants that were fitted without it.

Last, apart and not fitted, speeds of other systems beside jshard's own planned steps.

With programs in the cache this takes a minute, most of it to read and replay them;
compiling them all takes twenty on two cores.
"""

import argparse
import dataclasses
import gzip
import re
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from compiling import known, make_mesh, trace
from jshard.plan import hlo
from jshard.plan.cost.timeline import replay
from jshard.plan.fit.hardware import FITTED, GPU, STATED, Constants
from jshard.plan.hlo.program_text import Module
from jshard.plan.topology import parse
from kit import calibration, fitting
from kit.calibration import Group, Step, left_out, step_of
from kit.published_kernels import kernels
from kit.published_runs import A3, APART, DGX, OTHERS, RUNS, Other, Run

# What the runs decide, and what is tried beside it to see whether they would.
GROUPS: tuple[Group, ...] = (("matmul", "attention"), ("float8",), ("straggle",))
TRIED: tuple[Group, ...] = (("memory",), ("launch",))
TCPX = (0.925, 0.75, 0.65, 0.6, 0.55, 0.5, 0.475, 0.45, 0.425, 0.4)
STRAGGLE = 1e-4  # seconds, from which the fit starts
ROUNDS = 2  # how much communication is exposed depends a little on the constants


def program(run: Run | Other, cache: Path) -> Module:
    """The compiled program of a run, from the cache if it is there."""
    path = cache / f"{re.sub('[^a-zA-Z0-9]+', '_', run.name)}.hlo.gz"
    if not path.exists():
        text = compiled(run)
        cache.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt") as file:
            file.write(text)
    with gzip.open(path, "rt") as file:
        return hlo.parse(file.read())


def compiled(run: Run | Other) -> str:
    """Compiles a run, and again with a profile if one guided it.

    The profile is the replay's, with the stated constants.
    """
    mesh = make_mesh(run.row)
    lowered = trace(run.row, mesh)[0].lower()
    if isinstance(run, Other):
        return lowered.compile().as_text()
    options, _ = known(run.options, mesh.devices.flat[0])
    text = lowered.compile(options).as_text()
    if not run.guided:
        return text
    timeline = replay(hlo.parse(text), gpu_of(run, STATED), mesh.size)
    costs = {event.name: 1e6 * event.seconds for event in timeline.events}
    with tempfile.NamedTemporaryFile("w", suffix=".pbtxt") as file:
        for name, cost in costs.items():
            file.write(f'costs {{ name: "{name}" cost_us: {cost:.3f} }}\n')
        file.flush()
        options["xla_gpu_pgle_profile_file_or_directory_path"] = file.name
        return lowered.compile(options).as_text()


def gpu_of(run: Run, constants: Constants, tcpx: float | None = None) -> GPU:
    """The GPU of a run, with its own network.

    Args:
      run: the run.
      constants: their network port is one of 400 Gb/s.
      tcpx: the share of its bandwidth that A3's network reaches; None is as the others.
    """
    gpu, _ = parse(run.row.topology)
    port = constants.network_port * run.network / DGX
    if run.network == A3 and tcpx is not None:
        port = tcpx * run.network * 1e9 / 8
    reached = dataclasses.replace(constants, network_port=port)
    return dataclasses.replace(gpu, constants=reached)


def schedules(
    modules: dict[str, Module], constants: Constants
) -> list[tuple[Step, ...]]:
    """What the runs' schedules hold, for each share that A3's network may reach."""

    def replayed(run: Run, tcpx: float | None = None) -> Step:
        gpu = gpu_of(run, constants, tcpx)
        timeline = replay(modules[run.name], gpu, parse(run.row.topology)[1])
        return step_of(run.name, run.source, run.seconds, timeline, gpu)

    by_run = [
        [replayed(run, share) for share in TCPX]
        if run.network == A3
        else [replayed(run)] * len(TCPX)
        for run in RUNS
    ]
    return list(zip(*by_run, strict=True))


def start() -> Constants:
    """What single kernels reach; the rest as stated."""
    found = fitting.fit(kernels(), "h100")
    shares = {name: found[name] for name in ("matmul", "float8", "attention", "memory")}
    return dataclasses.replace(STATED, **shares, straggle=STRAGGLE)


def print_schedules(steps: Sequence[Step], constants: Constants) -> None:
    """Milliseconds by class, with the given constants."""
    print(
        "| run | products | float8 | attention | memory | launches | exposed | "
        "stragglers |"
    )
    print("|---" * 8 + "|")
    for found in steps:
        parts = (
            found.products / constants.matmul,
            found.float8 / constants.float8,
            found.attention / constants.attention,
            found.memory / constants.memory,
            found.kernels * constants.launch,
            found.exposed,
            found.doublings * constants.straggle,
        )
        cells = " | ".join(f"{1e3 * part:.1f}" for part in parts)
        print(f"| {found.name} | {cells} |")


def print_runs(
    steps: Sequence[Step], constants: Constants, errors: list[tuple[float, ...]]
) -> None:
    """Measured and predicted seconds, and the errors of each run left out."""
    heads = (
        "run", "sequences a GPU", "measured", "predicted", "run left out",
        "source left out", "source",
    )  # fmt: skip
    print("| " + " | ".join(heads) + " |")
    print("|---" * len(heads) + "|")
    for run, found, left in zip(RUNS, steps, errors, strict=True):
        row = run.row
        length = dict(row.model).get("sequence_length") or (
            8192 if row.recipe.startswith("llama:3") else 4096
        )
        cells = (
            run.name,
            f"{row.batch}x{length}",
            f"{run.seconds:.3f}",
            f"{found.seconds(constants):.3f}",
            *(f"{1 / ratio - 1:+.1%}" for ratio in left),
            run.source,
        )
        print("| " + " | ".join(map(str, cells)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path("published"))
    cache = parser.parse_args().cache
    modules = {run.name: program(run, cache) for run in RUNS}
    constants, variants = start(), []
    for _ in range(ROUNDS):
        variants = schedules(modules, constants)
        best, constants = calibration.fit_variants(variants, constants, GROUPS)
    steps = variants[best]
    print("Milliseconds at the fitted constants\n")
    print_schedules(steps, constants)
    print()
    by_run = left_out(variants, constants, GROUPS, lambda x, y: x.name == y.name)
    by_source = left_out(variants, constants, GROUPS, lambda x, y: x.source == y.source)
    print_runs(steps, constants, list(zip(by_run, by_source, strict=True)))
    print(f"\nA3's network (GPUDirect-TCPX): {TCPX[best]:.0%} of its bandwidth, fitted")
    print_constants(steps, constants)
    print(
        f"left out: mean error {statistics.mean(abs(1 / r - 1) for r in by_run):.1%}, "
        f"low {min(by_run):.3f}, high {max(by_run):.3f}; the planner's {FITTED}\n"
    )
    print_apart(cache, constants)
    print_others(cache, constants)


def print_apart(cache: Path, constants: Constants) -> None:
    """Runs that are not in the fit."""
    for run in APART:
        gpu, number = gpu_of(run, constants), parse(run.row.topology)[1]
        seconds = replay(program(run, cache), gpu, number).seconds
        error = seconds / run.seconds - 1
        print(
            f"apart: {run.name}: {run.seconds} s, predicted {seconds:.3f}, {error:+.1%}"
        )
    print()


def print_others(cache: Path, constants: Constants) -> None:
    """Speeds of other systems, which no constant was fitted to."""
    print("| other systems | measured tokens/s a GPU | jshard's step, planned | |")
    print("|---" * 4 + "|")
    for other in OTHERS:
        gpu, number = parse(other.row.topology)
        gpu = dataclasses.replace(gpu, constants=constants)
        timeline = replay(program(other, cache), gpu, number)
        planned = other.tokens / timeline.seconds
        print(
            f"| {other.name} | {other.speed:,.0f} | {planned:,.0f} | {other.source} |"
        )


def print_constants(steps: Sequence[Step], constants: Constants) -> None:
    """The fitted ones, and what others would be if they were fitted, too."""
    errors = calibration.standard_errors(steps, constants, GROUPS)
    for group, error in zip(GROUPS, errors, strict=True):
        values = ", ".join(f"{name} {getattr(constants, name):.3f}" for name in group)
        print(f"{values}: fitted, standard error {error:.1%}")
    for group in TRIED:
        free = (*GROUPS, group)
        other = calibration.fit(steps, constants, free)
        error = calibration.standard_errors(steps, other, free)[-1]
        for name in group:
            print(
                f"{name} {getattr(constants, name):.3g}: not fitted; would be "
                f"{getattr(other, name):.3g}, standard error {error:.0%}"
            )


if __name__ == "__main__":
    main()
