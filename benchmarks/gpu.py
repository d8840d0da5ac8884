"""Measures everything that a GPU can tell: correctness, speed, memory, plans, peers.

    python benchmarks/gpu.py                    # all stages, one after the other
    python benchmarks/gpu.py check kernels      # some of them

Needs a GPU and no network. Each stage takes at most ``--minutes`` and writes STAGE.json
and STAGE.md into ``--out``; the same command goes on with what is missing. On a machine
without a GPU, ``--tiny`` goes the same way at tiny sizes on two virtual CPU devices.
docs/gpu.md says what the figures mean.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from kit import check, kernels, peers, planned_jobs, training
from kit.machine import Machine, find_machine
from kit.results import DONE, Recorder, Results
from kit.running import Part, run_stage
from kit.summary import summarize

ROOT = Path(__file__).resolve().parents[1]
Parts = Callable[[str | None], list[Part]]  # for a card; None is tiny, on the CPU
STAGES: dict[str, Parts] = {
    "check": check.parts,
    "kernels": kernels.parts,
    "gpt2": training.gpt2_parts,
    "llama": training.llama_parts,
    "plan": planned_jobs.parts,
    "peers": peers.parts,
}
# JAX takes most of the memory at once, as it should where it trains alone.
_GPU = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95", "JAX_PLATFORMS": None}
_CPU = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "2",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # what runs for seconds compiles for minutes
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--minutes", type=float, default=8, help="of a stage")
    parser.add_argument("--again", action="store_true", help="repeat what failed")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, as a test")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # in a process of its own
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.stages if name not in STAGES]:
        parser.error(f"no stage {', '.join(unknown)}; there are: {', '.join(STAGES)}")
    machine = Machine("CPU", 1, 0, {}) if arguments.tiny else find_machine()
    if machine.card is None and not arguments.tiny:
        parser.error(f"{machine.name}: needs an A100, H100, H200 or B200; or --tiny")
    out = arguments.out.resolve()
    if arguments.part:
        run_part(arguments.part, machine.card, out)
        return 0
    out.mkdir(parents=True, exist_ok=True)
    set_environment(tiny=arguments.tiny)
    if arguments.tiny:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(out / "programs")
    words = [sys.executable, __file__, "--out", str(out)]
    words += ["--tiny"] * arguments.tiny + ["--part"]
    whole = True
    for stage in arguments.stages or STAGES:
        known = Results(out, stage).values.get("machine")
        if known and known["gpu"] != machine.name:
            parser.error(f"{out} has results of {known['gpu']}; choose another --out")
        results = run_stage(
            stage,
            STAGES[stage](machine.card),
            out,
            machine,
            seconds=60 * arguments.minutes,
            again=arguments.again,
            command=words,
        )
        text = summarize(results.values)
        (out / f"{stage}.md").write_text(text)
        print(text, flush=True)
        states = [part["status"] for part in results.values["parts"].values()]
        whole = whole and set(states) == {DONE}
    return 0 if whole else 1


def set_environment(*, tiny: bool) -> None:
    """That of all parts; each may change it."""
    for name, value in (_CPU if tiny else _GPU).items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    os.environ["PYTHONUNBUFFERED"] = "1"


def run_part(name: str, card: str | None, out: Path) -> None:
    """Runs one part of a stage in this process."""
    stage, part = name.split("/")
    (found,) = (x for x in STAGES[stage](card) if x.name == part)
    found.run(Recorder(out, stage, part))


if __name__ == "__main__":
    sys.exit(main())
