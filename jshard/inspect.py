"""Shows what a checkpoint holds: `python -m jshard.inspect RUN [--verify]`."""

import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jshard.checkpoint import manifest, metadata
from jshard.checkpoint.restore import checkpoints_folder, find_damage, is_step
from jshard.checkpoint.step_folders import find_steps, step_folder
from jshard.cli.command import checkpoint_parser, run_command
from jshard.errors import UserError
from jshard.formatting import format_bytes
from jshard.training.config.config import flatten


def main() -> None:
    """Runs the command line; exits 0 done, 2 bad input or damage, 1 anything else."""
    run_command(_inspect)


def _inspect(argv: list[str]) -> None:
    parser = checkpoint_parser(
        "python -m jshard.inspect",
        "Shows what a checkpoint holds, without reading its arrays.",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read all files and compare their checksums",
    )
    arguments = parser.parse_args(argv)
    path = arguments.path
    try:
        if is_step(path):
            folders = [path]
            print(show(path))
        else:
            folder = checkpoints_folder(path)
            folders = [step_folder(folder, step) for step in find_steps(folder)]
            print(f"{folder}: {len(folders)} checkpoints, the newest is shown")
            problems = _show_all(folders)
            if problems and not arguments.verify:
                what = f"{len(problems)} of {len(folders)} checkpoints cannot be shown"
                raise UserError(f"{what}: {problems[0]}")
    except OSError as error:
        where = error.filename or path
        raise UserError(f"cannot read {where}: {error.strerror}") from error
    if arguments.verify:
        _verify(folders)


def _show_all(folders: list[Path]) -> list[str]:
    """Prints a line for each checkpoint and all about the newest; returns problems."""
    newest, problems = "", []
    for folder in folders:
        try:
            about, size, _ = _read(folder)
            newest = show(folder)
        except UserError as error:
            problems.append(str(error))
            print(f"  {folder.name}  cannot be shown: {error}")
        else:
            print(f"  {folder.name}  {size}, saved {about['created']}")
    if newest:
        print(newest)
    return problems


def _verify(folders: list[Path]) -> None:
    damaged = 0
    for folder in folders:
        try:
            damage = find_damage(folder)
        except UserError as error:  # a newer jshard wrote it
            damage = str(error)
        print(f"{folder}: {damage or 'intact'}", flush=True)
        damaged += bool(damage)
    if damaged:
        raise UserError(f"{damaged} of {len(folders)} checkpoints damaged")


def _read(folder: Path) -> tuple[dict[str, Any], str, int]:
    """Returns a checkpoint's metadata, its size as text and its number of files."""
    try:
        about, files = metadata.read(folder), manifest.read(folder)
    except manifest.ManifestError as error:
        raise UserError(f"checkpoint {folder} is damaged: {error}") from error
    size = sum(file["bytes"] for file in files.values())
    return about, format_bytes(size), len(files)


def show(folder: Path) -> str:
    """Describes the checkpoint in a step's folder without reading its arrays.

    Raises:
      UserError: Its metadata or manifest cannot be read.
    """
    about, size, files = _read(folder)
    mesh = " x ".join(f"{axis} {n}" for axis, n in about["mesh"].items())
    rows = {
        "checkpoint": str(folder),
        "step": f"{about['step']}, saved {about['created']}",
        "size": f"{size} in {files} files",
        "written by": ", ".join(f"{k} {v}" for k, v in about["versions"].items()),
        "mesh": f"{mesh}; processes {about['processes']}",
        "metrics": ", ".join(f"{k} {v:.6g}" for k, v in about["metrics"].items()),
        "config": ", ".join(f"{k}={v}" for k, v in flatten(about["config"]).items()),
    }
    lines = [f"{name:<11} {text}" for name, text in rows.items() if text]
    arrays = about["arrays"]
    groups: dict[str, list[Any]] = {}
    for name, array in arrays.items():
        groups.setdefault(name.split(".")[0], []).append(array)
    for name, members in groups.items():
        count = sum(math.prod(array["shape"]) for array in members)
        total = format_bytes(sum(map(_bytes, members)))
        lines.append(f"{name:<11} {count:,} in {len(members)} arrays, {total}")
    lines.append("")
    width = max(map(len, arrays), default=0)
    for name, array in arrays.items():
        shape = str(tuple(array["shape"]))
        stacked = "  stacked" if array.get("layer_dims") else ""
        lines.append(
            f"{name:<{width}}  {array['dtype']:<8}  {format_bytes(_bytes(array)):>9}  "
            f"{shape}{stacked}"
        )
    return "\n".join(lines)


def _bytes(array: dict[str, Any]) -> int:
    dtype = array["dtype"]
    itemsize = 8 if dtype.startswith("key<") else jnp.dtype(dtype).itemsize
    return math.prod(array["shape"]) * itemsize


if __name__ == "__main__":
    main()
