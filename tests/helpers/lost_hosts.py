"""Hosts of this machine with memory of their own, which can be lost."""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

from jobs import marked


class Hosts:
    """Hosts that `jshard.launch --hosts --rsh` reaches, each with its own /dev/shm.

    They are addresses of this machine: all of 127.0.0.0/8 is. What a host has in
    memory outlives its processes.
    """

    def __init__(self, folder: Path, count: int):
        self.names = [f"127.0.0.{number}" for number in range(1, count + 1)]
        self._folder = folder / "hosts"
        for name in self.names:
            (self._folder / name).mkdir(parents=True)
        self.rsh = self._folder / "rsh"
        self.rsh.write_text(
            f"""#!/bin/sh
            host=$1; shift
            memory={self._folder}/$host
            if [ ! -e $memory ]; then exit 255; fi
            export JSHARD_HOST=$host HOST_MEMORY=$memory SCRIPT="$*"
            exec unshare --mount sh -c \\
                'mount --bind $HOST_MEMORY /dev/shm && exec sh -c "$SCRIPT"'
            """
        )
        self.rsh.chmod(0o755)

    def memory(self, index: int) -> Path:
        return self._folder / self.names[index]

    def lose(self, index: int, mark: str) -> None:
        """Kills all processes on a host, with what is in its memory."""
        name = f"JSHARD_HOST={self.names[index]}".encode()
        for pid in marked(mark):
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{pid}/environ").read_bytes()
                if name in environ.split(b"\0"):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.memory(index))


def can_isolate() -> bool:
    """Whether this user may mount."""
    return subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0
