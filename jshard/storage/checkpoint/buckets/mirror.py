"""The local copy of what is small in a bucket: a run without its arrays.

All who read a run or a checkpoint read this copy like one on a disk, except that the
arrays are read from the bucket (``arrays.address``).
"""

import atexit
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from jshard.storage.checkpoint import manifest, step_folders
from jshard.storage.checkpoint.buckets import step_list
from jshard.storage.checkpoint.buckets.arrays import ADDRESS
from jshard.storage.checkpoint.buckets.objects import AT_START, BucketError, Objects
from jshard.storage.checkpoint.buckets.orbax_mirror import fetch_orbax
from jshard.storage.checkpoint.step_folders import CHECKPOINTS
from jshard.system.cli.paths import is_bucket
from jshard.system.errors import UserError
from jshard.system.files.atomic import replace_file
from jshard.system.files.untrusted import path_inside

# What a resumed run reads.
_RUN = ("config.json", "notes.json", "metrics.jsonl", "attempts.jsonl")
_PICTURES = "samples/"
_PREFIX = "jshard-"  # of temporary folders
_LOCK = ".in-use"  # a file in them
_THREADS = 8


def on_disk(path: str | Path) -> Path:
    """Returns a path, or for a URL the local copy of the run or checkpoint there.

    Raises:
      UserError: There is no checkpoint, or the bucket cannot be read.
    """
    if not is_bucket(path):
        return Path(path).expanduser()
    if (local := _fetched(str(path))) is None:
        raise UserError(f"{path} holds no checkpoint")
    return local


def holds_checkpoints(url: str) -> bool:
    """Returns whether there is a run, a folder of checkpoints or one checkpoint.

    Raises:
      UserError: The bucket cannot be read.
    """
    objects = Objects(url.rstrip("/"), AT_START)
    with _readable(url):
        return bool(
            objects.read(manifest.FILE)[0] is not None
            or step_list.read(objects.below(CHECKPOINTS))
            or step_list.read(objects)
        )


def _fetched(url: str) -> Path | None:
    """Returns the local copy of what is at a URL, if there is a run or checkpoint."""
    objects, local = Objects(url, AT_START), temporary_folder(url)
    with _readable(url):
        if objects.read(manifest.FILE)[0] is not None:
            step = _step_in(local, objects.url)
            _fetch_step(objects, step)
            return step
        if fetch_run(objects, local) or fetch_steps(objects, local):
            return local
        if fetch_orbax(objects, local):
            return local
    return None


@contextmanager
def _readable(url: str) -> Iterator[None]:
    """Makes what a bucket answers a UserError."""
    try:
        yield
    except BucketError as error:
        raise UserError(f"cannot read {url}: {error.strerror}") from error


def _step_in(local: Path, url: str) -> Path:
    """Returns the local folder for a step's URL, which is emptied to fetch the step.

    Raises:
      UserError: The URL ends in no name, as ".." or "-x" do.
    """
    return _file_in(local, url.rpartition("/")[2].partition("-")[0], url)


def _file_in(local: Path, name: str, url: str) -> Path:
    """Returns the path of a file of the local copy, by the name that a bucket gives."""
    try:
        return path_inside(local, name)
    except ValueError as error:
        raise UserError(f"{url}: {error}") from error


def temporary_folder(url: str) -> Path:
    """Returns a new folder for a URL, which is deleted when the process exits.

    Those of killed processes are deleted here: their lock is free.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        _delete_if_abandoned(folder)
    name = re.sub(r"\W+", "-", url)[:100]
    local = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{name}-"))
    atexit.register(shutil.rmtree, local, ignore_errors=True)
    lock = os.open(local / f"{_LOCK}-new", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # until the process ends
    (local / f"{_LOCK}-new").rename(local / _LOCK)
    return local


def _delete_if_abandoned(folder: Path) -> None:
    """Deletes a folder that this user's processes made, if none of them uses it."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # none of ours, or another's
        return
    try:
        if folder.is_symlink() or os.fstat(lock).st_uid != os.getuid():
            return
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(lock)


def fetch_run(run: Objects, local: Path) -> bool:
    """Copies a run's small files and those of its checkpoints to a local folder.

    Returns:
      Whether it has checkpoints.

    Raises:
      UserError: A key leads out of the folder.
    """
    for name in (*_RUN, *run.paths(_PICTURES)):
        file = _file_in(local, name, run.url)
        content, _ = run.read(name)
        if content is not None and not file.exists():
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)
    return fetch_steps(run.below(CHECKPOINTS), local / CHECKPOINTS)


def fetch_steps(checkpoints: Objects, local: Path) -> bool:
    """Makes the steps in a local folder those below a URL, without their arrays.

    Returns:
      Whether there are any.
    """
    names = step_list.read(checkpoints)
    for step in step_folders.find_steps(local):
        if step not in names:
            shutil.rmtree(step_folders.step_folder(local, step))
    with ThreadPoolExecutor(_THREADS) as pool:
        fetched = [
            pool.submit(_fetch_step, checkpoints.below(name), local / str(step))
            for step, name in names.items()
        ]
    for one in fetched:
        one.result()
    return bool(names)


def _fetch_step(step: Objects, local: Path) -> None:
    """Copies the small files that the manifest names, whatever is missing of them."""
    address = local / ADDRESS
    if address.exists() and address.read_text(encoding="utf-8") == step.url:
        return
    shutil.rmtree(local, ignore_errors=True)
    local.mkdir(parents=True)
    content, _ = step.read(manifest.FILE)
    if content is not None:
        (local / manifest.FILE).write_bytes(content)
        try:
            names = manifest.read(local)
        except (manifest.ManifestError, UserError):  # said by whoever restores it
            names = {}
        for name in names:
            content, _ = step.read(name)
            if content is not None:
                (local / name).write_bytes(content)
    replace_file(address, step.url)  # last: the copy is complete
