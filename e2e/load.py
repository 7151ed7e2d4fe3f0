"""Runs a bounded load of streamed chat requests, and records the result of each.

Used by the demo, which shows it live, and by the stories, which demand that no stream was cut.
A stream counts as whole only if its finish reason and the closing `[DONE]` both came.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

PROMPTS = (
    "Tell me about lists.",
    "What is a function?",
    "How do I use the with statement?",
    "Explain dictionaries.",
    "What does the import statement do?",
)


@dataclass(slots=True)
class Answer:
    """The result of a request. `error` is None exactly if the whole answer arrived."""

    started: float
    status: int = 0
    request_id: str = ""
    first_token_seconds: float | None = None
    finished: float | None = None
    tokens: int = 0
    text: str = ""
    finish_reason: str | None = None
    done: bool = False
    error: str | None = None


@dataclass(slots=True)
class Load:
    """A running load: `answers` grows as requests start; `stop()` lets the running ones finish."""

    url: str  # of the service, ending in /v1
    body: dict[str, Any]
    concurrency: int
    answers: list[Answer] = field(default_factory=list)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _workers: list["asyncio.Task[None]"] = field(default_factory=list)

    @property
    def failed(self) -> list[Answer]:
        return [a for a in self.answers if a.finished is not None and a.error]

    @property
    def tokens(self) -> int:
        return sum(a.tokens for a in self.answers)

    async def stop(self) -> None:
        self._stopping.set()
        await asyncio.gather(*self._workers)

    async def _work(self, session: aiohttp.ClientSession, worker: int) -> None:
        number = worker
        while not self._stopping.is_set():
            prompt = PROMPTS[number % len(PROMPTS)]
            number += self.concurrency
            answer = Answer(started=time.monotonic())
            self.answers.append(answer)
            await stream_chat(
                session, self.url, {**self.body, "messages": [{"role": "user", "content": prompt}]}, answer
            )


@asynccontextmanager
async def running_load(url: str, body: dict[str, Any], concurrency: int) -> AsyncIterator[Load]:
    """Keep `concurrency` streamed chats running until the block ends; then those begun are finished."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:
        load = Load(url, body, concurrency)
        load._workers = [asyncio.create_task(load._work(session, n)) for n in range(concurrency)]
        try:
            yield load
        except BaseException:  # the block was cut short: nobody waits for these answers
            for worker in load._workers:
                worker.cancel()
            await asyncio.gather(*load._workers, return_exceptions=True)
            raise
        await load.stop()


async def stream_chat(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], answer: Answer | None = None
) -> Answer:
    """Send one chat request with `stream` and read it to its end; never raises for what the server did."""
    answer = answer or Answer(started=time.monotonic())
    try:
        async with session.post(f"{url}/chat/completions", json={**body, "stream": True}) as response:
            answer.status, answer.request_id = response.status, response.headers.get("X-Request-Id", "")
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return answer
            async for line in response.content:
                _take_event(answer, line)
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        answer.finished = time.monotonic()
        if answer.error is None and not (answer.done and answer.finish_reason):
            answer.error = "the stream ended before its finish reason and [DONE]"
    return answer


def _take_event(answer: Answer, line: bytes) -> None:
    if not line.startswith(b"data: "):
        return
    data = line[6:].strip()
    if data == b"[DONE]":
        answer.done = True
        return
    event = json.loads(data)
    if "error" in event:
        answer.error = f"error event: {event['error']}"
        return
    for choice in event.get("choices", ()):
        text = choice.get("delta", {}).get("content")
        if text:
            if answer.first_token_seconds is None:
                answer.first_token_seconds = time.monotonic() - answer.started
            answer.tokens += 1  # counts chunks: a chunk has one token unless bytes were held back
            answer.text += text
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
