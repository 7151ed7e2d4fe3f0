"""Hostile engines, whose answer depends on the first word of a request's body. Started by the command.

They never answer a request for a page of `SILENT`.

`python -m conveyor_bench.hostile.gateway.engines ADDRESS COUNT` listens on COUNT ports of the address.
"""

import asyncio
import contextlib
import re
import sys

MIB = 1 << 20
TOKEN_SECONDS = 0.02
DRIP_SECONDS = 20.0
SILENT = (b"GET /openapi.json ", b"GET /health ")
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
GOOD = (JSON + b"Content-Length: 2\r\n\r\n{}", b"")
ROW_SECONDS = 2.0
# Answers to rows of a job after ROW_SECONDS, by the row's first key: what is written once, and then without end.
ROWS = {
    b"row": GOOD,
    b"nuls": (JSON + b"Content-Length: %d\r\n\r\n" % (31 * MIB) + b"\0" * (31 * MIB), b""),
    b"endless": (JSON + b"Transfer-Encoding: chunked\r\n\r\n", b"100000\r\n" + b"x" * MIB + b"\r\n"),
    b"deep": (JSON + b"Content-Length: %d\r\n\r\n" % (2 * MIB) + b"[" * MIB + b"]" * MIB, b""),
    b"digits": (JSON + b'Content-Length: 4029\r\n\r\n{"usage":{"prompt_tokens":' + b"9" * 4000 + b"}}\n", b""),
    b"torn": (JSON + b"Content-Length: 99999999\r\n\r\n{", b""),
}


async def run_engine(address: str, num_ports: int) -> None:
    """Run the engines. Prints their ports, and ends when the standard input is closed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(SILENT):
                    await asyncio.sleep(3600)
                length = re.search(rb"content-length: (\d+)", head, re.I)
                body = await reader.readexactly(int(length[1]) if length else 0)
                word = re.search(rb"\w{1,9}", body)
                await _write(word[0] if word else b"", writer)
        writer.close()

    async def _write(kind: bytes, writer: asyncio.StreamWriter) -> None:
        stream = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        event = b"data: " + b"x" * 1000 + b"\n\n"
        answers = {
            b"full": (b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\n{}", b""),
            b"tokens": (stream, b"9\r\ndata: a\n\n\r\n"),
            b"drip": (stream, b"9\r\ndata: a\n\n\r\n"),
            b"interim": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2000),
            b"tiny": (stream, b"1\r\na\r\n" * 8000),
            b"stream": (stream, b"%x\r\n%b\r\n" % (len(event), event)),
            **ROWS,
        }
        begin, rest = answers.get(kind, GOOD)
        if kind in ROWS:
            await asyncio.sleep(ROW_SECONDS)
        writer.write(begin)
        await writer.drain()
        if kind == b"torn":
            raise ConnectionError
        while rest:
            writer.write(rest)
            await writer.drain()
            if kind in (b"tokens", b"drip"):
                await asyncio.sleep(TOKEN_SECONDS if kind == b"tokens" else DRIP_SECONDS)

    servers = [await asyncio.start_server(answer, address, 0, limit=16 * MIB, backlog=1024) for _ in range(num_ports)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(run_engine(sys.argv[1], int(sys.argv[2])))
