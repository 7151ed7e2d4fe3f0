"""Runs the checks of a client, and prints the name of each check that passes.

Each program beside this file has the checks of one client, and is run as `python PROGRAM URL MODEL`. It runs in the
client's own environment, so this file is the only module of the repository that it imports.
"""

import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

URL, MODEL = sys.argv[1:3]
QUESTION = "How do I use the with statement?"
_EXAMPLES = Path(__file__).parents[3] / "examples"
SHAPES = b64encode((_EXAMPLES / "shapes.png").read_bytes()).decode()  # a red circle, and right of it a blue square


def run(*checks: Callable[[], None]) -> None:
    """Run the checks. The first one that fails ends the program."""
    for check in checks:
        check()
        print(f"passed: {check.__name__}", flush=True)


class _Proxy(BaseHTTPRequestHandler):
    """Answers the first request itself with 503, and passes the others on."""

    num_requests = 0

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        _Proxy.num_requests += 1
        if _Proxy.num_requests == 1:
            self.send_error(503)
            return
        request = Request(f"http://{urlsplit(URL).netloc}{self.path}", body, dict(self.headers))
        with urlopen(request) as answer:
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.end_headers()
            self.wfile.write(answer.read())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def overloaded_at_first() -> Iterator[str]:
    """Yield a URL in place of `URL` whose first request gets 503. Fails unless the client has sent a second one."""
    _Proxy.num_requests = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), _Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}{urlsplit(URL).path}"
        server.shutdown()
    assert _Proxy.num_requests == 2, f"{_Proxy.num_requests} requests were sent"
