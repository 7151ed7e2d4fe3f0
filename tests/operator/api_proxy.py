"""A real HTTP proxy in front of the real API server. It records every call and injects faults.

Runs in a thread of its own. The operator under test gets a kubeconfig that names the proxy; the proxy calls the API
server with the control plane's admin certificate. What it records is what went over the wire, Kopf's watches
included, in the words of RBAC.
"""

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from weakref import WeakSet

import yaml
from aiohttp import ClientSession, ClientTimeout, web
from tests.connector import ApiServerConnector

from conveyor_http.server import open_port
from conveyor_process.listening import close_port
from e2e.cluster.api import read_kubeconfig

_HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "host"}
_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>[^/]+)"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/))?/(?P<resource>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<subresource>[^/]+))?"
)
CUT, TORN, ENDLESS, SLOW = 0, -1, -2, -3
"""Instead of a status. CUT: the connection ends. TORN: it ends in the middle of what comes next from the API server.
ENDLESS: nothing comes. SLOW: the second half of what comes next from the API server takes a second."""
_OF_CONTENT = (TORN, SLOW)
_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True, slots=True)
class Call:
    """A call in the terms of RBAC."""

    verb: str
    group: str
    resource: str
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    status: int = 0
    at: float = 0.0
    """Seconds of a monotonic clock."""

    @property
    def is_write(self) -> bool:
        return self.verb not in ("get", "list", "watch")


@dataclass(slots=True)
class Fault:
    """A fault: the proxy answers `times` calls that `matches` instead of the API server.

    That a watch's version is gone is told as its API does, in the stream.
    """

    matches: Callable[[Call], bool]
    status: int
    """An HTTP status, or CUT, TORN, ENDLESS or SLOW."""
    times: int
    headers: dict[str, str] = field(default_factory=dict)
    hits: int = 0


