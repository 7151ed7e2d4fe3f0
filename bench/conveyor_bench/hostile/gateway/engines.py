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
                await _write(body.split(b" ")[0], writer)
        writer.close()

    async def _write(kind: bytes, writer: asyncio.StreamWriter) -> None:
        stream = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        event = b"data: " + b"x" * 1000 + b"\n\n"
        endless = {
            b"tokens": (stream, b"9\r\ndata: a\n\n\r\n"),
            b"drip": (stream, b"9\r\ndata: a\n\n\r\n"),
            b"interim": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2000),
            b"tiny": (stream, b"1\r\na\r\n" * 8000),
            b"stream": (stream, b"%x\r\n%b\r\n" % (len(event), event)),
        }
        if kind == b"full":
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\n{}")
            return await writer.drain()
        if kind not in endless:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
            return await writer.drain()
        begin, rest = endless[kind]
        writer.write(begin)
        while True:
            writer.write(rest)
            await writer.drain()
            if kind in (b"tokens", b"drip"):
                await asyncio.sleep(TOKEN_SECONDS if kind == b"tokens" else DRIP_SECONDS)

    servers = [await asyncio.start_server(answer, address, 0, limit=16 * MIB, backlog=1024) for _ in range(num_ports)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(run_engine(sys.argv[1], int(sys.argv[2])))
