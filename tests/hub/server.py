"""A small hub over HTTP, with the routes that huggingface_hub needs: listings, and files by ranges."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?")
FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """A repository: files by path, by revision. With a `token`, only requests that carry it may read the
    files; `gated` says why others may not."""

    revisions: dict[str, dict[str, bytes]]
    token: str | None = None
    gated: bool = False

    def commit(self, revision: str) -> str | None:
        """Return the commit of a branch, tag or commit."""
        commits = {name: hashlib.sha1(name.encode()).hexdigest() for name in self.revisions}
        return commits.get(revision) or (revision if revision in commits.values() else None)

    def files(self, revision: str) -> dict[str, bytes]:
        commit = self.commit(revision)
        return next(files for name, files in self.revisions.items() if self.commit(name) == commit)


@dataclass
class Request:
    """A request that the hub has answered."""

    method: str
    path: str
    range: str | None
    authorization: str | None


@dataclass
class FakeHub:
    """A hub that serves `repositories`. The first transfer of a file in `breaks` ends after that number of
    bytes. A transfer of a file in `stalls` waits there until `release` is set. `sizes` are reported in place
    of the files' true sizes."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    breaks: dict[str, int] = field(default_factory=dict)
    stalls: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    release: threading.Event = field(default_factory=threading.Event)
    stalled: threading.Event = field(default_factory=threading.Event)
    requests: list[Request] = field(default_factory=list)
    url: str = ""

    def transfers(self, file: str) -> list[Request]:
        """Return the requests for the content of a file."""
        return [each for each in self.requests if each.method == "GET" and each.path.endswith(f"/{file}")]


def folder_content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve `hub` on a port of this machine, which its `url` names."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(hub, self)

        def do_HEAD(self) -> None:
            answer(hub, self)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        hub.release.set()
        server.shutdown()
        server.server_close()
        thread.join()


def answer(hub: FakeHub, request: BaseHTTPRequestHandler) -> None:
    path = urlsplit(request.path).path
    token, ranged = request.headers.get("Authorization"), request.headers.get("Range")
    hub.requests.append(Request(request.command, path, ranged, token))
    listing, file = API.fullmatch(path), FILE.fullmatch(path)
    match = listing or file
    repository = hub.repositories.get(match[1]) if match else None
    if match is None or repository is None:
        return refuse(request, 401 if token is None else 404, "RepoNotFound")
    if repository.token is not None and token != f"Bearer {repository.token}":
        status = 401 if token is None else 403
        return refuse(request, status, "GatedRepo" if repository.gated else "RepoNotFound")
    revision = (listing[3] if listing else match[2]) or "main"
    commit = repository.commit(revision)
    if commit is None:
        return refuse(request, 404, "RevisionNotFound")
    files = repository.files(revision)
    if listing:
        return send_json(request, tree(files) if listing[2] == "tree" else info(match[1], commit, files))
    if match[3] not in files:
        return refuse(request, 404, "EntryNotFound")
    return send_file(hub, request, match[3], files[match[3]], commit)


def info(name: str, commit: str, files: dict[str, bytes]) -> object:
    return {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files]}


def tree(files: dict[str, bytes]) -> object:
    return [
        {"type": "file", "path": path, "size": len(content), "oid": etag(content)}
        for path, content in files.items()
    ]


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def refuse(request: BaseHTTPRequestHandler, status: int, code: str) -> None:
    request.send_response(status)
    request.send_header("X-Error-Code", code)
    request.send_header("Content-Length", "0")
    request.end_headers()


def send_json(request: BaseHTTPRequestHandler, value: object) -> None:
    body = json.dumps(value).encode()
    request.send_response(200)
    request.send_header("Content-Type", "application/json")
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)


def send_file(hub: FakeHub, request: BaseHTTPRequestHandler, name: str, content: bytes, commit: str) -> None:
    ranged = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range") or "")
    start = int(ranged[1]) if ranged else 0
    request.send_response(206 if ranged else 200)
    request.send_header("ETag", f'"{etag(content)}"')
    request.send_header("X-Repo-Commit", commit)
    request.send_header("Accept-Ranges", "bytes")
    request.send_header("Content-Length", str(hub.sizes.get(name, len(content)) - start))
    if ranged:
        request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
    request.end_headers()
    if request.command == "HEAD":
        return
    if name in hub.breaks:
        request.wfile.write(content[start : start + hub.breaks.pop(name)])
        request.wfile.flush()
        request.connection.close()
        request.close_connection = True
        return
    if name in hub.stalls:
        request.wfile.write(content[start : hub.stalls[name]])
        request.wfile.flush()
        hub.stalled.set()
        hub.release.wait()
        start = hub.stalls[name]
    try:
        request.wfile.write(content[start:])
    except OSError:
        request.close_connection = True
