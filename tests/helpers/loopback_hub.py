"""A Hugging Face Hub on loopback, for tests with the real huggingface_hub client.

    with LoopbackHub() as hub:
        commit = hub.add("org/tiny", folder)              # a folder's files, as `main`
        hub.add("org/tiny", {"config.json": "{}"}, revision="old")
        hub.add("org/text", {"train.jsonl": "..."}, kind="datasets")
        subprocess.run(command, env=os.environ | hub.environment(tmp_path / "cache"))
        assert hub.requests["GET /org/tiny/resolve/COMMIT/model.safetensors"] == 1

A process reads HF_ENDPOINT and HF_HOME when it imports huggingface_hub: it must be a
new one, started with ``hub.environment(HF_HOME)``. Each ``add`` is a commit of its own.
Commits are 40 hex digits in ``requests``, too, where COMMIT stands above; ``hub.count``
adds requests up: ``hub.count("GET", "model.safetensors")``.

Faults, each of the next requests whose path contains a text:

    hub.fail("config.json", 503)             # answers so once
    hub.fail("/api/models", 429, times=3)
    hub.cut("model.safetensors", after=1000) # closes the connection in the body, once
    hub.rate = 100_000                       # bytes a second, of every body
    hub.leave("model.safetensors", after=1000)  # the whole server is gone from there on
    hub.gated.add("org/tiny")                # files need a token in hub.granted

Who has a token in hub.granted can write; ``hub.files("org/tiny")`` is what there is.
"""

import base64
import hashlib
import json
import socket
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote

from hub_server import Handler, Refusal, Server, cut, etag


@dataclass
class _Repository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


@dataclass
class _Fault:
    """What happens to the next `times` requests with a text in their path."""

    text: str
    times: int
    status: int = 0
    after: int = 0
    leaves: bool = False


