"""Drives a request of the page: reads the form, sends the request to a gateway, and yields what changes on the page.

Nothing is kept of a request. The log has who has sent it and for which service, because gateways see only the console.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final
from uuid import uuid4

from aiohttp import web

from conveyor_console.gateways import Gateways
from conveyor_console.overview import Line
from conveyor_console.pages import render_playground as render
from conveyor_console.playground.api_requests import ApiRequest, write_curl
from conveyor_console.playground.fields import InvalidForm, fill_in, read_form
from conveyor_console.playground.relay import Progress, Relay
from conveyor_console.playground.tasks import KEY, TASKS
from conveyor_console.services import Service
from conveyor_insight.receipts import explain_receipt

logger = logging.getLogger(__name__)

MAX_REQUESTS: Final = 6
MAX_REQUESTS_EACH: Final = 2  # of one user
MAX_SECONDS: Final = 600.0  # of a request with its form and all writes, however slowly the browser reads
_CHANGE_SECONDS: Final = 0.1  # between two changes of the text
_TICK_SECONDS: Final = 1.0  # between two writes at the latest: a write finds out that the browser has left
_RECEIPT_PAUSES: Final = (0.0, 0.1, 0.2, 0.4, 0.8)  # seconds; a gateway keeps the receipt just after the answer's end


class Playground:
    """The page for trying services. find_line: returns the line of a service by its key."""

    def __init__(self, relay: Relay, gateways: Gateways, find_line: Callable[[str], Line | None]) -> None:
        self._relay = relay
        self._gateways = gateways
        self._find_line = find_line
        self._running = Counter[str]()  # requests by the user's name

    def show(self, line: Line, caller: str) -> str:
        """Return the page."""
        service, form, curl = line.service, TASKS.get(line.service.task), ""
        if form is not None:
            curl = write_curl(_find_url(service), form.build(fill_in(form.fields), _find_model(service)), has_key=False)
        fields = () if form is None else (*form.fields, KEY)
        return render("page", line=line, caller=caller, fields=fields, curl=curl)

    async def answer(self, request: web.Request, line: Line, caller: str) -> AsyncGenerator[str, None]:
        """Yield what changes on the page. The request ends if the iterator is closed."""
        service, task = line.service, TASKS.get(line.service.task)
        with self._take_turn(caller) as has_turn:
            if not has_turn:
                yield _render_problem("Too many requests run from this console. Try again when one has ended.")
                return
            if task is None:
                yield _render_problem("The console has no form for this service.")
                return
            try:
                sent = await read_form(request)
                built, key = task.build(sent, _find_model(service)), sent.find_key()
            except InvalidForm as error:
                yield _render_problem(str(error))
                return
            request_id, progress = uuid4().hex, Progress()
            logger.info("event=tried service=%s caller=%s request_id=%s", service.key, caller, request_id)
            curl = write_curl(_find_url(service), built, bool(key))
            yield render("begin", service=service, message=built.message, curl=curl)
            sending = self._relay.send(service.key, built, key, request_id, progress)
            async for text in self._follow(sending, service.key, progress):
                yield text
            yield await self._render_end(built, progress, request_id)

    @contextmanager
    def _take_turn(self, caller: str) -> Iterator[bool]:
        """Count a request of the caller. The value is False if there are too many."""
        self._running[caller] += 1
        try:
            yield self._running.total() <= MAX_REQUESTS and self._running[caller] <= MAX_REQUESTS_EACH
        finally:
            self._running -= Counter((caller,))  # drops names without requests

    async def _follow(self, sending: Awaitable[None], service: str, progress: Progress) -> AsyncGenerator[str, None]:
        """Yield what comes until `sending` has ended, and cancel it if the iterator is closed."""
        task, began, written = asyncio.ensure_future(sending), time.monotonic(), 0.0
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=_CHANGE_SECONDS)
                now = time.monotonic()
                if text := _render_text(progress):
                    yield text
                if now - written >= _TICK_SECONDS and not task.done():
                    written = now
                    yield render(
                        "state", line=self._find_line(service), began=progress.began, seconds=round(now - began)
                    )
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _render_end(self, request: ApiRequest, progress: Progress, request_id: str) -> str:
        sentence = ""
        for pause in _RECEIPT_PAUSES if progress.status else ():
            await asyncio.sleep(pause)
            if (receipt := await self._gateways.read_receipt(request_id)) is not None:
                sentence = explain_receipt(receipt)
                break
        told = {"message": request.message, "sentence": sentence, "request_id": request_id}
        return render("end", progress=progress, said="".join(progress.text), **told)


def _render_problem(problem: str) -> str:
    return render("problem", problem=problem)


def _render_text(progress: Progress) -> str:
    """Return the text that has come since the last call; "" if none has."""
    text, thinking = progress.take()
    return render("text", text=text, thinking=thinking) if text or thinking else ""


def _find_url(service: Service) -> str:
    """Return the URL that paths of the API follow. `status.url` is the one for OpenAI clients, which ends with /v1."""
    return service.url.removesuffix("/v1") or f"http://GATEWAY/{service.key}"


def _find_model(service: Service) -> str:
    return service.model or service.name
