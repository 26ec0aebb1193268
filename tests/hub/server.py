"""A small Hub on this machine: speaks what the real client asks, keeps what is pushed, fails where it is told to.

Endpoints: resolve (with ETag, X-Repo-Commit and, for weights, the X-Linked headers and a redirect to a store that
answers ranges), model info, trees, paths, search, creation of repositories, pre-upload, LFS uploads, commits.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

DATE = "2026-01-01T00:00:00.000Z"
LARGE = (".safetensors",)


@dataclass(slots=True)
class Repository:
    """What one repository holds: files by commit, the commits of branches and tags, and its tags for search."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    is_private: bool = False
    failure: int | None = None

    def add(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Make a commit and move the branch to it."""
        text = "".join(f"{name}:{hashlib.sha256(data).hexdigest()}" for name, data in sorted(files.items()))
        commit = hashlib.sha1(f"{len(self.commits)} {text}".encode()).hexdigest()
        self.commits[commit] = files
        self.refs[branch] = commit
        return commit


class SmallHub:
    """The state of the Hub; tests change it while it runs.

    Attributes:
        repositories: By id.
        requests: "METHOD path" of every request, in order, with the Range header if there was one.
        cuts: Digests of weights whose first answer breaks off half-way.
        swaps: Digests of weights that are answered with other bytes of the same length.
        short: Digests of weights that are answered with fewer bytes, as if they were all.
        tokens: Those that may see private repositories and write.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.cuts: set[str] = set()
        self.swaps: set[str] = set()
        self.short: set[str] = set()
        self.tokens = {"good"}
        self.store: dict[str, bytes] = {}
        self.address = ""
        # Another host, as far as the client can tell.
        self.store_address = ""

    def add(self, repo_id: str, files: dict[str, bytes], *, tags: tuple[str, ...] = (), branch: str = "main") -> str:
        """Publish files and return the commit."""
        repository = self.repositories.setdefault(repo_id, Repository())
        repository.tags += tags
        return repository.add(files, branch)


@contextmanager
def running() -> Iterator[SmallHub]:
    """Serve a new Hub on a free port."""
    hub = SmallHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    hub.store_address = f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _FailureError(Exception):
    def __init__(self, status: int, code: str | None = None) -> None:
        super().__init__(status)
        self.status = status
        self.code = code


class _Handler(BaseHTTPRequestHandler):
    hub: SmallHub

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    # ---- routes --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        path, query = unquote(parts.path), parse_qs(parts.query)
        asked = self.headers.get("Range")
        self.hub.requests.append(f"{self.command} {path}" + (f" {asked}" if asked else ""))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        routes = (
            (r"/store/(\w+)", self._stored),
            (r"/api/repos/create", self._create),
            (r"/api/models", self._search),
            (r"/api/validate-yaml", self._validate),
            (r"/api/models/([^/]+/[^/]+)", self._overview),
            (r"/api/models/(.+?)/(revision|tree|paths-info|preupload|commit)/([^/]+)(?:/.*)?", self._api),
            (r"/(.+?)\.git/info/lfs/objects/batch", self._lfs),
            (r"/(.+?)/resolve/([^/]+)/(.+)", self._resolve),
        )
        try:
            for pattern, route in routes:
                if match := re.fullmatch(pattern, path):
                    route(*match.groups(), query=query, body=body)  # type: ignore[operator]
                    return
            raise _FailureError(404)
        except _FailureError as failure:
            headers = {"X-Error-Code": failure.code} if failure.code else {}
            self._answer(failure.status, b'{"error": "no"}', headers)

    def _repository(self, repo_id: str) -> Repository:
        repository = self.hub.repositories.get(repo_id)
        if repository is None or (repository.is_private and not self._is_known()):
            raise _FailureError(401, "RepoNotFound")
        if repository.failure is not None:
            raise _FailureError(repository.failure, "GatedRepo" if repository.failure == 403 else None)
        return repository

    def _is_known(self) -> bool:
        return self.headers.get("Authorization", "").removeprefix("Bearer ") in self.hub.tokens

    def _commit(self, repository: Repository, revision: str) -> str:
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            raise _FailureError(404, "RevisionNotFound")
        return commit

    def _resolve(self, repo_id: str, revision: str, name: str, *, query: Any, body: bytes) -> None:
        repository = self._repository(repo_id)
        commit = self._commit(repository, revision)
        data = repository.commits[commit].get(name)
        if data is None:
            raise _FailureError(404, "EntryNotFound")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        if not name.endswith(LARGE):
            self._answer(200, data, headers)
            return
        digest = hashlib.sha256(data).hexdigest()
        self.hub.store[digest] = data
        linked = {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        self._answer(302, b"", headers | linked | {"Location": f"{self.hub.store_address}/store/{digest}"})

    def _stored(self, digest: str, *, query: Any, body: bytes) -> None:
        if self.command == "PUT":
            assert hashlib.sha256(body).hexdigest() == digest
            self.hub.store[digest] = body
            self._answer(200, b"", {})
            return
        data = self.hub.store[digest]
        if digest in self.hub.swaps:
            data = data[:-8] + bytes(8)
        if digest in self.hub.short:
            data = data[: len(data) // 2]
        headers, status, start = {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"}, 200, 0
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            start, status = int(match.group(1)), 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        is_cut = digest in self.hub.cuts and start == 0 and self.command == "GET"
        self.hub.cuts -= {digest} if is_cut else set()
        self._answer(status, data[start:], headers, num_sent=len(data) // 2 if is_cut else None)

    def _api(self, repo_id: str, kind: str, revision: str, *, query: dict[str, list[str]], body: bytes) -> None:
        repository = self._repository(repo_id)
        if kind in ("preupload", "commit"):
            self._write(repo_id, repository, kind, body)
            return
        commit = self._commit(repository, revision)
        files = repository.commits[commit]
        entries = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in files.items()
        ]
        if kind == "paths-info":
            wanted = parse_qs(body.decode()).get("paths") or json.loads(body or b"{}").get("paths", [])
            self._json([entry for entry in entries if entry["path"] in wanted])
        elif kind == "tree":
            self._json(entries)
        else:
            self._json(self._info(repo_id, repository) | {"sha": commit})

    def _overview(self, repo_id: str, *, query: Any, body: bytes) -> None:
        self._json(self._info(repo_id, self._repository(repo_id)))

    def _validate(self, *, query: Any, body: bytes) -> None:
        self._json({"errors": [], "warnings": []})

    def _info(self, repo_id: str, repository: Repository) -> dict[str, Any]:
        files = repository.commits[repository.refs["main"]] if repository.refs else {}
        return {
            "_id": "0",
            "id": repo_id,
            "modelId": repo_id,
            "sha": repository.refs.get("main"),
            "private": repository.is_private,
            "tags": repository.tags,
            "downloads": 1,
            "createdAt": DATE,
            "lastModified": DATE,
            "siblings": [{"rfilename": name} for name in files],
        }

    def _search(self, *, query: dict[str, list[str]], body: bytes) -> None:
        wanted = {tag for value in query.get("filter", []) for tag in value.split(",")}
        found = [
            self._info(repo_id, repository)
            for repo_id, repository in self.hub.repositories.items()
            if wanted <= set(repository.tags)
        ]
        self._json(found[: int(query.get("limit", ["100"])[0])])

    # ---- writing -------------------------------------------------------------------------------------------------

    def _create(self, *, query: Any, body: bytes) -> None:
        if not self._is_known():
            raise _FailureError(401)
        values = json.loads(body)
        repo_id = "/".join(part for part in (values.get("organization"), values["name"]) if part)
        repository = self.hub.repositories.get(repo_id)
        if repository is not None:
            self._json({"url": f"{self.hub.address}/{repo_id}"}, status=409)
            return
        is_private = values.get("private") is True or values.get("visibility") == "private"
        self.hub.repositories[repo_id] = Repository(is_private=is_private)
        self._json({"url": f"{self.hub.address}/{repo_id}", "name": repo_id})

    def _write(self, repo_id: str, repository: Repository, kind: str, body: bytes) -> None:
        if not self._is_known():
            raise _FailureError(401)
        if kind == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = ["lfs" if name.endswith(LARGE) else "regular" for name in names]
            answer = [
                {"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": None}
                for name, mode in zip(names, modes, strict=True)
            ]
            self._json({"files": answer})
            return
        files = dict(repository.commits[repository.refs["main"]]) if repository.refs else {}
        for line in body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                repository.messages.append(value["summary"])
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.store[value["oid"]]
        commit = repository.add(files)
        self._json({"success": True, "commitOid": commit, "commitUrl": f"{self.hub.address}/{repo_id}/commit/{commit}"})

    def _lfs(self, repo_id: str, *, query: Any, body: bytes) -> None:
        objects = [
            {
                "oid": item["oid"],
                "size": item["size"],
                "actions": {"upload": {"href": f"{self.hub.address}/store/{item['oid']}", "header": {}}},
            }
            for item in json.loads(body)["objects"]
        ]
        self._json({"transfer": "basic", "objects": objects})

    # ---- answers -------------------------------------------------------------------------------------------------

    def _json(self, value: Any, status: int = 200) -> None:
        self._answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str], num_sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:num_sent])
