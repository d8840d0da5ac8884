"""Shows what a checkpoint holds: `python -m jshard.inspect RUN [--verify] [--full]`.

Of a folder of runs it shows a table of their results.
"""

import itertools
import math
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jshard.recipe.config.run_config import flatten
from jshard.storage.checkpoint import manifest, metadata
from jshard.storage.checkpoint.buckets.arrays import address, shown, verify_values
from jshard.storage.checkpoint.metadata import itemsize
from jshard.storage.checkpoint.restore import checkpoints_folder, find_damage, is_step
from jshard.storage.checkpoint.selected.best_step import Best, best_of
from jshard.storage.checkpoint.selected.run_address import find_run
from jshard.storage.checkpoint.step_folders import find_steps, step_folder
from jshard.system.cli.command import run_command
from jshard.system.cli.machine.platform import use_cpu
from jshard.system.cli.options import CHECKPOINT, STEP, Command, Option
from jshard.system.cli.paths import is_bucket, is_remote
from jshard.system.cli.terminal import show
from jshard.system.errors import UserError
from jshard.system.formatting import format_bytes, one_line
from jshard.training.report.goodput import read_goodput
from jshard.training.report.several_runs import as_text, read_runs, runs_in

COMMAND = Command(
    "inspect",
    "Shows what a checkpoint contains, without reading its arrays; of a folder of "
    "runs, a table of their results and of the keys in which they differ.",
    {
        "PATH": CHECKPOINT,
        "step": STEP,
        "verify": Option(False, "read all files and verify their checksums"),
        "full": Option(False, "list every array and every key of the config"),
    },
)

_WIDTH = 88  # characters of a line's text
_CONFIG_LINES, _ROWS = 5, 40  # what fits a screen beside the other lines
_PARAMS, _COPIED = "params", ".*"


def main() -> None:
    """Runs the command line; exits 0 done, 2 bad input or damage, 1 anything else."""
    run_command(_inspect)


def _inspect(argv: list[str]) -> None:
    arguments = COMMAND.parse(argv)
    use_cpu()
    if not is_remote(arguments.PATH) and (runs := runs_in(Path(arguments.PATH))):
        _show_runs(runs, arguments)
        return
    path = find_run(arguments.PATH, arguments.step)
    try:
        if is_step(path):
            folders = [path]
            show(describe(path, full=arguments.full))
        else:
            if goodput := read_goodput(path):
                show(str(goodput))
            folder = checkpoints_folder(path)
            folders = [step_folder(folder, step) for step in find_steps(folder)]
            where = arguments.PATH if is_bucket(arguments.PATH) else folder
            several = len(folders) != 1
            newest = "checkpoints, the newest is shown" if several else "checkpoint"
            show(f"{where}: {len(folders)} {newest}")
            best = best_of(folder)
            problems = _show_all(folders, best, full=arguments.full)
            if problems and not arguments.verify:
                what = f"{len(problems)} of {len(folders)} checkpoints cannot be shown"
                raise UserError(f"{what}: {problems[0]}")
    except BrokenPipeError:  # of the output, not of a file
        raise
    except OSError as error:
        where = error.filename or path
        raise UserError(f"cannot read {where}: {error.strerror}") from error
    if arguments.verify:
        _verify(folders)


def _show_runs(runs: list[Path], arguments: SimpleNamespace) -> None:
    for name in ("step", "verify"):
        if getattr(arguments, name):
            raise UserError(
                f"--{name}: {arguments.PATH} holds {len(runs)} runs; give one "
                f"of them, such as {runs[0]}"
            )
    show(as_text(read_runs(runs), full=arguments.full))


def _show_all(folders: list[Path], best: Best | None, *, full: bool) -> list[str]:
    """Prints a line for each checkpoint and all about the newest; returns problems."""
    newest, problems = "", []
    for folder in folders:
        try:
            about, size, _ = _read(folder)
            newest = describe(folder, full=full)
        except UserError as error:
            problems.append(str(error))
            show(one_line(f"  {folder.name}  cannot be shown: {error}"))
        else:
            line = f"  {folder.name}  {size}, saved {about['created']}"
            if best is not None and about["step"] == best.step:
                line += f", best: {best.result}"
            show(one_line(line))
    if newest:
        show(newest)
    return problems


def _verify(folders: list[Path]) -> None:
    damaged = 0
    for folder in folders:
        try:
            damage = find_damage(folder)
            step = address(folder)
            if step is not None and not damage:  # else the files were read
                verify_values(step, metadata.read(folder)["arrays"])
        except UserError as error:  # a newer jshard wrote it, or a chunk is damaged
            damage = str(error)
        show(one_line(f"{shown(folder)}: {damage or 'intact'}"))
        damaged += bool(damage)
    if damaged:
        raise UserError(f"{damaged} of {len(folders)} checkpoints damaged")


