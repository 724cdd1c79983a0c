"""A model hub on the loopback: enough of the Hugging Face hub's HTTP for its own client to look up and download."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeAlias
from urllib.parse import unquote

Files: TypeAlias = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Repository:
    """`commits` by revision name, each with its files; `main` is the default. A gated one shows itself but not them."""

    commits: Mapping[str, Files]
    gated: bool = False

    def commit(self, revision: str) -> str | None:
        """The commit that a branch, tag or commit names."""
        known = {hashlib.sha1(name.encode()).hexdigest(): name for name in self.commits}
        return revision if revision in known else next((c for c, name in known.items() if name == revision), None)

    def files(self, commit: str) -> Files:
        """What the commit holds."""
        return next(f for name, f in self.commits.items() if hashlib.sha1(name.encode()).hexdigest() == commit)


@dataclass(slots=True)
class Hub:
    """`url`, and the paths asked for so far."""

    url: str
    asked: list[str] = field(default_factory=list)


@contextlib.contextmanager
def start_hub(repositories: Mapping[str, Repository]) -> Iterator[Hub]:
    """Serve the repositories by `owner/name` on a free port until the block ends."""
    hub = Hub("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            parts = unquote(self.path).split("?")[0].strip("/").split("/")
            api = parts[:2] == ["api", "models"]
            owner, name, *rest = parts[2:] if api else parts
            repository = repositories.get(f"{owner}/{name}")
            if repository is None:
                return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            commit = repository.commit(rest[1] if len(rest) > 1 else "main")
            if commit is None:
                return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            if api and rest[:1] == ["tree"]:
                return self.list(repository.files(commit))
            if api:
                return self.describe(f"{owner}/{name}", commit, repository.files(commit))
            if repository.gated:
                return self.answer(401, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
            return self.send(commit, repository.files(commit).get("/".join(rest[2:])))

        do_HEAD = do_GET

        def describe(self, name: str, commit: str, files: Files) -> None:
            entry = {"id": name, "sha": commit, "siblings": [{"rfilename": f} for f in files]}
            self.answer(200, json.dumps(entry).encode(), {"Content-Type": "application/json"})

        def list(self, files: Files) -> None:
            tree = [
                {"type": "file", "path": f, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                for f, b in files.items()
            ]
            self.answer(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})

        def send(self, commit: str, body: bytes | None) -> None:
            if body is None:
                return self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return self.answer(200, body, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'})

        def answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
