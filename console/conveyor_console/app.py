"""Serves the pages: who may see what, the overview and each service with their streams, and the files in `static`.

A caller proves who they are by the header `Authorization: Bearer`, which a proxy may set, or by the cookie of the page
for signing in, which contains the encrypted token. Without a valid token, pages lead to that page, and other requests
get 401.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlencode, urlsplit

from aiohttp import web
from cryptography.fernet import Fernet, InvalidToken
from kubernetes.aio.client import ApiClient

from conveyor_api.names import LIVENESS_PATH, READINESS_PATH
from conveyor_console.access import MAX_TOKEN_BYTES, Access, Caller, Unavailable
from conveyor_console.events import read_events
from conveyor_console.gateways import Gateways
from conveyor_console.lookups import Lookups
from conveyor_console.overview import Line
from conveyor_console.pages import (
    Changes,
    Detail,
    Overview,
    build_detail,
    build_overview,
    render_as_of,
    render_detail,
    render_overview,
    render_past,
    render_playground,
    render_problem,
    render_service,
    render_sign_in,
    render_stopped,
)
from conveyor_console.past import SPANS, Past, build_past, convert_course, parse_time
from conveyor_console.playground.playground import MAX_SECONDS, Playground
from conveyor_console.prometheus import Prometheus
from conveyor_console.responses import CALLER, build_event, build_page, stream_changes
from conveyor_console.state import State

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Render = Callable[[Caller], Awaitable[str]]
"""Returns what has changed on a page since the last call, for its caller."""

COOKIE: Final = "conveyor_console_token"
_MAX_COOKIE_BYTES: Final = 3900  # browsers drop longer ones
MAX_STREAMS: Final = 64
MAX_STREAMS_EACH: Final = 8  # of one user
_RETRY_MS: Final = 30_000  # until a browser tries again to open a stream that was refused
_STREAM_END: Final = "/events"
_EXPIRED: Final = "Sign in again: Kubernetes does not accept your token."
_MAX_QUERY: Final = 128
_STATIC: Final = Path(__file__).parent / "static"
_TYPES: Final = {".css": "text/css", ".js": "text/javascript", ".LICENSE": "text/plain"}
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_OPEN: Final = ("/static/", "/sign-in", "/sign-out", LIVENESS_PATH, READINESS_PATH)


class _Refused(Exception):
    """A stream cannot be opened. The message is a sentence for the page."""


class App:
    """The handlers. missing: returns what the program still waits for; empty when it is ready."""

    def __init__(
        self,
        client: ApiClient,
        state: State,
        gateways: Gateways,
        access: Access,
        lookups: Lookups,
        prometheus: Prometheus | None,
        playground: Playground | None,
        missing: Callable[[], list[str]],
    ) -> None:
        self._client = client
        self._state = state
        self._gateways = gateways
        self._access = access
        self._lookups = lookups
        self._prometheus = prometheus
        self._playground = playground
        self._missing = missing
        self._seal = Fernet(Fernet.generate_key())  # cookies reach all programs on a host, whatever their port
        self._streams = Counter[str]()  # open ones by the user's name
        self._files = {path.name: path.read_bytes() for path in _STATIC.iterdir() if path.suffix in _TYPES}

    def build(self) -> web.Application:
        app = web.Application(middlewares=[_secured, self._authenticated], client_max_size=2 * MAX_TOKEN_BYTES)
        app.router.add_get(LIVENESS_PATH, self._show_live)
        app.router.add_get(READINESS_PATH, self._show_ready)
        app.router.add_get("/static/{name}", self._send_file)
        app.router.add_get("/sign-in", self._show_sign_in)
        app.router.add_post("/sign-in", self._sign_in)
        app.router.add_post("/sign-out", self._sign_out)
        app.router.add_get("/", self._show_overview)
        app.router.add_get("/events", self._stream_overview)
        self._lookups.add_to(app)
        app.router.add_get("/services/{namespace}/{name}", self._show_service)
        app.router.add_get("/services/{namespace}/{name}/past", self._show_past)
        app.router.add_get("/services/{namespace}/{name}/events", self._stream_service)
        if self._playground is not None:
            app.router.add_get("/services/{namespace}/{name}/try", partial(self._show_try, self._playground))
            app.router.add_post("/services/{namespace}/{name}/try", partial(self._try, self._playground))
            app.router.add_get("/stopped", self._show_stopped)
        return app

    @web.middleware
    async def _authenticated(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith(_OPEN):
            return await handler(request)
        try:
            caller = await self._access.identify(self._find_token(request))
            if caller is None:
                return _refuse(request)
            request[CALLER] = caller
            return await handler(request)
        except Unavailable as error:
            if request.method == "POST":
                return _build_stopped(f"Kubernetes does not answer: {error}.", 503)
            return build_page(render_problem("Kubernetes does not answer", f"{error}. Try again."), 503)

    async def _show_live(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _show_ready(self, _request: web.Request) -> web.Response:
        reasons = self._missing()
        return web.Response(
            status=503 if reasons else 200, text=f"waiting for {', '.join(reasons)}\n" if reasons else "ok\n"
        )

    async def _send_file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._files:
            raise web.HTTPNotFound
        headers = {"Cache-Control": "no-cache"}
        return web.Response(body=self._files[name], content_type=_TYPES[Path(name).suffix], headers=headers)

    async def _show_sign_in(self, _request: web.Request) -> web.Response:
        return build_page(render_sign_in())

    async def _sign_in(self, request: web.Request) -> web.Response:
        token = str((await request.post()).get("token", "")).strip()
        try:
            caller = await self._access.identify(token)
        except Unavailable as error:
            return build_page(render_sign_in(f"{error}. Try again."), 503)
        if caller is None:
            return build_page(render_sign_in("Kubernetes does not accept this token. It may have expired."), 401)
        sealed = self._seal.encrypt(token.encode()).decode()
        if len(sealed) > _MAX_COOKIE_BYTES:
            text = "This token is too long for a cookie. Create a token for a ServiceAccount."
            return build_page(render_sign_in(text), 400)
        response = web.Response(status=303, headers={"Location": "/"})
        is_secure = request.secure or request.headers.get("X-Forwarded-Proto") == "https"
        response.set_cookie(COOKIE, sealed, httponly=True, samesite="Strict", secure=is_secure)
        return response

    async def _sign_out(self, _request: web.Request) -> web.Response:
        response = web.Response(status=303, headers={"Location": "/sign-in"})
        response.del_cookie(COOKIE)
        return response

    async def _show_overview(self, request: web.Request) -> web.Response:
        overview, caller = await self._build_overview(request, request[CALLER]), request[CALLER]
        stream = f"/events?{urlencode({'q': overview.query, 'page': overview.number})}"
        return build_page(render_overview(overview, caller.name, stream, self._state.read_at))

    async def _build_overview(self, request: web.Request, caller: Caller) -> Overview:
        lines = self._state.lines
        visible = await self._access.find_visible(caller, {line.service.namespace for line in lines})
        query, page = request.query.get("q", "")[:_MAX_QUERY].strip().lower(), request.query.get("page", "1")
        number = int(page) if page.isascii() and page.isdigit() and len(page) < 7 else 1
        seen = [line for line in lines if line.service.namespace in visible]
        overview = build_overview(seen, query, number, self._state.problem)
        self._gateways.note_seen(line.service.key for line in overview.lines)
        return overview

    async def _stream_overview(self, request: web.Request) -> web.StreamResponse:
        changes = Changes()

        async def render(caller: Caller) -> str:
            overview = await self._build_overview(request, caller)
            if not overview.num_seen:
                raise _Refused("There is nothing to follow: you see no services.")
            return changes.render(overview)

        return await self._stream(request, render)

    async def _show_service(self, request: web.Request) -> web.Response:
        caller, line = request[CALLER], await self._find_line(request, request[CALLER])
        service, token = line.service, self._find_token(request)
        detail, receipts, usage, (events, problem) = await asyncio.gather(
            self._build_detail(line, caller),
            self._gateways.read_slowest(service.key),
            self._lookups.find_usage(caller, service.key),
            read_events(self._client, token, service.namespace, service.name),
        )
        read_at = self._state.read_at
        has_playground = self._playground is not None
        shown = (detail, caller.name, receipts, usage, events, problem, read_at)
        return build_page(render_service(*shown, has_playground=has_playground))

    async def _show_past(self, request: web.Request) -> web.Response:
        caller, line = request[CALLER], await self._find_line(request, request[CALLER])
        span, chosen = request.query.get("span", ""), parse_time(request.query.get("at", ""))
        span = span if span in SPANS else next(iter(SPANS))
        past = await self._build_past(caller.name, line.service.key, span, chosen)
        return build_page(render_past(line.service, past, caller.name))

    async def _build_past(self, reader: str, service: str, span: str, chosen: float | None) -> Past:
        """Return the time lines of Prometheus, or the last minutes from the console's memory."""
        first, problem = next(iter(SPANS)), ""
        if self._prometheus is not None:
            lines = await self._prometheus.read(reader, service, span)
            if lines is not None:
                return build_past(lines, span, list(SPANS), chosen, "")
            problem = "Prometheus does not answer, so these are the last minutes from the console's memory."
        spans = [first] if self._prometheus is None else list(SPANS)
        return build_past(convert_course(self._state.history.find_course(service)), first, spans, chosen, problem)

    async def _stream_service(self, request: web.Request) -> web.StreamResponse:
        sent = ""

        async def render(caller: Caller) -> str:
            nonlocal sent
            line = await self._find_line(request, caller)
            before, sent = sent, render_detail(await self._build_detail(line, caller))
            return "" if sent == before else sent

        return await self._stream(request, render)

    async def _show_try(self, playground: Playground, request: web.Request) -> web.Response:
        caller = request[CALLER]
        return build_page(playground.show(await self._find_line(request, caller), caller.name))

    async def _try(self, playground: Playground, request: web.Request) -> web.StreamResponse:
        """Send what changes on the page while a request of its form runs. The request ends if the browser leaves."""
        caller = request[CALLER]
        try:
            line = await self._find_line(request, caller)
        except web.HTTPNotFound:
            return _build_stopped("There is no such service.", 404)
        changes = playground.answer(request, line, caller.name)
        return await stream_changes(request, changes, _HEADERS, MAX_SECONDS)

    async def _show_stopped(self, _request: web.Request) -> web.Response:
        return build_page(render_playground("stopped"))

    async def _find_line(self, request: web.Request, caller: Caller) -> Line:
        """Return the line of the service in the path. Raises HTTPNotFound, also if the caller may not see it."""
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        line = self._state.find_line(f"{namespace}/{name}")
        if line is None or not await self._access.find_visible(caller, [namespace]):
            raise web.HTTPNotFound
        self._gateways.note_seen((line.service.key,))
        return line

    async def _build_detail(self, line: Line, caller: Caller) -> Detail:
        key, history = line.service.key, self._state.history
        steps, waiting = await asyncio.gather(self._gateways.read_steps(key), self._lookups.find_waiting(caller, key))
        return build_detail(line, history.find_course(key), history.list_decisions(key), steps, waiting)

    def _find_token(self, request: web.Request) -> str:
        """Return the caller's token; "" if there is none."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return token.strip()
        try:
            return self._seal.decrypt(request.cookies.get(COOKIE, "").encode(errors="replace")).decode()
        except InvalidToken:
            return ""

    async def _stream(self, request: web.Request, render: Render) -> web.StreamResponse:
        """Send changes, unless there are too many streams."""
        name = request[CALLER].name
        self._streams[name] += 1
        try:
            if self._streams.total() > MAX_STREAMS or self._streams[name] > MAX_STREAMS_EACH:
                raise _Refused("Too many pages are open, so this one does not change.")
            return await self._send_changes(request, render)
        except _Refused as error:
            return _build_stopped(str(error), 503)
        finally:
            self._streams -= Counter((name,))  # drops names without streams

    async def _send_changes(self, request: web.Request, render: Render) -> web.StreamResponse:
        """Send what `render` returns, and the time, after each read of the gateways, while the token is valid."""
        text = await render(request[CALLER])
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        with contextlib.suppress(ConnectionError, Unavailable, web.HTTPNotFound, _Refused):
            await response.prepare(request)
            while True:
                await response.write(build_event(text) + build_event(render_as_of(self._state.read_at)))
                await self._state.wait_for_change()
                if (caller := await self._access.identify(self._find_token(request))) is None:
                    await response.write(build_event(render_stopped(_EXPIRED)))
                    return response
                text = await render(caller)
        return response


def _build_stopped(reason: str, status: int) -> web.Response:
    """Return a stream with the only message that the page no longer changes. Browsers show it, whatever the status."""
    body = f"retry: {_RETRY_MS}\n".encode() + build_event(render_stopped(reason))
    return web.Response(body=body, status=status, content_type="text/event-stream")


@web.middleware
async def _secured(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Reject requests that another site makes a browser send, and add the headers of `_HEADERS`."""
    try:
        response = await handler(request) if _is_own(request) else _reject_foreign()
    except web.HTTPException as error:
        response = build_page(render_problem(error.reason, "There is no such page."), error.status)
    if not response.prepared:
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
    return response


def _is_own(request: web.Request) -> bool:
    """Return whether a request that changes something comes from this site, or from no browser.

    As in Go's net/http.CrossOriginProtection: browsers send Sec-Fetch-Site, and older ones send Origin.
    """
    if request.method in ("GET", "HEAD"):
        return True
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site is not None:
        return site in ("same-origin", "none")
    return origin is None or urlsplit(origin).netloc == request.host


def _reject_foreign() -> web.Response:
    return build_page(render_problem("Forbidden", "Another site has sent this request."), 403)


def _refuse(request: web.Request) -> web.Response:
    """Return the response to a request without a valid token."""
    if request.path == "/" and "Authorization" not in request.headers:
        return web.Response(status=303, headers={"Location": "/sign-in"})
    if request.path.endswith(_STREAM_END) or request.method == "POST":
        response = _build_stopped(_EXPIRED, 401)
    else:
        response = build_page(render_sign_in(_EXPIRED), 401)
    response.headers["WWW-Authenticate"] = "Bearer"
    return response
