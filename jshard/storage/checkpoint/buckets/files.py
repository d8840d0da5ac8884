"""Files in buckets that are no checkpoints: what a run reads, what commands write.

fsspec is the client, which knows sizes, and streams. What is read is downloaded to a
cache, once a host; what is written is written to the disk first.
"""

import contextlib
import fcntl
import importlib
import logging
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jshard.system.cli.paths import cache_folder, is_bucket
from jshard.system.cli.terminal import show
from jshard.system.errors import RunFailed, UserError, is_disk_full
from jshard.system.formatting import format_bytes, one_line

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
_THREADS = 8
_VERSION = ".version"  # of the object that a file in the cache is, in a file beside it


def cached(url: str | Path) -> Path:
    """Returns where the cache has a URL's files, or would have them."""
    scheme, _, path = str(url).rstrip("/").partition("://")
    return cache_folder("buckets") / scheme / path


def downloaded(url: str) -> Path:
    """Returns the copy of a file or a folder in a bucket, made up to date now.

    One process of a host downloads at a time, so that the others find the files there.

    Raises:
      UserError: There is nothing at the URL, or it cannot be read.
      RunFailed: The disk of the cache is too small.
    """
    scheme, _, path = url.rstrip("/").partition("://")
    cache = cache_folder("buckets") / scheme
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with _explained("read", url):
                _update(url, path, cache)
    except OSError as error:
        if is_disk_full(error):
            raise _too_small(url, cache) from error
        raise UserError(
            f"cannot write {error.filename or cache}: {error.strerror}"
        ) from error
    return cache / path


def _update(url: str, path: str, cache: Path) -> None:
    """Makes the copy of a path the objects there."""
    store = _store(url)
    found = {
        name: about
        for name, about in store.find(path, detail=True).items()
        if not name.endswith("/")  # a "folder" that a console has made
    }
    if not found:
        raise UserError(f"{url}: there is no such file or folder")
    if outside := [name for name in found if ".." in name.split("/")]:
        raise UserError(f"{url}: {outside[0]} is not a valid path on a disk; rename it")
    versions = {
        name: f"{about['size']} {about.get('ETag') or about.get('etag')}"
        for name, about in found.items()
    }
    for file in (cache / path).rglob("*"):
        name = file.relative_to(cache).as_posix()
        if file.is_file() and "/." not in name and name not in found:
            file.unlink()
    missing = [name for name in found if _version(cache / name) != versions[name]]
    if not missing:
        return
    size = sum(found[name]["size"] for name in missing)
    if size > shutil.disk_usage(cache).free:
        raise _too_small(url, cache, size)
    show(
        f"jshard: downloading {format_bytes(size)} of {url} to {cache / path}",
        error=True,
    )

    def download(name: str) -> None:
        file = cache / name
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.part")
        store.get_file(name, str(partial))
        _beside(file).unlink(missing_ok=True)
        partial.replace(file)
        _beside(file).write_text(versions[name])

    _on_threads(download, missing)


def _beside(file: Path) -> Path:
    return file.with_name(f".{file.name}{_VERSION}")


def _version(file: Path) -> str:
    there = file.is_file() and _beside(file).is_file()
    return _beside(file).read_text() if there else ""


def _too_small(url: str, cache: Path, size: int = 0) -> RunFailed:
    needs = f"{url} takes {format_bytes(size)}, and " * bool(size)
    free = format_bytes(shutil.disk_usage(cache).free)
    return RunFailed(
        f"{needs}the disk of {cache}, to which it is downloaded, has {free} free: make "
        "room, or set JSHARD_CACHE to a folder on another one"
    )


def names_at(output: str | Path) -> list[str]:
    """Returns the names of the files in an output folder, on a disk or in a bucket.

    Raises:
      UserError: The bucket cannot be read.
    """
    if is_bucket(output):
        with _explained("read", output):
            return [name.rpartition("/")[2] for name in _store(output).find(output)]
    folder = Path(output)
    return [file.name for file in folder.iterdir()] if folder.exists() else []


def upload(folder: Path, url: str, last: str) -> None:
    """Uploads the files of a folder that are not hidden.

    Args:
      folder: The folder.
      url: The folder in the bucket.
      last: The name of the file to upload last, as others are found by it.

    Raises:
      UserError: The bucket cannot be written.
    """
    files = [file for file in folder.iterdir() if not file.name.startswith(".")]
    with _explained("write", url):
        store = _store(url)

        def send(name: str) -> None:
            store.put_file(str(folder / name), f"{url.rstrip('/')}/{name}")

        _on_threads(send, [file.name for file in files if file.name != last])
        _on_threads(send, [file.name for file in files if file.name == last])


def write_text(url: str, text: str) -> None:
    """Writes a file in a bucket; a UserError if it cannot be written."""
    with _explained("write", url):
        _store(url).pipe_file(url, text.encode())


def _on_threads(action: Callable[[str], None], names: list[str]) -> None:
    with ThreadPoolExecutor(_THREADS) as pool:
        for one in [pool.submit(action, name) for name in names]:
            one.result()


def _store(url: str) -> Any:
    """Returns fsspec's file system of a URL; a UserError if its package is missing."""
    scheme = url.partition("://")[0]
    try:
        importlib.import_module(_PACKAGES[scheme])
        import fsspec
    except ImportError as error:
        raise UserError(
            f"{url}: files in buckets need {_PACKAGES[scheme]}: pip install "
            "'jshard[buckets]'"
        ) from error
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it raises what it logs
    return fsspec.filesystem(scheme, use_listings_cache=False)


@contextlib.contextmanager
def _explained(what: str, url: str) -> Iterator[None]:
    """Makes one line of the clients' errors, of which each library has its own."""
    try:
        yield
    except (UserError, RunFailed):
        raise
    except Exception as error:
        if is_disk_full(error):
            raise
        reason = one_line(str(error)) or type(error).__name__
        if isinstance(error, FileNotFoundError):
            reason = f"there is no such bucket ({reason})"
        raise UserError(f"cannot {what} {url}: {reason[:300]}") from error
