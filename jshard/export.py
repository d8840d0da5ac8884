"""Exports a checkpoint as safetensors: `python -m jshard.export RUN --output=DIR`."""

import contextlib
import errno
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from jshard.checkpoint import metadata
from jshard.checkpoint.restore import ARRAYS, find_step
from jshard.checkpoint.safetensors_write import DTYPES, INDEX, SafetensorsWriter, nbytes
from jshard.checkpoint.tensor_names import Index, Layers, tensor_names
from jshard.cli.command import checkpoint_parser, file_path, run_command
from jshard.compat.orbax_files import open_array
from jshard.errors import RunFailed, UserError

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # as Hugging Face's
_UNFINISHED = ".unfinished-export"
# Each thread would keep the memory of its last chunks; one is as fast as a disk.
_ONE_THREAD = tensorstore.Context(
    {"data_copy_concurrency": {"limit": 1}, "file_io_concurrency": {"limit": 1}}
)


def main() -> None:
    """Runs the command line; exits 0 done, 2 bad input, 130 Ctrl-C, 1 anything else."""
    run_command(_export)


def _export(argv: list[str]) -> None:
    parser = checkpoint_parser(
        "python -m jshard.export",
        "Writes the model of a checkpoint as safetensors files.",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=file_path,
        required=True,
        help="where to write: a folder without an export in it",
    )
    parser.add_argument(
        "--ema",
        action="store_true",
        help="take the averages in place of the trained parameters",
    )
    parser.add_argument(
        "--dtype", help="of floating tensors, e.g. bfloat16; by default as trained"
    )
    parser.add_argument(
        "--max_shard_size",
        metavar="SIZE",
        default="5GB",
        help="the most bytes of tensors in a file, e.g. 500MB; 5GB by default",
    )
    arguments = parser.parse_args(argv)
    export(
        arguments.path,
        arguments.output,
        ema=arguments.ema,
        dtype=arguments.dtype,
        shard_bytes=_parse_size(arguments.max_shard_size),
    )


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+\.?\d*) ?([KMGT]B)", text, re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if not size:
        raise UserError(f"--max_shard_size={text}: expected a size like 5GB or 500MB")
    return size


