"""The local copy of what is small in a folder of Orbax's in a bucket.

All that tells its checkpoints apart is copied, and where databases are; arrays are read
from the bucket.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jshard.storage.checkpoint.buckets.objects import Objects
from jshard.system.errors import UserError
from jshard.system.files.atomic import replace_file
from jshard.system.files.untrusted import path_inside

ITEM = "_METADATA"  # of an item, with its arrays
CHECKPOINT = ("_CHECKPOINT_METADATA", "orbax.checkpoint")
COMMITTED = "commit_success.txt"  # written last, where a folder cannot be renamed
DATABASE = "manifest.ocdbt"
_ADDRESS = ".orbax-in-bucket"  # a file in the local copy: the URL
_DEEPEST = 3  # a CheckpointManager's folder / step / item / file
_THREADS = 8


def in_bucket(path: Path) -> Objects | None:
    """Returns where a folder is that a local copy has the small files of."""
    for folder in (path, *path.parents):
        if (file := folder / _ADDRESS).exists():
            root = Objects(file.read_text(encoding="utf-8"))
            return root if folder == path else root.below(f"{path.relative_to(folder)}")
    return None


def fetch_orbax(objects: Objects, local: Path) -> bool:
    """Copies the small files of Orbax's checkpoints below a URL to a local folder.

    Returns:
      Whether there are any.

    Raises:
      BucketError: The bucket cannot be read.
      UserError: A key leads out of the folder, or cannot be copied.
    """
    read = (ITEM, *CHECKPOINT)
    found: dict[str, Path] = {}
    for key in objects.paths():
        name = key.rpartition("/")[2]
        within = key.count("/") < _DEEPEST or name == DATABASE
        if within and name in (*read, DATABASE, COMMITTED):
            try:
                found[key] = path_inside(local, key)
            except ValueError as error:
                raise UserError(f"{objects.url}: {error}") from error
    if not any(file.name in read for file in found.values()):
        return False
    with ThreadPoolExecutor(_THREADS) as pool:
        small = {key: file for key, file in found.items() if file.name in read}
        contents = dict(zip(small, pool.map(objects.read, small), strict=True))
    for key, file in found.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes((key in contents and contents[key][0]) or b"")
        except OSError as error:  # a key below another, or a full disk
            why = f"{key} cannot be copied to {local}: {error.strerror}"
            raise UserError(f"{objects.url}: {why}") from error
    replace_file(local / _ADDRESS, objects.url)
    return True
