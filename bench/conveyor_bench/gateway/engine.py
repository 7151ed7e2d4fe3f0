"""A fake engine that answers immediately, in its own process: `python -m conveyor_bench.gateway.engine ADDRESS`."""

import asyncio
import json
import sys

import uvloop
from aiohttp import web

from conveyor_protocol.request_headers import USAGE_HEADER, USAGE_MARK

ANSWER = json.dumps({"id": "cmpl-1", "object": "text_completion", "choices": [{"text": "y" * 400}]}).encode()
USAGE = json.dumps({"prompt_tokens": 100, "cached_tokens": 0, "completion_tokens": 16})


def event(number: int) -> bytes:
    chunk = {"id": "cmpl-1", "object": "text_completion", "choices": [{"text": f" token-{number:05d}"}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


async def run_engine(address: str) -> None:
    """Answer POST immediately. For a body with `events` and `rate`, stream this many events at this rate per second.

    Prints its port, and ends when its stdin is closed.
    """

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        body = json.loads(await request.read())
        reports = {USAGE_HEADER: USAGE} if USAGE_HEADER in request.headers else {}  # as Conveyor's engine does
        if "events" not in body:
            return web.Response(body=ANSWER, content_type="application/json", headers=reports)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", **reports})
        await stream.prepare(request)
        pause_seconds = 1 / body["rate"]
        due = asyncio.get_running_loop().time()
        for number in range(body["events"]):
            await stream.write(event(number))
            due += pause_seconds
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
        if reports:
            await stream.write(USAGE_MARK + USAGE.encode())
        return stream

    runner = web.ServerRunner(web.Server(answer, access_log=None, handler_cancellation=True))
    await runner.setup()
    await web.TCPSite(runner, address, 0, backlog=1024).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run_engine(sys.argv[1]))
