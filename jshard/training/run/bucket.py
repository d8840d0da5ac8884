"""A run in a bucket: written in a local folder, and copied while it trains."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from jshard.storage.checkpoint.buckets.arrays import shown
from jshard.storage.checkpoint.buckets.mirror import (
    fetch_run,
    fetch_steps,
    temporary_folder,
)
from jshard.storage.checkpoint.buckets.objects import AT_START, BucketError, Objects
from jshard.storage.checkpoint.buckets.step_list import StepList
from jshard.storage.checkpoint.selected.run_address import names_step
from jshard.storage.checkpoint.step_folders import CHECKPOINTS, find_steps, step_folder
from jshard.system.cli.paths import check_path, is_bucket
from jshard.system.errors import RunFailed, UserError, warn
from jshard.training.run.background import Background


class RunInBucket:
    """The run at a URL, and its local folder, which has all of it but arrays.

    Attributes:
      url: Of the run.
      path: The local folder, which is deleted when the process exits.
      owner: Tells this run from others at the URL once it has claimed it.

    Raises:
      UserError: The bucket cannot be read.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.path = temporary_folder(url)
        self.owner = ""
        self._objects = Objects(url)
        self._copied: dict[str, tuple[int, int]] = {}  # time and size by path
        try:
            fetch_run(Objects(url, AT_START), self.path)
        except BucketError as error:
            raise UserError(f"cannot read --workdir={url}: {error.strerror}") from error

    @property
    def checkpoints(self) -> str:
        """The URL of the run's checkpoints."""
        return f"{self.url}/{CHECKPOINTS}"

    def refresh(self) -> None:
        """Copies the small files of checkpoints that are not in the folder yet."""
        try:
            fetch_steps(Objects(self.checkpoints), self.path / CHECKPOINTS)
        except BucketError as error:
            raise UserError(f"cannot read {self.url}: {error.strerror}") from error

    def copied(self, name: str) -> int:
        """Returns how many bytes the bucket has of a file that only grows."""
        return self._copied.get(name, (0, 0))[1]

    def claim(self) -> bool:
        """Becomes the owner of the checkpoints: a run that was started before ends.

        Returns:
          Whether there are other steps now than in the folder.
        """
        try:
            steps = StepList(Objects(self.checkpoints, AT_START))
        except BucketError as error:
            raise UserError(
                f"cannot write --workdir={self.url}: {error.strerror}"
            ) from error
        self.owner, folder = steps.owner, self.path / CHECKPOINTS
        there = {n: f"{self.checkpoints}/{name}" for n, name in steps.names.items()}
        return there != {n: shown(step_folder(folder, n)) for n in find_steps(folder)}

    def copy(self, below: str = "") -> None:
        """Copies files that have changed to the bucket; checkpoints are there already.

        Args:
          below: The subfolder to copy; "" is all.

        Raises:
          BucketError: It cannot be written.
        """
        for file in sorted((self.path / below).rglob("*")):
            name = file.relative_to(self.path).as_posix()
            if name.startswith((".", f"{CHECKPOINTS}/")) or "/." in name:
                continue
            if file.is_file():
                status = file.stat()
                version = status.st_mtime_ns, status.st_size
                if self._copied.get(name) != version:
                    self._objects.write(name, file.read_bytes())
                    self._copied[name] = version


def open_workdir(
    workdir: str | Path | RunInBucket | None,
) -> tuple[Path | None, RunInBucket | None]:
    """Returns the local folder of what is given as `--workdir`, and a run in a bucket.

    Raises:
      UserError: It can be neither, or the bucket cannot be read.
    """
    if workdir is None:
        return None, None
    if not isinstance(workdir, RunInBucket):
        check_path("workdir", workdir, bucket=True)
        if names_step(str(workdir)):
            raise UserError(
                f"workdir={workdir} names a step of a run, which goes on from its "
                "newest: give the run alone, and step=... to evaluate and predict; a "
                "new run starts from it by checkpoint.restore"
            )
        if not is_bucket(workdir):
            return Path(workdir), None
        workdir = RunInBucket(str(workdir))
    return workdir.path, workdir


class Copying(AbstractContextManager):
    """Copies a run's files to its bucket, if it is in one, and on exit the last ones.

    Process 0 copies all files, the others their logs.

    Raises:
      RunFailed: The last files cannot be copied.
    """

    def __init__(self, bucket: RunInBucket | None, process: int):
        self._bucket, self._below = bucket, "logs" if process else ""
        self._stopped = bucket is None
        self._thread = Background(self._try, 0.0, "copy") if bucket else None

    def start(self) -> None:
        """Copies the first files, to find out before the first step if that fails."""
        if self._bucket is not None:
            try:
                self._bucket.copy(self._below)
            except BucketError as error:
                raise UserError(
                    f"cannot write --workdir={self._bucket.url}: {error.strerror}"
                ) from error

    def after_save(self) -> None:
        """Starts to copy what has changed."""
        if self._thread is not None:
            self._thread.put(None)

    def stop(self) -> None:
        """Leaves the bucket as it is, for another run has it now."""
        self._stopped = True

    def _try(self, _: list[Any]) -> None:
        assert self._bucket is not None
        try:
            if not self._stopped:
                self._bucket.copy(self._below)
        except BucketError as error:
            warn(f"cannot copy the run's files yet: {error}")

    def __exit__(self, kind: Any = None, *exception: object) -> None:
        if self._thread is not None:
            self._thread.close(timeout=None)  # requests have limits of their own
        if self._bucket is None or self._stopped:
            return
        try:
            self._bucket.copy(self._below)
        except BucketError as error:
            text = f"the run's last files cannot be copied: {error}"
            if kind is None:
                raise RunFailed(text) from error
            warn(text)
