"""Writes a run's report: `python -m jshard.report RUN [--step=best]`.

Of several runs, or of a folder that holds them, it writes a page that compares them.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from jshard.storage.checkpoint.restore import is_step
from jshard.storage.checkpoint.selected.run_address import find_run
from jshard.storage.checkpoint.step_folders import CHECKPOINTS
from jshard.system.cli.command import run_command
from jshard.system.cli.machine.platform import use_cpu
from jshard.system.cli.options import STEP, Command, Option
from jshard.system.cli.paths import is_bucket, is_remote
from jshard.system.cli.terminal import show
from jshard.system.errors import UserError
from jshard.training.report.run_files import METRICS
from jshard.training.report.run_report import REPORT, write_report
from jshard.training.report.several_runs import (
    COMPARISON,
    CONFIG,
    as_text,
    common_folder,
    is_run,
    read_runs,
    runs_in,
    write_comparison,
)

COMMAND = Command(
    "report",
    "Writes the report of a run, finished or not, as of now or of a step. Of several "
    "runs, or of a folder of runs, it writes one page with their losses and with the "
    "keys in which they differ.",
    {
        "PATH": Option(
            None, "a run's folder; several of them, or a folder of runs, are compared",
            kind=Path, required=True, repeats=True, bucket=True,
        ),
        "step": STEP,
        "output": Option(
            None, "the page; by default report.html in the run's folder, or "
            "report-STEP.html for a step; of a run in a bucket, in the current folder; "
            "of several runs, comparison.html in the folder that holds them",
            kind=Path, shown="FILE",
        ),
    },
)  # fmt: skip


def main() -> None:
    """Runs the command line; exits 0 done, 2 bad input, 1 anything else."""
    run_command(_report)


def _report(argv: list[str]) -> None:
    arguments = COMMAND.parse(argv)
    use_cpu()
    given = arguments.PATH
    if len(given) > 1 or (not is_remote(given[0]) and runs_in(Path(given[0]))):
        _compare(given, arguments)
    else:
        _report_one(given[0], arguments)


def _report_one(given: Path | str, arguments: SimpleNamespace) -> None:
    path, up_to, name = find_run(given, arguments.step), math.inf, REPORT
    if is_step(path) and path.parent.name == CHECKPOINTS:
        path, step = path.parents[1], int(path.stem)  # the name may have a suffix
        up_to, name = step, f"report-{step}.html"
    if not (path / METRICS).exists():
        raise UserError(f"{given} is not a run's folder: it has no {METRICS}")
    folder = Path() if is_bucket(given) else path
    output = arguments.output or folder / name
    try:
        write_report(path, output, up_to=up_to)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from error
    show(f"wrote {output}")


def _compare(given: Sequence[Path | str], arguments: SimpleNamespace) -> None:
    if arguments.step is not None:
        raise UserError(f"--step={arguments.step}: is for the report of one run")
    runs: dict[Path, None] = {}  # each once
    for path in given:
        if is_remote(path):
            raise UserError(f"{path}: only runs in local folders can be compared")
        found = [Path(path)] if is_run(Path(path)) else runs_in(Path(path))
        if not found:  # a shell's runs/* names the page of an earlier comparison, too
            show(f"skipped {path}: it is not the folder of a run, and contains none")
        runs |= {run.absolute(): None for run in found}
    if not runs:
        raise UserError(
            f"none of these is the folder of a run, which has {METRICS} and {CONFIG}"
        )
    folder = common_folder([*runs])
    output = arguments.output or folder / COMPARISON
    results = read_runs([*runs])
    try:
        write_comparison(results, folder.name, output)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from error
    show(f"{as_text(results, full=False)}\nwrote {output}")


if __name__ == "__main__":
    main()
