"""Exports a checkpoint as safetensors: `python -m jshard.export RUN --output=DIR`.

With `--format=huggingface` the folder is one of Hugging Face's, for transformers.
"""

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from jshard.inference.trained.huggingface_export import find_model, write_companions
from jshard.storage.checkpoint import frozen, metadata
from jshard.storage.checkpoint.restore import find_step
from jshard.storage.checkpoint.selected.run_address import find_run
from jshard.storage.hub import exported_tensors as exported
from jshard.storage.hub import peft
from jshard.storage.hub.huggingface_folder import CONFIG
from jshard.storage.hub.online.outputs import names_at, upload
from jshard.storage.hub.safetensors_write import (
    INDEX,
    assign_files,
    write_index,
    write_tensors,
)
from jshard.system.cli.command import run_command
from jshard.system.cli.machine.platform import use_cpu
from jshard.system.cli.options import CHECKPOINT, STEP, Command, Option
from jshard.system.cli.paths import is_remote
from jshard.system.cli.terminal import show
from jshard.system.errors import RunFailed, UserError, is_disk_full
from jshard.system.formatting import one_line

_FLOATS = ("bfloat16", "float16", "float32", "float64")
FORMATS = ("jshard", "huggingface", "timm", "peft")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # as in Hugging Face
_UNFINISHED = ".unfinished-export"

COMMAND = Command(
    "export",
    "Writes the model of a checkpoint as safetensors files.",
    {
        "PATH": CHECKPOINT,
        "step": STEP,
        "output": Option(
            None, "the folder to write to; it must not contain an export",
            kind=Path, bucket=True, hub="model", required=True, shown="DIR",
        ),
        "format": Option(
            "jshard", "names of the tensors: the model's own; those of transformers, "
            "with config.json and the tokenizer's files, and adapters merged into the "
            "weights; those of timm; or the adapters alone as PEFT has them",
            choices=FORMATS,
        ),
        "config": Option(
            None, "the run's recipe, if it has moved", kind=str, shown="RECIPE",
        ),
        "ema": Option(False, "export the averages instead of the trained parameters"),
        "dtype": Option(
            None, "dtype of floating-point tensors; by default as trained", kind=str,
            choices=_FLOATS,
        ),
        "max_shard_size": Option(
            "5GB", "the most bytes of tensors per file, e.g. 500MB; writing a file "
            "takes as much host memory", shown="SIZE",
        ),
    },
)  # fmt: skip


def main() -> None:
    """Runs the command line; exits 0 done, 2 bad input, 130 Ctrl-C, 1 anything else."""
    run_command(_export)


def _export(argv: list[str]) -> None:
    arguments = COMMAND.parse(argv)
    use_cpu()
    export(
        find_run(arguments.PATH, arguments.step),
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
    output: Path | str,
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
      output: The folder to write to, or its URL; it must not contain an export.
      format: "jshard" for the model's own names; "huggingface" for a folder that
        transformers reads, with adapters merged into the weights; "timm" for one that
        timm reads; "peft" for a folder with the adapters alone.
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
        raise UserError(f"dtype={dtype!r}: must be one of {', '.join(_FLOATS)}")
    try:
        notes: list[str] = []
        _check_output(output)  # early: verifying a large checkpoint takes minutes
        step = find_step(path)
        about = metadata.read(step)
        mapped = None if format == "jshard" else find_model(step, about, recipe, format)
        chosen = exported.Exported(about, dtype, ema)
        if mapped is None:
            tensors = chosen.tensors()
        elif format in ("huggingface", "timm"):
            tensors = chosen.merged(mapped.tensors, mapped.heads)
        else:
            tensors = chosen.adapters(mapped.tensors)
        sizes = exported.sizes(tensors)
        with _all_or_nothing(output) as folder:
            _check_space(folder.parent, sum(sizes.values()))
            files = assign_files(sizes, shard_bytes)
            if format == "peft":
                files = {peft.TENSORS: list(tensors)}
            for file, names in files.items():
                own = set(names)
                wanted = {key: x for key, x in tensors.items() if x.name in own}
                framework = "pt" if mapped else "flax"
                write_tensors(
                    folder / file, exported.read(step, about, wanted), framework
                )
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
                notes = _left_out(about)
    except SafetensorError as error:
        raise UserError(f"cannot export {path}: {error}") from error
    except OSError as error:
        if is_disk_full(error):
            raise RunFailed(
                f"the disk is full: what was written to {output} has been removed"
            ) from error
        where = error.filename or output
        raise UserError(f"cannot export: {where}: {error.strerror}") from error
    done = f"exported step {about['step']}: {len(sizes)} tensors in {output}"
    show(one_line("; ".join((done, *notes))))


def _left_out(about: Mapping[str, Any]) -> list[str]:
    """Says which parameters the checkpoint has not, and so the export neither."""
    if frozen.KEY not in about:
        return []
    return [
        f"without the frozen parameters, which are in {about[frozen.KEY]['path']}: "
        "--format=huggingface merges both, --format=peft is for adapters alone"
    ]


def _check_output(output: Path | str) -> None:
    """Raises UserError if the export would mix with another."""
    for name in names_at(output):
        if ".safetensors" in name or name in (metadata.FILE, CONFIG, peft.CONFIG):
            raise UserError(
                f"--output={output} holds {name} already: give another folder"
            )


@contextlib.contextmanager
def _all_or_nothing(output: Path | str) -> Iterator[Path]:
    """Yields a new folder, whose files move to `output` when all are written."""
    if is_remote(output):
        with tempfile.TemporaryDirectory(prefix="jshard-export-") as temporary:
            folder = Path(temporary, _UNFINISHED)
            folder.mkdir()
            yield folder
            upload(folder, output, last=INDEX)
        return
    output = Path(output)
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


if __name__ == "__main__":
    main()
