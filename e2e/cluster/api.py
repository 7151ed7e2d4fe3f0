"""The few calls to the API server that are necessary to set up a cluster, with a kubeconfig's certificates.

Used by this package and its fixtures. Not a client library: no retries, no watches, no types.
"""

import base64
import http.client
import json
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Json = dict[str, Any]


class ApiError(RuntimeError):
    """The API server returned an error. `code` is the HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


def read_kubeconfig(path: Path) -> tuple[str, ssl.SSLContext]:
    """Return the API server's URL and the TLS context of the kubeconfig's user."""
    import yaml  # here, so that `tools` works before the virtual environment exists

    config = yaml.safe_load(path.read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    tls = ssl.create_default_context(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
    with tempfile.NamedTemporaryFile(suffix=".pem") as pair:
        for field in ("client-certificate-data", "client-key-data"):
            pair.write(base64.b64decode(user[field]))
        pair.flush()
        tls.load_cert_chain(pair.name)
    return cluster["server"], tls


class _Connection(http.client.HTTPSConnection):
    """A connection that stays open until its owner ends. Uses no proxy, because the API server is on this machine."""

    def exchange(self, verb: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        """Send a request.

        Returns status and content of the answer. Uses a new connection if the server has closed the old one.
        """
        is_kept = self.sock is not None
        try:
            self.request(verb, path, body, headers)
            with self.getresponse() as response:
                return response.status, response.read()
        except BaseException as error:
            self.close()
            if is_kept and isinstance(error, ConnectionError | ssl.SSLError):
                return self.exchange(verb, path, body, headers)
            raise

    def __del__(self) -> None:
        self.close()


class Api:
    """Calls the API server as the user of a kubeconfig, written by `certificates.write_kubeconfig` or by kind."""

    def __init__(self, kubeconfig: Path) -> None:
        server, self._tls = read_kubeconfig(kubeconfig)
        self._address = urlsplit(server).netloc
        self._kept = threading.local()

    def get(self, path: str) -> Json:
        return self.call("GET", path)

    def create(self, path: str, body: Json) -> Json:
        return self.call("POST", path, body)

    def delete(self, path: str) -> Json:
        return self.call("DELETE", path)

    def apply(self, path: str, body: Json) -> Json:
        """Apply an object with server-side apply. `path` is the object's own path."""
        path += "?fieldManager=conveyor-cluster&force=true"
        return self.call("PATCH", path, body, "application/apply-patch+yaml")

    def patch_json(self, path: str, operations: list[Json]) -> Json:
        return self.call("PATCH", path, operations, "application/json-patch+json")

    def call(self, verb: str, path: str, body: Any = None, content_type: str = "application/json") -> Json:
        content = self.send(verb, path, None if body is None else json.dumps(body).encode(), content_type)
        return json.loads(content) if content.startswith(b"{") else {}

    def send(self, verb: str, path: str, body: bytes | None = None, content_type: str = "application/json") -> bytes:
        """Send a call like `call`, but with bodies as bytes, so that no JSON is parsed or written here."""
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        status, content = self._connection().exchange(verb, path, body, headers)
        if status >= 300:
            raise ApiError(status, content.decode(errors="replace"))
        return content

    def _connection(self) -> _Connection:
        """Return the calling thread's connection, which is kept: a handshake costs more than most calls."""
        if not hasattr(self._kept, "connection"):
            self._kept.connection = _Connection(self._address, timeout=120, context=self._tls)
        connection: _Connection = self._kept.connection
        return connection

    def reachable(self, path: str) -> bool:
        """Return whether a GET of `path` succeeds. The answer is not parsed, because it may be too deep."""
        try:
            self.send("GET", path)
        except (ApiError, OSError):
            return False
        return True


def pauses() -> Iterator[float]:
    """Yield increasing pauses in seconds, so that quick events are seen soon and slow ones are not polled too often."""
    pause = 0.02
    while True:
        yield pause
        pause = min(1.5 * pause, 0.2)


def wait_until(
    what: str, ready: Callable[[], object], check: Callable[[], None] = lambda: None, timeout_seconds: float = 240
) -> None:
    """Poll `ready` until it is true. `check` may raise before the timeout, for example if a process has ended."""
    deadline, wait = time.monotonic() + timeout_seconds, pauses()
    while not ready():
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not ready after {timeout_seconds:.0f} s")
        time.sleep(next(wait))