class LoopbackHub:
    """Serves repositories at `endpoint` until it is closed.

    Attributes:
      requests: How many there were, by method and path without a query.
      ranges: The Range headers of downloads, by path.
      gated: Names of repositories whose files need a token in `granted`.
      known: Tokens of users who have no access to gated repositories.
      granted: Tokens of users who have, and who may write.
      private: Names of repositories that were made so.
      rate: Bytes a second of each body; 0 is as fast as it goes.
    """

    def __init__(self, port: int = 0) -> None:
        self.requests: Counter[str] = Counter()
        self.ranges: dict[str, list[str]] = {}
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.known = {"hf_member"}
        self.granted = {"hf_granted"}
        self.rate = 0.0
        self._repositories: dict[tuple[str, str], _Repository] = {}
        self._faults: list[_Fault] = []
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._server = Server(("127.0.0.1", port), Handler)
        self._server.hub = self
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def environment(self, home: Path) -> dict[str, str]:
        """Returns the environment of a client whose cache is in the folder `home`."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_TOKEN": "",
        }

    def add(
        self,
        name: str,
        files: Mapping[str, str | bytes] | Path,
        *,
        kind: str = "models",
        revision: str = "main",
        tag: str = "",
    ) -> str:
        """Makes the files a commit of a branch, new or not; returns its 40 digits."""
        if isinstance(files, Path):
            files = {
                str(file.relative_to(files)): file.read_bytes()
                for file in sorted(files.rglob("*"))
                if file.is_file()
            }
        content = {
            path: value.encode() if isinstance(value, str) else value
            for path, value in files.items()
        }
        digest = hashlib.sha1(name.encode())
        for path, value in content.items():
            digest.update(f"{path} {len(value)} ".encode() + value)
        commit = digest.hexdigest()
        repository = self._repositories.setdefault((kind, name), _Repository())
        repository.commits[commit] = content
        repository.branches[revision] = commit
        if tag:
            repository.tags[tag] = commit
        return commit

    def files(
        self, name: str, *, kind: str = "models", revision: str = "main"
    ) -> dict[str, bytes]:
        """Returns the files of a branch."""
        repository = self._repositories[kind, name]
        return repository.commits[repository.branches[revision]]

    def count(self, method: str, text: str = "") -> int:
        """Returns how many requests of a method had a text in their path."""
        return sum(
            number
            for request, number in self.requests.items()
            if request.startswith(method) and text in request
        )

    def fail(self, text: str, status: int, times: int = 1) -> None:
        """Answers the next requests whose path contains `text` with a status."""
        self._faults.append(_Fault(text, times, status=status))

    def cut(self, text: str, after: int, times: int = 1) -> None:
        """Closes the connection of the next such downloads after so many bytes."""
        self._faults.append(_Fault(text, times, after=after))

    def leave(self, text: str, after: int) -> None:
        """Closes the server and all connections within the next such download."""
        self._faults.append(_Fault(text, 1, after=after, leaves=True))

    def close(self) -> None:
        """Closes the server and all of its connections."""
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._open):
            cut(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # For the handler.

    def _note(self, method: str, path: str, range_: str | None) -> None:
        with self._lock:
            self.requests[f"{method} {path}"] += 1
            if range_:
                self.ranges.setdefault(path, []).append(range_)

    def _fault(self, path: str, body: bool) -> _Fault | None:
        """Takes the next fault of a path: in its body, or instead of an answer."""
        with self._lock:
            for fault in self._faults:
                if fault.times and fault.text in path and body == (not fault.status):
                    fault.times -= 1
                    return fault
        return None

    def _find(self, kind: str, name: str, token: str) -> _Repository:
        if token and token not in self.known | self.granted:
            raise Refusal(401, "", "Invalid credentials in Authorization header")
        if (found := self._repositories.get((kind, name))) is None:
            status = 404 if token else 401  # as the hub does, which may hide it
            raise Refusal(status, "RepoNotFound", "Repository not found")
        return found

    def _commit(self, repository: _Repository, revision: str) -> str:
        known = repository.branches | repository.tags
        commit = known.get(revision, revision)
        if commit not in repository.commits:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def _answer(self, found: Mapping[str, Any], token: str) -> Any:
        """Returns what the API says about a repository."""
        kind, name = found["kind"], found["name"]
        repository = self._find(kind, name, token)
        what, path = found["what"], found["path"]
        if what in ("preupload", "commit") and token not in self.granted:
            raise Refusal(403, "", "Forbidden: you need write access")
        if what == "preupload":
            self._commit(repository, unquote(found["revision"]))
            return {"files": [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(found["posted"])["files"]
            ]}  # fmt: skip
        if what == "commit":
            branch = unquote(found["revision"])
            old = repository.commits[self._commit(repository, branch)]
            new = _uploaded(found["posted"])
            commit = self.add(name, {**old, **new}, kind=kind, revision=branch)
            url = f"{self.endpoint}/{name}/commit/{commit}"
            return {"success": True, "commitOid": commit, "commitUrl": url}
        if what == "refs":
            return {
                group: [
                    {"name": ref, "ref": f"refs/{word}/{ref}", "targetCommit": commit}
                    for ref, commit in refs.items()
                ]
                for group, word, refs in (
                    ("branches", "heads", repository.branches),
                    ("tags", "tags", repository.tags),
                    ("converts", "convert", {}),
                )
            }
        commit = self._commit(repository, unquote(found["revision"] or "main"))
        files = repository.commits[commit]
        if what == "tree":
            return _tree(files, path or "", found["recursive"])
        if what == "paths-info":
            paths = _paths(found["posted"])
            return [x for x in _tree(files, "", True) if x["path"] in paths]
        return {
            **self._listed(kind, name),
            "sha": commit,
            "siblings": [{"rfilename": path} for path in files],
        }

    def _create(self, posted: bytes, token: str) -> tuple[int, dict[str, str]]:
        """Makes a repository with what every new one has; the status and answer."""
        asked = json.loads(posted)
        owner, name = asked["organization"], asked["name"]
        kind, name = f"{asked.get('type') or 'model'}s", f"{owner}/{name}"
        url = f"{self.endpoint}/{'datasets/' * (kind == 'datasets')}{name}"
        if (kind, name) in self._repositories:
            return 409, {"error": "You already created this repo", "url": url}
        if token not in self.granted:
            raise Refusal(403, "", "Forbidden: you may not create repositories")
        self.add(name, {".gitattributes": ""}, kind=kind)
        if asked.get("private") or asked.get("visibility") == "private":
            self.private.add(name)
        return 200, {"url": url}

    def _listed(self, kind: str, name: str) -> dict[str, Any]:
        gated = "manual" if name in self.gated else False
        owner = name.partition("/")[0]
        return {
            "_id": name,
            "id": name,
            "author": owner,
            "private": False,
            "disabled": False,
            "gated": gated,
            "lastModified": "2026-01-01T00:00:00.000Z",
            "createdAt": "2026-01-01T00:00:00.000Z",
            "downloads": 0,
            "likes": 0,
            "tags": [],
            **({"modelId": name} if kind == "models" else {}),
        }

    def _search(self, kind: str, query: Mapping[str, list[str]]) -> list[Any]:
        (text,) = query.get("search", [""])
        (author,) = query.get("author", [""])
        return [
            self._listed(kind, name)
            for kind_of, name in self._repositories
            if kind_of == kind
            and text.lower() in name.lower()
            and name.startswith(f"{author}/" if author else "")
        ]

    def _file(
        self, kind: str, name: str, revision: str, path: str, token: str
    ) -> tuple[str, bytes]:
        """Returns a file's commit and content."""
        repository = self._find(kind, name, token)
        if name in self.gated and token not in self.granted:
            say = f"Access to {kind[:-1]} {name} is restricted."
            raise Refusal(403 if token else 401, "GatedRepo", say)
        commit = self._commit(repository, revision)
        if path not in (files := repository.commits[commit]):
            raise Refusal(404, "EntryNotFound", "Entry not found", commit)
        return commit, files[path]


def _uploaded(posted: bytes) -> dict[str, bytes]:
    """Returns the files of a commit's lines of JSON."""
    lines = [json.loads(line) for line in posted.splitlines()]
    files = [line["value"] for line in lines if line["key"] == "file"]
    return {file["path"]: base64.b64decode(file["content"]) for file in files}


def _tree(files: Mapping[str, bytes], folder: str, recursive: bool) -> list[Any]:
    """Returns the entries of a folder, as the API lists them."""
    prefix = f"{folder}/" if folder else ""
    entries: dict[str, Any] = {}
    for path, content in files.items():
        if not path.startswith(prefix):
            continue
        *folders, _ = path.removeprefix(prefix).split("/")
        depths = len(folders) if recursive else min(1, len(folders))
        for depth in range(1, 1 + depths):
            inner = prefix + "/".join(folders[:depth])
            oid = hashlib.sha1(inner.encode()).hexdigest()
            entries[inner] = {"type": "directory", "path": inner, "oid": oid, "size": 0}
        if recursive or not folders:
            oid, size = etag(content), len(content)
            entries[path] = {"type": "file", "path": path, "oid": oid, "size": size}
    if folder and not entries:
        raise Refusal(404, "EntryNotFound", f"{folder} does not exist")
    return list(entries.values())


def _paths(posted: bytes) -> list[str]:
    """Returns the paths that a request names, as a form or as JSON."""
    if posted.startswith(b"{"):
        return json.loads(posted)["paths"]
    return parse_qs(posted.decode()).get("paths", [])
