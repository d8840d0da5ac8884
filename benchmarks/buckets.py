"""Checkpoints in a bucket: bytes, requests, rates and memory, beside plain GETs.

    python benchmarks/buckets.py

The state is a GPT's with AdamW's moments, on 8 virtual CPU devices. The servers are
those of the tests (``pip install '.[buckets-test]'``), on loopback, behind a relay that
passes so many bytes a second each way. Beside each restore the same bytes are read by
plain GETs of Python's ``http.client``, at most 16 at a time. Relay, server and client
share the machine: where its cores are busy, that is what is measured.
"""

import argparse
import ctypes
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import tensorstore

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from bucket_servers import BUCKET, GCS, S3, Server, free_port

PIECE = 256 << 10  # bytes that the relay passes on at once
RANGE = 16 << 20  # bytes of a plain GET
MIB = 1 << 20


class Relay:
    """Passes bytes on between a port and a server, ``rate`` a second each way."""

    def __init__(self, port: int, server: int, rate: float):
        self.passed = [0, 0]  # bytes to the server, and from it
        self._server, self._rate = server, rate
        self._due = [0.0, 0.0]  # when the line will be free
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", port), backlog=128)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(("127.0.0.1", self._server))
            for way in (0, client, server), (1, server, client):
                threading.Thread(target=self._pass_on, args=way, daemon=True).start()

    def _pass_on(self, way: int, source: socket.socket, target: socket.socket) -> None:
        piece = memoryview(bytearray(PIECE))
        try:
            while size := source.recv_into(piece):
                with self._lock:
                    self.passed[way] += size
                    now = time.monotonic()
                    self._due[way] = max(self._due[way], now) + size / self._rate
                    wait = self._due[way] - now
                time.sleep(wait)
                target.sendall(piece[:size])
            target.shutdown(socket.SHUT_WR)
        except OSError:  # either side has closed: so does the other
            source.close()
            target.close()


def relay(port: int, server: int, rate: float) -> None:
    """Answers each line of the input with the bytes passed since the last one."""
    line = Relay(port, server, rate)
    for _ in sys.stdin:
        passed, line.passed = line.passed, [0, 0]
        print(json.dumps(passed), flush=True)


def get(url: str, endpoint: str) -> int:
    """Reads all objects below a URL by plain GETs, and keeps them; returns bytes."""
    from jshard.storage.checkpoint.buckets.objects import Objects

    s3: Any = boto3.client("s3", "us-east-1", endpoint_url=endpoint)
    place = urllib.parse.urlsplit(endpoint).netloc
    prefix = url.removeprefix(f"gs://{BUCKET}/").removeprefix(f"s3://{BUCKET}/")
    objects = Objects(url)

    def address(path: str) -> str:
        name = f"{prefix}/{path}"
        if url.startswith("s3:"):
            asked = {"Bucket": BUCKET, "Key": name}
            signed = s3.generate_presigned_url("get_object", asked)
            return signed.removeprefix(f"http://{place}")
        quoted = urllib.parse.quote(name, safe="")
        return f"/storage/v1/b/{BUCKET}/o/{quoted}?alt=media"

    here = threading.local()

    def read(path: str, start: int) -> memoryview:
        if not hasattr(here, "connection"):
            here.connection = HTTPConnection(place)
        span = {"Range": f"bytes={start}-{start + RANGE - 1}"}
        here.connection.request("GET", address(path), headers=span)
        answer = here.connection.getresponse()
        assert answer.status in (200, 206), answer.status
        content, size = memoryview(np.empty(answer.length, np.uint8)), 0
        while more := answer.readinto(content[size:]):
            size += more
        answer.read()
        return content

    def size_of(path: str) -> int:
        connection = HTTPConnection(place)
        connection.request("GET", address(path), headers={"Range": "bytes=0-0"})
        span = connection.getresponse().getheader("Content-Range")
        connection.close()
        assert span is not None
        return int(span.rpartition("/")[2])

    paths = [x for x in objects.paths() if "/state/" in x]
    spans = [(x, start) for x in paths for start in range(0, size_of(x), RANGE)]
    with ThreadPoolExecutor(16) as threads:
        return sum(map(len, list(threads.map(read, *zip(*spans, strict=True)))))