def export(
    path: Path,
    output: Path,
    *,
    ema: bool = False,
    dtype: str | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes the model of a checkpoint as safetensors files, as Hugging Face does.

    Memory holds one chunk of the checkpoint at a time, twice: as stored, and as an
    array. The files appear in `output` when all of them are whole.

    Args:
      path: A run's folder, a folder of checkpoints, or one checkpoint; it is verified.
      output: The folder to write to, without an export in it.
      ema: Whether to take the averages in place of the trained parameters.
      dtype: Of the floating tensors; by default they stay as they were trained.
      shard_bytes: The most bytes of tensors in a file.

    Raises:
      UserError: There is no such checkpoint, it is damaged, or `output` cannot be
        written.
      RunFailed: The disk is full.
    """
    if dtype is not None and not (dtype in DTYPES and "float" in dtype):
        known = ", ".join(name for name in DTYPES if "float" in name)
        raise UserError(f"--dtype={dtype}: expected one of {known}")
    try:
        _check_output(output)  # reading a large checkpoint takes minutes
        step = find_step(path)
        about = metadata.read(step)
        names = tensor_names(about)
        sources = {name: _averages(about, name) if ema else name for name in names}
        tensors = _tensors(about, names, dtype)
        with _whole_or_nothing(output) as folder:
            _check_space(output, sum(map(nbytes, tensors.values())))
            writer = SafetensorsWriter(folder, tensors, shard_bytes)
            for stored, layers in names.items():
                _copy(step, sources[stored], layers, writer)
            writer.sync()
            text = json.dumps(about, indent=1)
            (folder / metadata.FILE).write_text(text, encoding="utf-8")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunFailed(
                f"the disk is full: nothing of the export is left in {output}"
            ) from error
        where = error.filename or output
        raise UserError(f"cannot export: {where}: {error.strerror}") from error
    print(f"exported step {about['step']}: {len(tensors)} tensors in {output}")


def _tensors(
    about: dict[str, Any], names: dict[str, Layers], dtype: str | None
) -> dict[str, jax.ShapeDtypeStruct]:
    """The tensors to write, by name."""
    tensors = {}
    for stored, layers in names.items():
        array = about["arrays"][stored]
        if array["dtype"] not in DTYPES:
            raise UserError(f"{stored} is {array['dtype']}: safetensors has no such")
        floating = "float" in array["dtype"]
        chosen = jnp.dtype(dtype if dtype and floating else array["dtype"])
        for index, name in layers.items():
            shape = array["shape"][len(index) :]
            tensors[name] = jax.ShapeDtypeStruct(shape, chosen)
    return tensors


def _averages(about: dict[str, Any], stored: str) -> str:
    """The name of a parameter's averages; others' is their own."""
    if not stored.startswith("params."):
        return stored
    name = stored.replace("params.", "ema.", 1)
    if name not in about["arrays"]:
        raise UserError(
            "--ema: the checkpoint has no averages; train with "
            "--config.policy.ema_decay=0.999, say"
        )
    return name


def _check_output(output: Path) -> None:
    """Raises UserError where an export would be mixed with another."""
    for file in output.iterdir() if output.exists() else ():
        if ".safetensors" in file.name or file.name == metadata.FILE:
            raise UserError(
                f"--output={output} holds {file.name} already: give another folder, "
                "or remove it"
            )


@contextlib.contextmanager
def _whole_or_nothing(output: Path) -> Iterator[Path]:
    """Makes a folder, whose files move to `output` once all are written."""
    found = output.exists()
    # In `output`, which may be a disk of its own.
    folder = output / _UNFINISHED
    try:
        shutil.rmtree(folder, ignore_errors=True)  # of an export that was killed
        folder.mkdir(parents=True)
        yield folder
        for file in sorted(folder.iterdir(), key=lambda file: file.name == INDEX):
            file.rename(output / file.name)
        folder.rmdir()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if not found:
            shutil.rmtree(output, ignore_errors=True)
        raise


def _check_space(output: Path, needed: int) -> None:
    """Tells of a full disk before hours of writing."""
    free = shutil.disk_usage(output).free
    if free < needed:
        raise RunFailed(
            f"the export takes {needed / 1e6:,.0f} MB, and the disk of {output} has "
            f"{free / 1e6:,.0f} MB free"
        )


def _copy(step: Path, stored: str, layers: Layers, to: SafetensorsWriter) -> None:
    """Copies one array, each layer to its own tensor."""
    count = len(next(iter(layers)))  # of layer dimensions
    for start, chunk in _read(step, stored):
        for position in np.ndindex(chunk.shape[:count]):
            layer = tuple(start[i] + p for i, p in enumerate(position))
            to.write(layers[layer], start[count:], chunk[position])
        del chunk  # before the next is read


def _read(step: Path, stored: str) -> Iterator[tuple[Index, np.ndarray]]:
    """Yields an array of a checkpoint in the chunks in which it is stored.

    A chunk may hold several layers, and is read once.

    Yields:
      The first index of a chunk, and its values.

    Raises:
      UserError: The checkpoint has been deleted.
    """
    try:
        store = open_array(step / ARRAYS, stored, _ONE_THREAD)
        sizes = [size or 1 for size in store.chunk_layout.read_chunk.shape or ()]
        axes = [range(0, n, size) for n, size in zip(store.shape, sizes, strict=True)]
        for start in itertools.product(*axes):
            ends = map(min, np.add(start, sizes), store.shape)
            box = tuple(map(slice, start, ends))
            yield start, store[box].read().result()
    except (FileNotFoundError, ValueError) as error:
        raise UserError(
            f"cannot read {stored} of {step}, which was whole a moment ago: has the "
            f"run deleted it? ({error})"
        ) from error


if __name__ == "__main__":
    main()
