"""Exports a checkpoint as safetensors: `python -m jshard.export RUN --output=DIR`.

With `--format=huggingface` the folder is one of Hugging Face's, for transformers.
"""

import contextlib
import errno
import itertools
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import tensorstore
from safetensors import SafetensorError

from jshard.checkpoint import frozen, metadata, peft
from jshard.checkpoint.file_tensor import FileTensor
from jshard.checkpoint.huggingface import CONFIG, is_huggingface
from jshard.checkpoint.merge import SIDES, Adapter, adapters
from jshard.checkpoint.restore import ARRAYS, find_step
from jshard.checkpoint.safetensors_file import DTYPES, StoredTensor, find_tensors
from jshard.checkpoint.safetensors_write import (
    INDEX,
    assign_files,
    write_index,
    write_tensors,
)
from jshard.checkpoint.tensor_names import Index, tensor_names
from jshard.cli.command import checkpoint_parser, file_path, run_command
from jshard.compat.orbax_files import open_array
from jshard.errors import RunFailed, UserError, some_of
from jshard.training.huggingface_export import find_model, write_companions

_FLOATS = ("bfloat16", "float16", "float32", "float64")
FORMATS = ("jshard", "huggingface", "peft")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # as in Hugging Face
_UNFINISHED = ".unfinished-export"
# Each further thread would hold another chunk; one saturates a disk.
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
        help="the folder to write to; it must not contain an export",
    )
    parser.add_argument(
        "--format",
        default="jshard",
        choices=FORMATS,
        help="names of the tensors: the model's own, by default; those of "
        "transformers, with config.json and the tokenizer's files, and adapters merged "
        "into the weights; or the adapters alone as PEFT has them",
    )
    parser.add_argument(
        "--config",
        metavar="RECIPE",
        help="the run's recipe, which knows the names, if it is not where it was",
    )
    parser.add_argument(
        "--ema",
        action="store_true",
        help="export the averages instead of the trained parameters",
    )
    parser.add_argument(
        "--dtype",
        help="dtype of floating-point tensors, e.g. bfloat16; by default as trained",
    )
    parser.add_argument(
        "--max_shard_size",
        metavar="SIZE",
        default="5GB",
        help="the most bytes of tensors in a file, e.g. 500MB; 5GB by default; as much "
        "host memory is needed",
    )
    arguments = parser.parse_args(argv)
    export(
        arguments.path,
        arguments.output,
        format=arguments.format,
        recipe=arguments.config,
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
    format: str = "jshard",
    recipe: str | None = None,
    ema: bool = False,
    dtype: str | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes the model of a checkpoint as safetensors files, like Hugging Face's.

    Host memory holds the tensors of one file at a time. The files appear in `output`
    when all are complete.

    Args:
      path: A run's folder, a folder of checkpoints, or one checkpoint; it is verified.
      output: The folder to write to; it must not contain an export.
      format: "jshard" for the model's own names; "huggingface" for a folder that
        transformers reads, with adapters merged into the weights; "peft" for a folder
        with the adapters alone.
      recipe: The run's recipe, which maps names to those of Hugging Face; by default
        the one that the run was started with.
      ema: Whether to export the averages instead of the trained parameters.
      dtype: Of the floating-point tensors; by default they stay as trained.
      shard_bytes: The most bytes of tensors in a file; a larger tensor gets a file of
        its own.

    Raises:
      UserError: There is no such checkpoint, it is damaged, or `output` cannot be
        written.
      RunFailed: The disk is full.
    """
    if dtype is not None and dtype not in _FLOATS:
        raise UserError(f"--dtype={dtype}: expected one of {', '.join(_FLOATS)}")
    try:
        notes: list[str] = []
        _check_output(output)  # early: verifying a large checkpoint takes minutes
        step = find_step(path)
        about = metadata.read(step)
        mapped = None if format == "jshard" else find_model(step, about, recipe)
        if mapped is None:
            tensors = _tensors(about, dtype, ema)
        elif format == "huggingface":
            tensors = _merged_tensors(about, dtype, ema, mapped.tensors)
        else:
            tensors = _adapter_tensors(about, dtype, ema, mapped.tensors)
        sizes = {name: tensor.size for name, tensor in tensors.items()}
        with _all_or_nothing(output) as folder:
            _check_space(output, sum(sizes.values()))
            files = assign_files(sizes, shard_bytes)
            if format == "peft":
                files = {peft.TENSORS: list(tensors)}
            for file, names in files.items():
                wanted = {name: tensors[name] for name in names}
                framework = "pt" if mapped else "flax"
                write_tensors(folder / file, _read(step, wanted), framework)
            if len(files) > 1:
                write_index(folder, files, sizes)
            if format == "peft":
                assert mapped is not None
                notes = peft.write_config(folder, about, mapped.tensors)
            elif mapped:
                dtypes = {str(tensor.dtype) for tensor in tensors.values()}
                notes = write_companions(folder, mapped, dtypes)
            else:
                metadata.write(folder, about)
    except SafetensorError as error:
        raise UserError(f"cannot export {path}: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunFailed(
                f"the disk is full: nothing of the export is left in {output}"
            ) from error
        where = error.filename or output
        raise UserError(f"cannot export: {where}: {error.strerror}") from error
    done = f"exported step {about['step']}: {len(tensors)} tensors in {output}"
    print("; ".join((done, *notes)))


class _Tensor(NamedTuple):
    """A tensor to write: an array of the checkpoint, or one layer of it."""

    source: str | StoredTensor  # the array's name, or a tensor in other files
    layer: Index  # and expert
    place: FileTensor
    dtype: np.dtype
    size: int  # bytes
    adapter: Adapter | None = None  # to be added


def _tensors(
    about: dict[str, Any],
    dtype: str | None,
    ema: bool,
    places: Mapping[str, FileTensor] | None = None,
) -> dict[str, _Tensor]:
    """Lists the tensors to write, by name, those of an array next to each other.

    `places` says where the files have each, none at all if they lack it; None keeps
    their own names.
    """
    tensors, arrays = {}, about["arrays"]
    unknown: list[str] = []
    for stored, layers in tensor_names(about).items():
        array, source = arrays[stored], stored
        if ema and stored.startswith("params."):
            source = stored.replace("params.", "ema.", 1)
            if source not in arrays:
                raise UserError(
                    "--ema: the checkpoint has no averages; train with "
                    "--config.policy.ema_decay=0.999, for example"
                )
        kind = _dtype(array["dtype"], dtype)
        size = math.prod(array["shape"]) // len(layers) * kind.itemsize
        for layer, name in layers.items():
            place = FileTensor((name,)) if places is None else places.get(name)
            if place is None:
                unknown.append(name)
                continue
            for i, name in enumerate(place.names):
                index = (*layer, i) if len(place.names) > 1 else layer
                part = size // len(place.names)
                tensors[name] = _Tensor(source, index, place, kind, part)
    if unknown:
        raise UserError(
            f"--format=huggingface: the recipe's map lacks {some_of(unknown)}"
        )
    return tensors


def _dtype(stored: str, given: str | None) -> np.dtype:
    return jnp.dtype(given if given and "float" in stored else stored)


def _merged_tensors(
    about: dict[str, Any],
    dtype: str | None,
    ema: bool,
    places: Mapping[str, FileTensor],
) -> dict[str, _Tensor]:
    """Lists the tensors of Hugging Face, with the adapters that they are merged with.

    What the checkpoint leaves out is in the folder that the run started from.
    """
    merged = adapters(about, ema=ema)
    absent = dict.fromkeys(_names_of_adapters(about), FileTensor(()))
    tensors = _tensors(about, dtype, ema, {**places, **absent})
    if frozen.KEY in about:
        source = Path(about[frozen.KEY]["path"])
        if not is_huggingface(source):
            raise UserError(
                f"--format=huggingface: the frozen parameters of the run are in "
                f"{source}, which is no Hugging Face folder: export it first, or "
                "export the adapters with --format=peft"
            )
        found = find_tensors(source)
        for place in places.values():
            for name in set(place.names) - tensors.keys():
                if name not in found:
                    raise UserError(f"--format=huggingface: {source} lacks {name}")
                stored = found[name]
                kind = _dtype(str(jnp.dtype(DTYPES[stored.dtype])), dtype)
                size = math.prod(stored.shape) * kind.itemsize
                tensors[name] = _Tensor(stored, (), place, kind, size)
    for kernel, adapter in merged.items():
        (name,) = places[kernel].names
        tensors[name] = tensors[name]._replace(adapter=adapter)
    return tensors


def _adapter_tensors(
    about: dict[str, Any],
    dtype: str | None,
    ema: bool,
    places: Mapping[str, FileTensor],
) -> dict[str, _Tensor]:
    """Lists the tensors of PEFT."""
    names = peft.file_names(_names_of_adapters(about), places)
    if not names:
        raise UserError("--format=peft: the checkpoint has no adapters")
    found: dict[str, FileTensor] = dict.fromkeys(
        [name for layers in tensor_names(about).values() for name in layers.values()],
        FileTensor(()),
    )
    found |= {ours: FileTensor((name,), True) for ours, name in names.items()}
    return _tensors(about, dtype, ema, found)


def _names_of_adapters(about: dict[str, Any]) -> list[str]:
    return [
        name
        for stored, layers in tensor_names(about).items()
        if stored.endswith(SIDES)
        for name in layers.values()
    ]


def _check_output(output: Path) -> None:
    """Raises UserError if the export would mix with another."""
    for file in output.iterdir() if output.exists() else ():
        if ".safetensors" in file.name or file.name in (
            metadata.FILE,
            CONFIG,
            peft.CONFIG,
        ):
            raise UserError(
                f"--output={output} holds {file.name} already: give another folder, "
                "or remove it"
            )


@contextlib.contextmanager
def _all_or_nothing(output: Path) -> Iterator[Path]:
    """Yields a new folder, whose files move to `output` when all are written."""
    existed = output.exists()
    folder = output / _UNFINISHED  # `output` may be on another disk than its parent
    try:
        shutil.rmtree(folder, ignore_errors=True)  # left by an export that was killed
        folder.mkdir(parents=True)
        yield folder
        for file in sorted(folder.iterdir(), key=lambda file: file.name == INDEX):
            file.rename(output / file.name)
        folder.rmdir()
    except BaseException:
        shutil.rmtree(folder if existed else output, ignore_errors=True)
        raise


def _check_space(output: Path, needed: int) -> None:
    """Raises RunFailed if the disk is too small, before hours of writing."""
    free = shutil.disk_usage(output).free
    if free < needed:
        raise RunFailed(
            f"the export takes {needed / 1e6:,.0f} MB, and the disk of {output} has "
            f"{free / 1e6:,.0f} MB free"
        )


def _read(step: Path, tensors: Mapping[str, _Tensor]) -> dict[str, np.ndarray]:
    """Reads tensors from a checkpoint, casting them as they are copied.

    The layers of an array are read together, because a stored chunk may span them all.
    """
    found: dict[str, np.ndarray] = {}
    for source, group in itertools.groupby(tensors, lambda name: tensors[name].source):
        names = list(group)
        if isinstance(source, StoredTensor):
            for name in names:
                found[name] = np.array(source.open(), tensors[name].dtype)
            continue
        first, last = tensors[names[0]], tensors[names[-1]]
        try:
            store = open_array(step / ARRAYS, source, _ONE_THREAD)
            if first.layer:
                store = store[first.layer[0] : last.layer[0] + 1]
            store = store.transpose(first.place.axes(store.ndim))
            values = tensorstore.cast(store, first.dtype).read().result()
        except (FileNotFoundError, ValueError) as error:
            raise UserError(
                f"cannot read {source} of {step}, which was intact a moment ago: has "
                f"the run deleted it? ({error})"
            ) from error
        for name in names:
            layer = tensors[name].layer
            if layer:
                layer = layer[0] - first.layer[0], *layer[1:]
            found[name] = values[(*layer, ...)]
    for name, tensor in tensors.items():
        if tensor.adapter is not None:
            added = tensor.adapter.read(step, _ONE_THREAD)
            added = added.T if tensor.place.transposed else added
            found[name] = (found[name].astype(added.dtype) + added).astype(tensor.dtype)
    return found


if __name__ == "__main__":
    main()
