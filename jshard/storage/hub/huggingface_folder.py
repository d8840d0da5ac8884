"""Hugging Face's folders: config.json, tokenizer files, and what tells them apart."""

import dataclasses
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jshard.storage.checkpoint import metadata
from jshard.storage.checkpoint.selected.run_address import find_run, names_step
from jshard.storage.hub.online.download import cached, download, has_file, local_path
from jshard.storage.hub.online.failures import lacks
from jshard.storage.hub.online.names import parse
from jshard.storage.hub.quantised.methods import WHAT_WORKS, problem_of_config
from jshard.storage.hub.safetensors_file import weight_files
from jshard.storage.hub.safetensors_read import is_safetensors
from jshard.storage.hub.safetensors_write import INDEX, SINGLE
from jshard.system.cli.paths import is_bucket
from jshard.system.errors import UserError, some_of
from jshard.system.files.untrusted import read_json

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)
_TIMM = "architecture"  # transformers has "architectures"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def model_path(text: str | Path, step: str | None = None) -> Path:
    """Returns a local path, or the folder in the cache of a model on the Hub.

    Args:
      text: A path; the URL of a checkpoint in a bucket, for its local copy; a run with
        @best, @newest or @STEP, for the folder of that checkpoint; or a name, of which
        the cache gets config, tokenizer and weights.
      step: Which checkpoint of a run is meant, as after the @.

    Raises:
      UserError: There is no such name, it has no safetensors, or the Hub does not
        answer.
      RunFailed: The disk is full.
    """
    if (name := parse(text)) is None:
        return find_run(text, step)
    if step is not None:
        raise UserError(f"--step={step}: {text} is not a run, but a name on the Hub")
    folder = local_path(text, (CONFIG, GENERATION, *TOKENIZER, INDEX))
    name = dataclasses.replace(name, commit=folder.name)
    files = weight_files(folder)
    if files != [SINGLE] and not cached(name, files) and has_file(name, SINGLE):
        files = [SINGLE]  # as in a folder that has both
    if not cached(name, files):
        download(name, files, f"{len(files)} file{'s' * (len(files) > 1)} of weights")
    if missing := [file for file in files if not (folder / file).exists()]:
        none = missing == [SINGLE]
        raise lacks(name, f"{SINGLE} or {INDEX}" if none else some_of(missing))
    return folder


def has_weights(folder: Path) -> bool:
    """Returns whether the files of a folder's weights are all there."""
    return is_safetensors(folder) and all(
        (folder / file).exists() for file in weight_files(folder)
    )


def is_somewhere(text: str | Path) -> bool:
    """Returns whether a path exists; a URL or a name is asked for when it is read."""
    if is_bucket(text) or parse(text) is not None:
        return True
    return Path(text).exists() or names_step(str(text))


def is_huggingface(path: Path) -> bool:
    """Returns whether a path is a Hugging Face folder, complete or not.

    A folder that ``jshard.export`` wrote in its own names holds a description, and a
    run's folder a config.json without an architecture.
    """
    if not path.is_dir() or (path / metadata.FILE).exists():
        return False
    if is_safetensors(path):
        return True
    try:
        content = read_json(path / CONFIG)
    except (OSError, ValueError):
        return any((path / file).exists() for file in _PICKLED)
    return isinstance(content, dict) and not content.keys().isdisjoint(
        ("architectures", "model_type", _TIMM)
    )


def is_timm(path: Path) -> bool:
    """Returns whether the config.json of a folder is timm's, complete or not."""
    try:
        content = read_json(path / CONFIG)
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and isinstance(content.get(_TIMM), str)


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the config.json of a Hugging Face folder, but for its quantization.

    Raises:
      UserError: There is none, it is damaged, or the weights are quantised in a way
        that cannot be read.
    """
    file = folder / CONFIG
    try:
        content = read_json(file)
    except FileNotFoundError as error:
        what = "does not exist" if not folder.exists() else f"has no {CONFIG}"
        raise UserError(
            f"{folder} {what}: a Hugging Face folder holds {CONFIG} beside the weights"
        ) from error
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"cannot read {file}: it is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"cannot read {file}: it does not hold a JSON object")
    if quantised := content.pop("quantization_config", None):
        given = quantised if isinstance(quantised, dict) else {}
        if problem := problem_of_config(given):
            raise UserError(
                f"{folder} is quantised ({problem} in {CONFIG}): {WHAT_WORKS}"
            )
    if not is_safetensors(folder) and any((folder / x).exists() for x in _PICKLED):
        raise UserError(
            f"{folder} holds {_PICKLED[0]}, whose reading may run any code: convert "
            "it to safetensors with transformers' save_pretrained"
        )
    return content


def copy_files(names: Iterable[str], source: Path, target: Path) -> list[str]:
    """Copies those of the files that a folder has; returns their names."""
    found = [name for name in names if (source / name).is_file()]
    for name in found:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)
    return found