def operate(options: argparse.Namespace) -> None:
    """Prints what one operation took, in a process that does nothing else."""
    from checkpoints import Setup, kilobytes
    from jshard.storage.checkpoint.checkpointer import Checkpointer

    small = {**vars(options), "layers": 1, "width": 64, "vocab": 64}
    tiny, setup = Setup(argparse.Namespace(**small)), Setup(options)

    def save(url: str, setup: Setup, state: Any) -> None:
        with Checkpointer(url) as checkpointer:
            checkpointer.save(state)

    def restore(url: str, setup: Setup, state: Any) -> Any:
        return Checkpointer(url).restore(setup.abstract)

    def plain(url: str, setup: Setup, state: Any) -> None:
        get(url, options.endpoint)

    action: Callable[..., Any] = {"save": save, "restore": restore, "get": plain}[
        options.what
    ]
    url, warm = f"{options.url}/run", f"{options.url}/{os.getpid()}"
    for each in save, restore:  # imports and threads
        each(warm, tiny, tiny.state())
    state = setup.state() if action is save else None
    ctypes.CDLL(None).malloc_trim(0)
    before = kilobytes("/proc/self/status", "VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM
    print("start", flush=True)
    sys.stdin.readline()
    cpu, requests, start = _cpu(), _requests(), time.perf_counter()
    action(url, setup, state)
    seconds = time.perf_counter() - start
    peak = kilobytes("/proc/self/status", "VmHWM") - before
    result = {
        "seconds": seconds,
        "cpu": _cpu() - cpu,
        "requests": _requests() - requests,
        "peak": (peak << 10) - (setup.size if action is restore else 0),
        "size": setup.size,
    }
    print(json.dumps(result), flush=True)


def _requests() -> int:
    (metric,) = tensorstore.experimental_collect_matching_metrics(
        "/tensorstore/http/request_completed", include_zero_metrics=True
    )
    return sum(value["value"] for value in metric["values"])


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def start(what: str, *arguments: str, **env: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(Path(__file__)), f"--what={what}", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | env,
    )  # fmt: skip


def ask(process: subprocess.Popen) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def measure(server: Server, options: argparse.Namespace) -> None:
    """Prints a row for each operation at each rate."""
    size = [f"--{x}={getattr(options, x)}" for x in ("layers", "width", "vocab")]
    for rate in options.rates:
        port = free_port()
        address = f"--port={port}", f"--server={server.port}", f"--rate={rate}"
        line = start("relay", *address)
        endpoint = f"http://127.0.0.1:{port}"
        env = {k: v.replace(server.endpoint, endpoint) for k, v in server.env.items()}
        saves = ["save"] if rate == options.rates[0] else []
        for what in (*saves, "restore", "get"):
            for _ in range(options.repeats):
                worker = start(
                    what, f"--url={server.url}", f"--endpoint={endpoint}", *size, **env
                )
                assert worker.stdout is not None
                assert worker.stdout.readline() == "start\n"
                ask(line)
                took = ask(worker)
                there, back = ask(line)
                worker.communicate()
                passed = there if what == "save" else back
                print(
                    f"| {type(server).__name__} | {rate:g} MB/s | {what} "
                    f"| {took['seconds']:.2f} s | {passed / took['size']:.4f} "
                    f"| {took['requests'] or ''} "
                    f"| {passed / took['seconds'] / 1e6:.0f} MB/s "
                    f"| {took['cpu']:.2f} s | {took['peak'] / MIB:.0f} MiB |",
                    flush=True,
                )
        line.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description="Times checkpoints in a bucket.")
    parser.add_argument("--servers", nargs="*", default=["GCS", "S3"])
    parser.add_argument("--rates", nargs="*", type=float, default=[30, 100, 300])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=64)
    for hidden in ("what", "url", "endpoint"):
        parser.add_argument(f"--{hidden}", default="", help=argparse.SUPPRESS)
    for hidden in ("port", "server"):
        parser.add_argument(f"--{hidden}", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what == "relay":
        return relay(options.port, options.server, options.rate * 1e6)
    if options.what:
        return operate(options)
    print("| server | limit | what | time | bytes | requests | rate | CPU | memory |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in options.servers:
        kind = {"GCS": GCS, "S3": S3}[name]
        with tempfile.TemporaryDirectory() as folder, kind(Path(folder)) as server:
            measure(server, options)


if __name__ == "__main__":
    main()