def _read(folder: Path) -> tuple[dict[str, Any], str, int]:
    """Returns a checkpoint's metadata, its size as text and its number of files."""
    try:
        about, files = metadata.read(folder), manifest.read(folder)
        elsewhere = manifest.read_arrays(folder) if address(folder) else {}
    except manifest.ManifestError as error:
        raise UserError(f"checkpoint {folder} is damaged: {error}") from error
    size = sum(file["bytes"] for file in files.values()) + elsewhere.get("bytes", 0)
    return about, format_bytes(size), len(files) + len(elsewhere.get("objects", ()))


def describe(folder: Path, *, full: bool = False) -> str:
    """Describes the checkpoint in a step's folder without reading its arrays.

    It fits a screen: equal arrays of several layers are a line, and so is a moment of
    the optimizer; `full` gives each array a line, and names every key of the config.

    Raises:
      UserError: Its metadata or manifest cannot be read.
    """
    about, size, files = _read(folder)
    mesh = " x ".join(f"{axis} {n}" for axis, n in about["mesh"].items())
    rows = {
        "checkpoint": shown(folder),
        "step": f"{about['step']}, saved {about['created']}",
        "size": f"{size} in {files} files",
        "written by": ", ".join(f"{k} {v}" for k, v in about["versions"].items()),
        "mesh": f"{mesh}; processes {about['processes']}",
        "metrics": ", ".join(f"{k} {v:.6g}" for k, v in about["metrics"].items()),
        "config": ", ".join(f"{k}={v}" for k, v in flatten(about["config"]).items()),
    }
    lines = []
    for name, text in rows.items():
        labels = itertools.chain([name], itertools.repeat(""))
        parts = zip(labels, _wrapped(text, full), strict=False)
        lines += [f"{label:<11} {part}" for label, part in parts]
    arrays = about["arrays"]
    groups: dict[str, list[Any]] = {}
    for name, array in arrays.items():
        groups.setdefault(name.split(".")[0], []).append(array)
    for name, members in groups.items():
        count = sum(math.prod(array["shape"]) for array in members)
        total = format_bytes(sum(map(_bytes, members)))
        lines.append(f"{name:<11} {count:,} in {len(members)} arrays, {total}")
    return "\n".join(map(one_line, [*lines, "", *_table(arrays, full)]))


def _wrapped(text: str, full: bool) -> list[str]:
    """Returns a list of entries on lines; unless `full`, only as many as are short."""
    lines = textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
    if full or len(lines) <= _CONFIG_LINES:
        return lines
    left = len(" ".join(lines[_CONFIG_LINES:]).split(", "))
    return [*lines[:_CONFIG_LINES], f"and {left} more: --full"]


def _table(arrays: Mapping[str, Any], full: bool) -> list[str]:
    """Returns a line for each group of arrays, or for each array."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name in arrays:
        groups.setdefault((name,) if full else _group(name, arrays), []).append(name)
    rows = []
    for (called, *_), names in groups.items():
        first, copied = arrays[names[0]], called.endswith(_COPIED)
        many = f"{len(names)} x " if len(names) > 1 else ""
        shape = f"{many}{tuple(first['shape'])}"
        shape += "  stacked" if first.get("layer_dims") else ""
        size = format_bytes(sum(_bytes(arrays[name]) for name in names))
        what = f"{len(names)} arrays, as in params" if copied else shape
        rows.append((called, first["dtype"], size, what))
    shown = rows if full else rows[:_ROWS]
    width = max((len(row[0]) for row in shown), default=0)
    lines = [f"{n:<{width}}  {d:<8}  {size:>9}  {what}" for n, d, size, what in shown]
    if len(shown) < len(rows):
        lines.append(f"and {len(rows) - len(shown)} more: --full")
    return lines


def _group(name: str, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the name of an array's group, and what its arrays have in common.

    These are the copies that an optimizer has of all parameters, and the arrays that
    differ by the numbers of layers alone.
    """
    array = arrays[name]
    dtype, shape = array["dtype"], tuple(array["shape"])
    parts = name.split(".")
    for i in range(1, len(parts)):
        of = arrays.get(".".join([_PARAMS, *parts[i:]]))
        if of is not None and parts[0] != _PARAMS and of["shape"] == array["shape"]:
            return ".".join(parts[:i]) + _COPIED, dtype
    called = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
    return called, dtype, shape, bool(array.get("layer_dims"))


def _bytes(array: dict[str, Any]) -> int:
    return math.prod(array["shape"]) * itemsize(array["dtype"])


if __name__ == "__main__":
    main()
