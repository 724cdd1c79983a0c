"""A model hub on the loopback: enough of the Hugging Face hub's HTTP for its own client to look up and download."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

Files: TypeAlias = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Repository:
    """`commits` by revision name, each with its files; `main` is the default. A gated one shows itself but not them."""

    commits: Mapping[str, Files]
    gated: bool = False

    def commit(self, revision: str) -> str | None:
        """The commit that a branch, tag or commit names."""
        by_commit = {digest(name.encode()): name for name in self.commits}
        return revision if revision in by_commit else next((c for c, n in by_commit.items() if n == revision), None)

    def files(self, commit: str) -> Files:
        """What the commit holds."""
        return next(files for name, files in self.commits.items() if digest(name.encode()) == commit)


def digest(content: bytes) -> str:
    """Forty hexadecimal digits, as commits and blobs have."""
    return hashlib.sha256(content).hexdigest()[:40]


class Hub(ThreadingHTTPServer):
    """Serves `repositories` by `owner/name`; `asked` are the requests so far."""

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Repository]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        owner, name, what, revision, *path = [*(parts[2:] if api else parts), "", "", "", ""]
        repository = self.server.repositories.get(f"{owner}/{name}")
        commit = repository.commit(revision or "main") if repository else None
        if repository is None or commit is None:
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound" if repository else "RepoNotFound"})
        elif api and what == "tree":
            self.answer(200, json.dumps(_tree(repository.files(commit))).encode())
        elif api:
            entry = {"id": f"{owner}/{name}", "sha": commit, "siblings": _siblings(repository.files(commit))}
            self.answer(200, json.dumps(entry).encode())
        elif repository.gated:
            self.answer(401, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        else:
            self.send(commit, repository.files(commit).get("/".join(filter(None, path))))

    def do_HEAD(self) -> None:
        self.do_GET()

    def send(self, commit: str, body: bytes | None) -> None:
        if body is None:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        else:
            self.answer(200, body, {"X-Repo-Commit": commit, "ETag": f'"{digest(body)}"'})

    def answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def _tree(files: Files) -> list[dict[str, object]]:
    return [{"type": "file", "path": name, "size": len(body), "oid": digest(body)} for name, body in files.items()]


def _siblings(files: Files) -> list[dict[str, str]]:
    return [{"rfilename": name} for name in files]


@contextlib.contextmanager
def start_hub(repositories: Mapping[str, Repository]) -> Iterator[Hub]:
    """The hub on a free port, until the block ends."""
    with Hub(repositories) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            hub.shutdown()
