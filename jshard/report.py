"""Writes a run's report: `python -m jshard.report RUN [--step=best]`."""

import math
from pathlib import Path

from jshard.storage.checkpoint.restore import is_step
from jshard.storage.checkpoint.selected.run_address import find_run
from jshard.storage.checkpoint.step_folders import CHECKPOINTS
from jshard.system.cli.command import run_command
from jshard.system.cli.machine.platform import use_cpu
from jshard.system.cli.options import STEP, Command, Option
from jshard.system.cli.paths import is_bucket
from jshard.system.cli.terminal import show
from jshard.system.errors import UserError
from jshard.training.report.run_files import METRICS
from jshard.training.report.run_report import REPORT, write_report

COMMAND = Command(
    "report",
    "Writes the report of a run, finished or not, as of now or of a step.",
    {
        "PATH": Option(
            None, "a run's folder", kind=Path, required=True, bucket=True
        ),
        "step": STEP,
        "output": Option(
            None, "the page; by default report.html in the run's folder, or "
            "report-STEP.html for a step; for a run in a bucket, in the current folder",
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
    path, up_to, name = find_run(arguments.PATH, arguments.step), math.inf, REPORT
    if is_step(path) and path.parent.name == CHECKPOINTS:
        path, step = path.parents[1], int(path.stem)  # the name may have a suffix
        up_to, name = step, f"report-{step}.html"
    if not (path / METRICS).exists():
        raise UserError(f"{arguments.PATH} is not a run's folder: it has no {METRICS}")
    folder = Path() if is_bucket(arguments.PATH) else path
    output = arguments.output or folder / name
    try:
        write_report(path, output, up_to=up_to)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from error
    show(f"wrote {output}")


if __name__ == "__main__":
    main()
