"""Names on the Hugging Face Hub become local paths, in the cache of huggingface_hub.

Its environment counts: HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE.
"""

import contextlib
import dataclasses
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from jshard.storage.checkpoint.buckets.files import downloaded
from jshard.storage.hub.online.failures import explained, lacks, passes, reason
from jshard.storage.hub.online.names import COMMIT, Name, parse
from jshard.system.cli.paths import is_bucket
from jshard.system.cli.terminal import is_terminal, show
from jshard.system.errors import UserError

# A small file that a repository has.
_SMALL = {"model": ("config.json", "adapter_config.json"), "dataset": ("README.md",)}
_WEIGHTED = re.compile(r"(.*?)(:[^:/]*)?", re.DOTALL)
_T = TypeVar("_T")
_WAITS = (1, 4, 16)  # seconds; within a request the library waits on its own


def pin(text: str, kind: str = "model", known: Iterable[Any] = ()) -> str:
    """Returns a name with the commit that it stands for; a local path as it is.

    Args:
      text: A name or a path.
      kind: As for `parse`.
      known: What may be this name with its commit, as a run has recorded it: the first
        that is stays.

    Raises:
      UserError: There is no such name, or the Hub does not answer.
    """
    name = parse(text, kind)
    if name is None or name.commit:
        return text
    if kind == "stream" and not _asks_hub():
        return text  # what `datasets` has prepared, or says that it needs
    for one in known:
        commit = COMMIT.search(str(one))
        if commit and str(dataclasses.replace(name, commit=commit[1])) == one:
            return one
    folder = download(name, ())
    return str(dataclasses.replace(name, commit=folder.name))


def pin_mixture(text: str, kind: str, known: Iterable[Any] = ()) -> str:
    """Returns "NAME:WEIGHT,NAME:WEIGHT" or one name with commits, as `pin` does."""
    if os.path.exists(text):
        return text
    names = [name for one in known for name, _ in _weighted(str(one))]
    pinned = [pin(name, kind, names) + weight for name, weight in _weighted(text)]
    return ",".join(pinned)


def _weighted(text: str) -> list[tuple[str, str]]:
    """Returns the names of a mixture, each with ":" and its weight, or ""."""
    parts = [_WEIGHTED.fullmatch(part.strip()) for part in text.split(",")]
    return [(part[1], part[2] or "") for part in parts if part]


def local_path(text: str | Path, files: Sequence[str]) -> Path:
    """Returns a local path, or that of a model's folder in the cache.

    Args:
      text: A path, or a name.
      files: What is needed of a name, where it has them; the cache gets them.

    Raises:
      UserError: There is no such name, or the Hub does not answer.
      RunFailed: The disk is full.
    """
    name = parse(text)
    if name is None:
        return Path(text).expanduser()
    return cached(name, files) or download(name, files)


def cached_path(text: str | Path) -> Path:
    """Returns a local path, or where the cache has a pinned name, if it does."""
    name = parse(text)
    return _folder(name) if name and name.commit else Path(text).expanduser()


def data_path(text: str | Path) -> Path:
    """Returns a local path, or that of the copy of a dataset's or a bucket's files.

    Raises:
      UserError: There is no such file, or the Hub does not answer.
      RunFailed: The disk is full.
    """
    if is_bucket(text):
        return downloaded(str(text))
    name = parse(text, "dataset")
    if name is None:
        return Path(text).expanduser()
    files = [name.path, f"{name.path}/*"] if name.path else ["*"]
    folder = download(name, files, "files")
    if not (path := folder / name.path).exists():
        raise lacks(dataclasses.replace(name, commit=folder.name), name.path)
    return path


def cached(name: Name, files: Sequence[str]) -> Path | None:
    """Returns the folder in the cache, if it has these files of the name's commit."""
    folder = _folder(name)
    return folder if all((folder / file).exists() for file in files) else None


def download(name: Name, files: Sequence[str], what: str = "") -> Path:
    """Downloads what the cache lacks; returns the folder, whose name is the commit.

    One process of a host does so at a time, so that the others find the files there.

    Args:
      name: Without a commit, its revision's newest one.
      files: Names or patterns; those that the repository lacks are left out. A small
        file comes with them.
      what: What is downloaded, to tell the user; "" for small files.

    Raises:
      UserError: There is no such name, or the Hub does not answer.
      RunFailed: The disk is full.
    """
    hub = library(name)

    def fetch() -> Path:
        with _lock(name):
            if what and not cached(name, files):
                show(f"jshard: downloading {what} of {name}", error=True)
            folder = hub.snapshot_download(
                name.repository,
                repo_type=name.kind,
                revision=name.commit or name.revision or None,
                allow_patterns=[*_SMALL[name.kind], *files],
                tqdm_class=_bars(bool(what)),
            )
            return Path(folder)

    return _asked(name, fetch)


def has_file(name: Name, file: str) -> bool:
    """Asks the Hub whether a repository has a file; raises as ``download`` does."""
    hub = library(name)
    revision = name.commit or name.revision or None
    ask = lambda: hub.file_exists(
        name.repository, file, repo_type=name.kind, revision=revision
    )
    return _asked(name, ask)


def _asked(name: Name, ask: Callable[[], _T]) -> _T:
    """Returns what the Hub answers, asked again while it is busy."""
    hub = library(name)
    for wait in (*_WAITS, 0):
        try:
            return ask()
        except (OSError, ValueError, hub.errors.HTTPError) as error:
            if not wait or not passes(error):
                raise explained(name, error) from error
            show(f"jshard: trying again in {wait} s: {reason(error)}", error=True)
        time.sleep(wait)
    raise AssertionError("the last error was raised")


def _folder(name: Name) -> Path:
    """Returns where the cache has a commit, or would have it."""
    cache = Path(library(name).constants.HF_HUB_CACHE)
    return cache / _in_cache(name) / "snapshots" / (name.commit or "none")


def _in_cache(name: Name) -> str:
    return f"{name.kind}s--{name.repository.replace('/', '--')}"


@contextlib.contextmanager
def _lock(name: Name) -> Iterator[None]:
    """Holds the lock of a repository in the cache, unless that cannot be written to."""
    from huggingface_hub.utils import WeakFileLock

    locks = Path(library(name).constants.HF_HUB_CACHE, ".locks", _in_cache(name))
    try:
        locks.mkdir(parents=True, exist_ok=True)
        (locks / "jshard.lock").touch()
    except OSError:  # nobody downloads to it either
        yield
        return
    with WeakFileLock(locks / "jshard.lock"):
        yield


def _bars(shown: bool) -> Any:
    """Returns the class of progress bars: the library's on a terminal, or none."""
    from huggingface_hub.utils import tqdm

    class NoBar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})

    return tqdm if shown and is_terminal(sys.stderr) else NoBar


def _asks_hub() -> bool:
    """Returns whether there is the library, and it may use the network."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return False
    import huggingface_hub.constants

    return not huggingface_hub.constants.HF_HUB_OFFLINE


def library(name: Name) -> ModuleType:
    """Returns huggingface_hub; a UserError without it."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise UserError(
            f"{name.repository}: there is no such folder here, and a name on the "
            "Hugging Face Hub needs huggingface_hub: pip install 'jshard[hub]'"
        ) from error
    return huggingface_hub