class ApiProxy:
    """`url` and `kubeconfig` are valid within `running`."""

    def __init__(self, kubeconfig: Path) -> None:
        self._server, self._tls = read_kubeconfig(kubeconfig)
        self._thread = threading.Thread(target=self._serve, name="api proxy", daemon=True)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self.calls: list[Call] = []
        self.faults: list[Fault] = []
        self.before: Callable[[Call], None] = lambda call: None
        """Called for every call before it is passed on, in the proxy's thread; what it raises cuts the connection."""
        self.severed = False
        """While true, nobody gets through."""
        self.delay_seconds = 0.0
        """How long each call waits before it is passed on."""
        self.num_cut = 0
        """Requests that got no answer."""
        self._open: set[asyncio.Transport] = set()
        self._known: WeakSet[asyncio.Transport] = WeakSet()
        self._lost: WeakSet[asyncio.Transport] = WeakSet()
        self._frozen = False
        self.port = 0

    def sever(self) -> None:
        """Cut every connection now, and accept none until `severed` is reset, as for a killed client."""
        self.severed = True
        self._loop.call_soon_threadsafe(lambda: [transport.abort() for transport in list(self._open)])

    @contextmanager
    def half_open(self) -> Iterator[None]:
        """While the body runs, connections stay open but no data passes. Connections that were open do not recover."""
        self._frozen = True
        self._loop.call_soon_threadsafe(lambda: self._lost.update(self._known))
        try:
            yield
        finally:
            self._frozen = False

    @contextmanager
    def running(self) -> Iterator["ApiProxy"]:
        self._thread.start()
        assert self._ready.wait(10), "the proxy did not start"
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)

    def write_kubeconfig(self, path: Path) -> Path:
        cluster = {"name": "proxy", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}
        context = {"name": "proxy", "context": {"cluster": "proxy", "user": "proxy"}}
        content = {
            "apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context],
            "users": [{"name": "proxy", "user": {}}], "current-context": "proxy",
        }  # fmt: skip
        path.write_text(yaml.safe_dump(content))
        return path

    def fail(self, matches: Callable[[Call], bool], status: int, times: int = 1, **headers: str) -> Fault:
        fault = Fault(matches, status, times, {key.replace("_", "-"): value for key, value in headers.items()})
        self.faults.append(fault)
        return fault

    def writes(self) -> list[Call]:
        return [call for call in self.calls if call.is_write]

    def wait_quiet(self, seconds: float = 0.5, timeout: float = 120) -> None:
        """Wait until there has been no call except watches for this long."""
        deadline = time.monotonic() + timeout
        seen, since = -1, time.monotonic()
        while time.monotonic() < deadline:
            count = sum(1 for call in self.calls if call.verb != "watch")
            if count != seen:
                seen, since = count, time.monotonic()
            if time.monotonic() - since >= seconds:
                return
            time.sleep(0.05)
        raise TimeoutError(f"never quiet; the last calls: {self.calls[-10:]}")

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        connector = ApiServerConnector(self._tls)
        async with ClientSession(
            connector=connector, auto_decompress=False, timeout=ClientTimeout(total=None)
        ) as client:
            self._client = client
            app = web.Application(client_max_size=64 * 2**20)
            app.router.add_route("*", "/{path:.*}", self._pass)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
            await runner.setup()
            accepting = open_port(runner, "127.0.0.1", 0)
            self.port = accepting.port
            self._ready.set()
            await self._stop.wait()
            await close_port(accepting)
            await runner.cleanup()
        await connector.wait_closed()
        await asyncio.sleep(0.01)  # what was aborted last needs a turn of the loop to be gone

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        call = parse_call(request)
        transport = request.transport
        if self.severed or not isinstance(transport, asyncio.Transport):
            return self._cut(request)
        self._open.add(transport)
        self._known.add(transport)
        try:
            await self._stay_if_lost(transport)
            if self.delay_seconds:
                await asyncio.sleep(self.delay_seconds)
            return await self._answer(request, call, transport)
        except ConnectionError:
            return self._cut(request)
        finally:
            self._open.discard(transport)

    async def _stay_if_lost(self, transport: asyncio.Transport) -> None:
        if self._frozen:
            self._lost.add(transport)
        if transport in self._lost:
            await asyncio.Event().wait()

    def _find_fault(self, call: Call, *, of_content: bool = False) -> Fault | None:
        kind = (f for f in self.faults if (f.status in _OF_CONTENT) == of_content)
        fitting = (f for f in kind if f.hits < f.times and f.matches(call))
        fault = next(fitting, None)
        if fault is not None:
            fault.hits += 1
        return fault

    async def _answer(self, request: web.Request, call: Call, transport: asyncio.Transport) -> web.StreamResponse:
        self.before(call)
        fault = self._find_fault(call)
        if fault is not None:
            if fault.status == CUT:
                return self._cut(request)
            if fault.status == ENDLESS:
                self._record(call, ENDLESS)
                await asyncio.Event().wait()
            self._record(call, fault.status)
            body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": fault.status}
            body |= {"reason": "Injected", "message": f"injected {fault.status}"}
            if call.verb == "watch" and fault.status == 410:
                return web.json_response({"type": "ERROR", "object": body})
            return web.json_response(body, status=fault.status, headers=fault.headers)
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _HOP_HEADERS}
        body_bytes = await request.read()
        async with self._client.request(
            request.method, self._server + request.path_qs, headers=headers, data=body_bytes or None
        ) as answer:
            self._record(call, answer.status)
            kept = {key: value for key, value in answer.headers.items() if key.lower() not in _HOP_HEADERS}
            response = web.StreamResponse(status=answer.status, headers=kept)
            if encoding := answer.headers.get("Content-Encoding"):
                response.headers["Content-Encoding"] = encoding
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await self._stay_if_lost(transport)
                if fault := self._find_fault(call, of_content=True):
                    half = len(chunk) // 2
                    await response.write(chunk[:half])
                    if fault.status == TORN:
                        raise ConnectionError("torn")
                    await asyncio.sleep(1)
                    chunk = chunk[half:]
                await response.write(chunk)
            await response.write_eof()
            return response

    def _cut(self, request: web.Request) -> web.Response:
        self.num_cut += 1
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=502)

    def _record(self, call: Call, status: int) -> None:
        self.calls.append(replace(call, status=status, at=time.monotonic()))


def parse_call(request: web.Request) -> Call:
    """Return the request in the terms of RBAC. Requests such as discovery have no resource."""
    match = _PATH.fullmatch(request.path)
    if match is None:
        return Call(_VERBS[request.method], "", request.path)
    verb = _VERBS[request.method]
    if verb == "get" and not match["name"]:
        verb = "watch" if request.query.get("watch") in ("true", "1") else "list"
    if verb == "delete" and not match["name"]:
        verb = "deletecollection"
    return Call(
        verb, match["group"] or "", match["resource"], match["subresource"] or "", match["namespace"] or "",
        match["name"] or "",
    )  # fmt: skip
