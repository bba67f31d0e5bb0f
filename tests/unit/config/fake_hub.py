"""A hub of models on loopback: the part of the Hugging Face hub's HTTP API that downloads use, and its misfortunes."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/(?P<what>revision|tree)/(?P<revision>[^/]+))?")
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


@dataclass
class Hub:
    """What is served. `commits`: files by commit, for each repository; `refs`: commits by branch or tag.

    `breaks`: paths whose next transfer ends early. `lies`: paths whose content is not what its checksum says.
    `declared`: sizes that are stated and not kept. `requests`: every (method, path, range) that came.
    """

    commits: dict[str, dict[str, Path]]
    refs: dict[str, str]
    repo: str = "deep/tiny"
    token: str | None = None
    gated: bool = False
    url: str = ""
    breaks: set[str] = field(default_factory=set)
    lies: set[str] = field(default_factory=set)
    declared: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)

    def of(self, revision: str | None) -> str | None:
        """The commit that a revision means."""
        name = revision or "main"
        return name if name in self.commits else self.refs.get(name)


def checksum(content: bytes, *, large: bool) -> str:
    """As the hub states it: SHA-256 of large files, git's blob SHA-1 of small ones."""
    return (
        hashlib.sha256(content).hexdigest()
        if large
        else hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    )


def is_large(path: str) -> bool:
    return path.endswith(".safetensors")


class Handler(BaseHTTPRequestHandler):
    """Answers for the `hub` of its subclass."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""

    def answer(self, code: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def refuse(self, code: int, error: str) -> None:
        self.answer(code, b"{}", {"X-Error-Code": error, "Content-Type": "application/json"})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers["Range"]))
        asked = _API.fullmatch(path) or _FILE.fullmatch(path)
        allowed = self.hub.token is None or self.headers["Authorization"] == f"Bearer {self.hub.token}"
        if asked is None or asked["repo"] != self.hub.repo or not allowed:
            return self.refuse(403, "GatedRepo") if self.hub.gated else self.refuse(401, "RepoNotFound")
        commit = self.hub.of(asked["revision"])
        if commit is None:
            return self.refuse(404, "RevisionNotFound")
        files = self.hub.commits[commit]
        if "path" in asked.groupdict():
            return self.send_file(asked["path"], files, commit)
        if asked["what"] == "tree":
            content: object = [self.entry(name, files[name].read_bytes()) for name in files]
        else:
            content = {"id": self.hub.repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
        return self.answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def entry(self, path: str, content: bytes) -> dict[str, object]:
        size = self.hub.declared.get(path, len(content))
        plain = {"type": "file", "path": path, "size": size, "oid": checksum(content, large=False)}
        if not is_large(path):
            return plain
        return plain | {"lfs": {"oid": checksum(content, large=True), "size": size, "pointerSize": 130}}

    def send_file(self, path: str, files: dict[str, Path], commit: str) -> None:
        if path not in files:
            return self.refuse(404, "EntryNotFound")
        content = files[path].read_bytes()
        etag = checksum(content, large=is_large(path))
        if path in self.hub.lies:
            content = content[:-1] + bytes([content[-1] ^ 1])
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if is_large(path):
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content))}
        begin = int(self.headers["Range"].removeprefix("bytes=").rstrip("-")) if self.headers["Range"] else 0
        headers |= {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"} if begin else {}
        if self.command == "GET" and path in self.hub.breaks:
            self.hub.breaks.discard(path)
            self.send_response(200)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content[:-100_000])
            self.wfile.flush()
            self.close_connection = True
            return None
        return self.answer(206 if begin else 200, content[begin:], headers)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub on a free port of loopback, its address in `url`."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
