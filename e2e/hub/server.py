"""The hub's HTTP side: model info, file heads and bytes, errors with the codes that huggingface_hub tells apart.

`Faults` makes the hub misbehave in ways that a fetch must survive: wrong bytes, slow answers, a cut connection.
"""

import gzip
import json
import os
import re
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from e2e.hub.repository import Repository, Revision, StoredFile

_INFO = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?")
_TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_BLOCK_BYTES = 16 * 1024
_READ_SECONDS = 0.5


@dataclass(frozen=True)
class Faults:
    """The faults of a hub that misbehaves. Names are file names, in any repository, except in `gated`."""

    corrupt: frozenset[str] = frozenset()  # one bit of their bytes is wrong; digests are those of the right ones
    bytes_per_second: float | None = None
    gated: frozenset[str] = frozenset()  # repositories whose terms nobody here has accepted
    repeated: frozenset[str] = frozenset()  # their bytes come twice over
    short: frozenset[str] = frozenset()  # their second half never comes, and no header says so
    cut: set[str] = field(default_factory=set)  # the connection of their next answer is reset in its middle
    storage: str | None = None  # where another hub runs, to which every request for a file is redirected
    compressed: bool = False  # descriptions come as gzip, whatever was asked for
    info: Mapping[str, object] = field(default_factory=dict)  # fields that replace the true ones in every description


@dataclass(frozen=True)
class HubRequest:
    """A request that the hub got."""

    method: str
    path: str
    range: str | None
    authorization: str | None


class Hub(ThreadingHTTPServer):
    """Serves a folder. `token`: what `Authorization: Bearer` must say, for everything."""

    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], root: Path, token: str | None = None, faults: Faults | None = None
    ) -> None:
        super().__init__(address, _Handler)
        self.root = root
        self.token = token
        self.faults = faults or Faults()
        self.requests: list[HubRequest] = []

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"


class _Refused(Exception):
    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        pass  # `requests` tells more

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        request = HubRequest(self.command, path, self.headers.get("Range"), self.headers.get("Authorization"))
        self.server.requests.append(request)
        print(f"event=request method={request.method} path={path} range={request.range}", flush=True)
        try:
            if match := _TREE.fullmatch(path):
                self._send_json(_tree(self._revision(match[1], match[2])))
            elif match := _INFO.fullmatch(path):
                with_blobs = "blobs" in parse_qs(url.query)
                info = _info(match[1], self._revision(match[1], match[2] or "main"), with_blobs)
                self._send_json(info | self.server.faults.info)
            elif match := _RESOLVE.fullmatch(path):
                self._send_file(self._revision(match[1], match[2]), match[3])
            else:
                raise _Refused(404, "Not Found")
        except _Refused as refused:
            self._send_error(refused)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client left, as a killed fetch does

    def _revision(self, repository_id: str, name: str) -> Revision:
        """Find the revision.

        Without the right token the answer is that of a repository that does not exist, as on the real hub.
        """
        repository = Repository(self.server.root, repository_id)
        token = self.server.token
        if token is not None and self.headers.get("Authorization") != f"Bearer {token}":
            raise _Refused(401, "Invalid username or password.", "RepoNotFound")
        if not repository.exists:
            raise _Refused(404, "Repository not found", "RepoNotFound")
        if repository_id in self.server.faults.gated:
            raise _Refused(403, f"Access to model {repository_id} is restricted.", "GatedRepo")
        revision = repository.find(name)
        if revision is None:
            raise _Refused(404, f"Invalid rev id: {name}", "RevisionNotFound")
        return revision

    def _redirect(self, location: str) -> None:
        self.send_response(302)
        self.send_header("Location", location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_file(self, revision: Revision, name: str) -> None:
        if self.server.faults.storage is not None:
            self._redirect(self.server.faults.storage + self.path)
            return
        file = revision.find(name)
        if file is None:
            raise _Refused(404, "Entry not found", "EntryNotFound")
        content = file.path.read_bytes()
        if name in self.server.faults.corrupt:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if name in self.server.faults.repeated:
            content += content
        if name in self.server.faults.short:
            content = content[: len(content) // 2]
        start, end = self._range(len(content))
        self.send_response(206 if self.headers.get("Range") else 200)
        if self.headers.get("Range"):
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.send_header("Content-Length", str(end - start))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{file.etag}"')
        self.send_header("X-Repo-Commit", revision.commit)
        if file.is_large:
            self.send_header("X-Linked-Etag", f'"{file.etag}"')
            self.send_header("X-Linked-Size", str(file.size))
        self.end_headers()
        if self.command == "GET" and name in self.server.faults.cut:
            self.server.faults.cut.remove(name)
            self._send_slowly(content[start : (start + end) // 2])
            self._reset()
        elif self.command == "GET":
            self._send_slowly(content[start:end])

    def _reset(self) -> None:
        time.sleep(_READ_SECONDS)  # what the client has not read yet is lost with a reset
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())
        self.close_connection = True

    def _range(self, size: int) -> tuple[int, int]:
        span = self.headers.get("Range")
        match = _RANGE.fullmatch(span) if span else None
        if match is None:
            return 0, size
        start, end = int(match[1]), min(size, int(match[2]) + 1 if match[2] else size)
        if start >= size:
            raise _Refused(416, "Requested range not satisfiable")
        return start, end

    def _send_slowly(self, content: bytes) -> None:
        rate = self.server.faults.bytes_per_second
        for start in range(0, len(content), _BLOCK_BYTES):
            block = content[start : start + _BLOCK_BYTES]
            self.wfile.write(block)
            if rate is not None:
                time.sleep(len(block) / rate)

    def _send_json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        if self.server.faults.compressed:
            body = gzip.compress(body)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _send_error(self, refused: _Refused) -> None:
        body = json.dumps({"error": str(refused)}).encode()
        self.send_response(refused.status)
        if refused.code is not None:
            self.send_header("X-Error-Code", refused.code)
        self.send_header("X-Error-Message", str(refused))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _info(repository_id: str, revision: Revision, with_blobs: bool) -> dict[str, object]:
    return {
        "_id": revision.commit[:24],
        "id": repository_id,
        "modelId": repository_id,
        "sha": revision.commit,
        "private": False,
        "gated": False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
        "library_name": "transformers",
        "siblings": [_sibling(file, with_blobs) for file in revision.files],
    }


def _sibling(file: StoredFile, with_blobs: bool) -> dict[str, object]:
    if not with_blobs:
        return {"rfilename": file.name}
    fields: dict[str, object] = {"rfilename": file.name, "blobId": file.blob_id, "size": file.size}
    if file.is_large:
        fields["lfs"] = {"sha256": file.sha256, "size": file.size, "pointerSize": len(file.pointer)}
    return fields


def _tree(revision: Revision) -> list[dict[str, object]]:
    return [_tree_entry(file) for file in revision.files]


def _tree_entry(file: StoredFile) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "oid": file.blob_id, "size": file.size, "path": file.name}
    if file.is_large:
        entry["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": len(file.pointer)}
    return entry
