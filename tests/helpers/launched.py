"""Jobs under `python -m jshard.launch`, which tests do harm to."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from failures import STEPS
from jobs import MARK, children, environment, last_step, marked

WORDS = (
    "--config=tiny.py",
    f"--config.steps={STEPS}",
    "--config.mesh.cpu_devices=2",
    "--config.eval_every=0",
    "--config.model.noise=0",
    "--workdir=run",
)


class Launched:
    """The launcher, running in a folder."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        words: Sequence[str] = WORDS,
        prefix: Sequence[str] = (),
    ):
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.out, self.err = folder / "out", folder / "err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [
                    *prefix,
                    sys.executable,
                    "-m",
                    "jshard.launch",
                    *options,
                    "--",
                    *words,
                ],
                cwd=folder,
                # A cluster's proxy, which no process needs to find another.
                env=environment()
                | {MARK: self.mark, "http_proxy": "http://127.0.0.1:9"},
                stdout=out,
                stderr=err,
            )

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 90
        metrics = self.folder / "run" / "metrics.jsonl"
        while last_step(metrics) < step:
            assert time.monotonic() < deadline, self.err.read_text()
            assert self.process.poll() is None, self.err.read_text()
            time.sleep(0.01)

    def worker(self, index: int) -> int:
        """The process that trains: under its parent, under the shell."""
        for pid in marked(self.mark):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            mine = {f"--process_id={index}", "jshard.train"} <= set(words)
            if mine and not children(pid) and words[0] != "sh":
                return pid
        raise AssertionError(f"no process {index}")

    def wait(self, timeout: float = 90) -> int:
        return self.process.wait(timeout)


@contextlib.contextmanager
def launch(
    folder: Path, *options: str, words: Sequence[str] = WORDS
) -> Iterator[Launched]:
    launched = Launched(folder, *options, words=words)
    try:
        yield launched
    finally:
        for pid in marked(launched.mark):
            os.kill(pid, signal.SIGKILL)
        launched.process.wait()
