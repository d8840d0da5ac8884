"""The server of a LoopbackHub: which request is which, and how answers are sent."""

import contextlib
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_NAME = r"(?P<name>[^/]+/[^/]+)"
_API = re.compile(
    rf"/api/(?P<kind>models|datasets)/{_NAME}"
    r"(?:/(?P<what>refs|revision|tree|paths-info|preupload|commit)(?:/(?P<revision>[^/]+))?"
    r"(?:/(?P<path>.+))?)?"
)
_SEARCH = re.compile(r"/api/(?P<kind>models|datasets)")
_FILE = re.compile(
    rf"/(?P<kind>datasets/)?{_NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)"
)


class Refusal(Exception):
    """An answer of the hub that is an error: a status, its code and message."""


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the client was first
        connection.shutdown(socket.SHUT_RDWR)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: Any  # a LoopbackHub

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no error of the server's."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def _hub(self) -> Any:
        assert isinstance(self.server, Server)
        return self.server.hub

    def setup(self) -> None:
        super().setup()
        self._hub._open.add(self.connection)

    def finish(self) -> None:
        self._hub._open.discard(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        hub, url = self._hub, urlsplit(self.path)
        hub._note(self.command, url.path, self.headers.get("Range"))
        length = int(self.headers.get("Content-Length") or 0)
        posted = self.rfile.read(length)
        if fault := hub._fault(url.path, body=False):
            self._send(fault.status, b"", {})
            return
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        query = parse_qs(url.query)
        try:
            if found := _FILE.fullmatch(url.path):
                kind = "datasets" if found["kind"] else "models"
                revision, path = unquote(found["revision"]), unquote(found["path"])
                commit, content = hub._file(kind, found["name"], revision, path, token)
                self._send_file(commit, content)
            elif found := _API.fullmatch(url.path):
                fields: dict[str, Any] = found.groupdict()
                fields["path"] = unquote(fields["path"] or "")
                fields["recursive"] = query.get("recursive", [""])[0].lower() == "true"
                fields["posted"] = posted
                self._send_json(hub._answer(fields, token))
            elif url.path == "/api/repos/create":
                status, answer = hub._create(posted, token)
                self._send_json(answer, status)
            elif found := _SEARCH.fullmatch(url.path):
                self._send_json(hub._search(found["kind"], query))
            else:
                raise Refusal(404, "", "no such address on the loopback hub")
        except Refusal as refusal:
            status, code, message, *commit = refusal.args
            headers = {"X-Error-Code": code} if code else {}
            headers |= {"X-Error-Message": message}
            headers |= {"X-Repo-Commit": commit[0]} if commit else {}
            self._send(status, json.dumps({"error": message}).encode(), headers)

    def _send_json(self, value: Any, status: int = 200) -> None:
        headers = {"Content-Type": "application/json"}
        self._send(status, json.dumps(value).encode(), headers)

    def _send_file(self, commit: str, content: bytes) -> None:
        headers = {
            "X-Repo-Commit": commit,
            "ETag": f'"{etag(content)}"',
            "X-Linked-ETag": f'"{etag(content)}"',
            "X-Linked-Size": str(len(content)),
            "Accept-Ranges": "bytes",
        }
        status, first, size = 200, 0, len(content)
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first = int(match[1])
            end = min(int(match[2]) + 1 if match[2] else size, size)
            if first >= size:
                headers |= {"Content-Range": f"bytes */{size}"}
                self._send(416, b"", headers)
                return
            status, content = 206, content[first:end]
            headers |= {"Content-Range": f"bytes {first}-{end - 1}/{size}"}
        self._send(status, content, headers)

    def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        hub, path = self._hub, urlsplit(self.path).path
        fault = hub._fault(path, body=True) if status in (200, 206) else None
        self._write(content[: fault.after] if fault else content, hub.rate)
        if fault:
            self.close_connection = True
            self.wfile.flush()
            if fault.leaves:
                threading.Thread(target=hub.close, daemon=True).start()
            cut(self.connection)

    def _write(self, content: bytes, rate: float) -> None:
        part = max(1, int(rate / 20)) if rate else max(1, len(content))
        for start in range(0, len(content), part):
            self.wfile.write(content[start : start + part])
            if rate:
                time.sleep(part / rate)
