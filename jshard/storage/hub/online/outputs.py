"""Where commands write: folders, buckets, and repositories on the Hugging Face Hub.

hf://ORG/NAME@BRANCH is a model's repository, hf://datasets/ORG/NAME@BRANCH/PATH a
folder or a file in a dataset's. What is uploaded there is one commit.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from jshard.storage.checkpoint.buckets import files
from jshard.storage.hub.online.download import library
from jshard.storage.hub.online.failures import LOGIN, explained
from jshard.storage.hub.online.names import Name, parse
from jshard.system.cli.paths import is_on_hub
from jshard.system.errors import UserError


def names_at(output: str | Path) -> list[str]:
    """Returns the names of the files in an output folder that are not hidden.

    Raises:
      UserError: It cannot be read; or is on the Hub, and there is no token to write.
    """
    if not is_on_hub(output):
        return files.names_at(output)
    name = _name(output)
    hub = library(name)
    if hub.get_token() is None:
        raise UserError(f"writing {name} needs a token of the Hub: run {LOGIN}")
    with _explained(name):
        try:
            found = hub.list_repo_files(**_repository(name))
        except hub.errors.RepositoryNotFoundError:
            return []  # `upload` makes it
    paths = [PurePosixPath(path) for path in found]
    below = [x for x in paths if x.is_relative_to(name.path)]
    return [x.name for x in below if not x.name.startswith(".")]


def upload(folder: Path, output: str, last: str) -> None:
    """Uploads the files of a folder that are not hidden.

    A repository that does not exist yet becomes a private one.

    Args:
      folder: The folder.
      output: The folder in a bucket, or on the Hub.
      last: The name of the file that a bucket gets last, as others are found by it.

    Raises:
      UserError: It cannot be written.
    """
    if not is_on_hub(output):
        files.upload(folder, output, last)
        return
    with _open(output) as (hub, name):
        hub.upload_folder(
            folder_path=folder,
            path_in_repo=name.path or None,
            ignore_patterns=".*",
            commit_message="Upload by jshard",
            **_repository(name),
        )


def write_text(output: str, text: str) -> None:
    """Writes a file in a bucket or on the Hub; a UserError if it cannot be written."""
    if not is_on_hub(output):
        files.write_text(output, text)
        return
    with _open(output) as (hub, name):
        hub.upload_file(
            path_or_fileobj=text.encode(),
            path_in_repo=name.path,
            commit_message="Upload by jshard",
            **_repository(name),
        )


def _name(output: str | Path) -> Name:
    is_data = str(output).startswith("hf://datasets/")
    name = parse(output, "dataset" if is_data else "model")
    assert name is not None  # with hf://
    if name.commit:
        raise UserError(f"{name}: a commit cannot be changed; name a branch")
    return name


def _repository(name: Name) -> dict[str, Any]:
    return {
        "repo_id": name.repository,
        "repo_type": name.kind,
        "revision": name.revision or None,
    }


@contextlib.contextmanager
def _open(output: str) -> Iterator[tuple[Any, Name]]:
    """Yields the library and the name of a repository that exists."""
    name = _name(output)
    hub = library(name)
    with _explained(name):
        hub.create_repo(
            name.repository, repo_type=name.kind, private=True, exist_ok=True
        )
        yield hub, name


@contextlib.contextmanager
def _explained(name: Name) -> Iterator[None]:
    """Makes one line of what the Hub refuses."""
    from huggingface_hub.errors import (
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]  of httpx or httpx2
    )

    try:
        yield
    except (OSError, ValueError, HTTPError) as error:
        raise explained(name, error, "write") from error
