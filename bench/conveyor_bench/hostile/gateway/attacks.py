"""The attacks of the command `hostile`: clients on plain sockets, on the loopback."""

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.gateway.cluster import make_service
from tests.gateway.process import GatewayProcess

from conveyor_bench.hostile.gateway.engines import MIB
from e2e.cluster.api import Api

HOSTILE = "default/hostile"
REFUSING, EMPTY, REAL = "default/refusing", "default/empty", "default/real"  # services of attacks in `CLIENTS`
NUM_SERVICES, MANY = 500, {"many": "yes"}  # services that a tenant creates and deletes, and their label
NUM_REFUSING = 8  # engines of the service REFUSING
TENANT = "attacker"  # a namespace of its own, for attacks by one tenant on the others
OF_TENANT = ("one", "two")
GUARDED = "guarded"  # a service of the tenant that needs a key
GUESSES, GUESSING, GUESSES_A_SECOND = 8000, 50, 1000  # keys, connections
ATTACKER = "127.0.0.2"  # the address of attacking clients only
SECOND_ATTACKER = "127.0.0.3"
AGAIN_SECONDS = 4.0
NUM_FLOODING = 300  # connections
BATCH_SECONDS = 0.02


@dataclass(slots=True)
class Stage:
    """The target, and the attack's own most memory.

    `ports`: all HTTP and HTTPS ports that the programs listen on. `rate`: requests/s of `post_many`.
    """

    gateway: GatewayProcess
    ports: list[int]
    rate: int
    api: Api
    kubeconfig: Path
    etcd: Path  # its socket
    clients: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    job_mib: float = 0.0  # of the largest job, if the attack runs some
    start_seconds: float = 0.0  # of another gateway, if the attack starts one
    num_lines: int = 0  # the most that a gateway logged, if the attack counts them

    async def connect(
        self, port: int, sent: bytes = b"", receive_bytes: int = 0, address: str = ATTACKER
    ) -> socket.socket:
        """Open a connection that sends `sent` and does nothing more."""
        client = socket.socket()
        self.clients.callback(client.close)
        if receive_bytes:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.setblocking(False)
        client.bind((address, 0))
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(5):
                await loop.sock_connect(client, ("127.0.0.1", port))
                await loop.sock_sendall(client, sent)
        return client

    def read(self, client: socket.socket, num_bytes: int, pause_seconds: float) -> None:
        """Read in the background."""

        async def go_on() -> None:
            with contextlib.suppress(OSError):
                while await asyncio.get_running_loop().sock_recv(client, num_bytes):  # noqa: ASYNC110  as clients do
                    await asyncio.sleep(pause_seconds)

        self.clients.callback(asyncio.create_task(go_on()).cancel)

    async def post(self, body: bytes, missing: int = 0, service: str = HOSTILE, **options: Any) -> socket.socket:
        """Send a request without the last `missing` bytes of its body. Returns the connection."""
        head = f"POST /{service}/v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body) + missing}\r\n\r\n"
        return await self.connect(self.gateway.port, head.encode() + body, **options)

    async def get(self, service: str, path: str, address: str = ATTACKER) -> socket.socket:
        """Request a page of the attacking tenant's service. Returns the connection."""
        sent = f"GET /{TENANT}/{service}{path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        return await self.connect(self.gateway.port, sent, address=address)

    def send_again(self, client: socket.socket, service: str, path: str) -> None:
        """Request the page again after each answer, in the background."""
        sent = f"GET /{TENANT}/{service}{path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()

        async def go_on() -> None:
            loop = asyncio.get_running_loop()
            with contextlib.suppress(OSError):
                while await loop.sock_recv(client, 1 << 16):
                    await asyncio.sleep(AGAIN_SECONDS)
                    await loop.sock_sendall(client, sent)

        self.clients.callback(asyncio.create_task(go_on()).cancel)


Attack = Callable[[Stage], Coroutine[Any, Any, None]]


async def idle(stage: Stage) -> None:
    for port in stage.ports:
        await asyncio.gather(*(stage.connect(port) for _ in range(1000)))


async def ahead(stage: Stage) -> None:
    """Send a request with large headers, and then a second one and part of its body before the first is answered."""
    head = f"POST /{HOSTILE}/v1/completions HTTP/1.1\r\nHost: x\r\n" + "".join(
        f"X-{n}: {'p' * 7900}\r\n" for n in range(3)
    )
    sent = f"{head}Content-Length: 6\r\n\r\nstream{head}Content-Length: {MIB}\r\n\r\n".encode() + b"z" * (MIB // 4)
    for _ in range(30):  # a few at a time: `command` reads the memory in the same event loop
        await asyncio.gather(*(stage.connect(stage.gateway.port, sent) for _ in range(50)))
        await asyncio.sleep(0.05)


async def uploads(stage: Stage) -> None:
    await asyncio.gather(*(stage.post(b"x" * (8 * MIB - 1), missing=1) for _ in range(32)))


async def writers(stage: Stage) -> None:
    await asyncio.gather(*(stage.post(b"x", missing=999) for _ in range(100)))


async def readers(stage: Stage) -> None:
    """Read streams in many small pieces."""
    for client in await asyncio.gather(*(stage.post(b"stream", receive_bytes=4096) for _ in range(100))):
        stage.read(client, 1 << 12, pause_seconds=0.1)


async def interim(stage: Stage) -> None:
    for _ in range(6):
        await asyncio.gather(*(stage.post(b"interim") for _ in range(8)))
        await asyncio.sleep(1)


async def tiny(stage: Stage) -> None:
    for client in await asyncio.gather(*(stage.post(b"tiny") for _ in range(8))):
        stage.read(client, 1 << 16, pause_seconds=0)


async def nested(stage: Stage) -> None:
    body = b'{"model":"good","x":[' + b"[[[[[]]]]]," * (MIB // 12) + b"1]}"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for _ in range(20):
        await stage.connect(stage.gateway.port, head + body)


async def post_many(stage: Stage, count: int, body: bytes, missing: int = 0, service: str = HOSTILE) -> None:
    """Send requests at a fixed rate, independent of the answers to earlier ones."""
    await at_rate(stage, count, lambda number: stage.post(body, missing, service))


async def refusals(stage: Stage) -> None:
    """Send requests that eight engines refuse."""
    await post_many(stage, 1800, b"full ", service=REFUSING)


async def queued(stage: Stage) -> None:
    """Send as many requests as there may be connections, for a service without engines."""
    await post_many(stage, 2048, b"x", service=EMPTY)


async def bodies(stage: Stage) -> None:
    """Send the first byte of many bodies, and then large bodies for the same service, which fill its memory."""
    await post_many(stage, 1900, b"x", missing=8 * MIB - 1)
    await asyncio.gather(*(stage.post(b"x" * (8 * MIB - 1), missing=1) for _ in range(8)))


async def choices(stage: Stage) -> None:
    """Send requests for 128 choices each to one of Conveyor's engines."""
    body = b'{"prompt": "hello world hello world", "max_tokens": 400, "n": 128, "ignore_eos": true}'
    await post_many(stage, 1000, body, service=REAL)


async def abandoned(stage: Stage) -> None:
    """Open streams and disconnect."""
    for _ in range(100):
        async with contextlib.AsyncExitStack() as clients:
            await post_many(replace(stage, clients=clients), 100, b"tokens ")


async def descriptors(stage: Stage) -> None:
    """Open more connections than a gateway has descriptors with `--open-files 1024`. Half of them send a request."""
    for _ in range(15):
        await post_many(stage, 100, b"x", service=EMPTY)
        await asyncio.gather(*(stage.connect(stage.gateway.port) for _ in range(100)))


async def send_many(stage: Stage, count: int, sent: bytes, pause_seconds: float) -> None:
    """Send these bytes on new connections, one after the other."""
    began = time.monotonic()
    for number in range(count):
        await asyncio.sleep(max(0.0, began + number * pause_seconds - time.monotonic()))
        await stage.connect(stage.gateway.port, sent)


async def forms(stage: Stage) -> None:
    """Send 40 forms of 64 KiB a second, whose parts have no content and no `model`."""
    form = (b"--x\r\na:\r\n\r\n\r\n" * 5100)[: 64 << 10]
    head = b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: %d\r\n\r\n" % len(form)
    await send_many(stage, 320, head + form, 1 / 40)


async def prefixes(stage: Stage) -> None:
    """Send 10 bodies of 1 MiB a second, with system messages only, to a service with several engines."""
    body = b'{"messages":[' + b'{"role":"system"},' * (MIB // 18 - 2) + b"{}]}"
    head = f"POST /{REFUSING}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    await send_many(stage, 80, head.encode() + body, 1 / 10)


async def chunks(stage: Stage) -> None:
    """Send 10 uploads of 3 MiB a second, in chunks of one byte."""
    head = f"POST /{HOSTILE}/v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    await send_many(stage, 80, head.encode() + b"1\r\nx\r\n" * (MIB // 2), 1 / 10)


async def services(stage: Stage) -> None:
    """Create many services, send a request to each, read the metrics page, and delete them all at once."""
    path = "/apis/conveyor.dev/v1alpha1/namespaces/default/inferenceservices"
    names = [f"many-{number}" for number in range(NUM_SERVICES)]
    bodies = [
        make_service(name, "default", listed=True) | {"metadata": {"name": name, "labels": MANY}} for name in names
    ]
    for body in bodies:
        await asyncio.to_thread(stage.api.create, path, body)
    for name in names:
        await stage.post(b"x", service=f"default/{name}")
    for _ in range(3):
        await asyncio.to_thread(stage.gateway.admin, "/metrics")
    await asyncio.to_thread(stage.api.delete, f"{path}?labelSelector=many=yes")


async def at_rate(stage: Stage, count: int, send: Callable[[int], Coroutine[Any, Any, object]]) -> None:
    """Call `send` with 0 to `count` - 1, at the stage's rate."""
    began, size = time.monotonic(), max(1, round(stage.rate * BATCH_SECONDS))
    for start in range(0, count, size):
        await asyncio.sleep(max(0.0, began + start / stage.rate - time.monotonic()))
        await asyncio.gather(*(send(number) for number in range(start, min(count, start + size))))


async def floods(stage: Stage) -> None:
    """Send requests on many connections, each as soon as the answer to the one before has arrived."""
    sent = f"GET /{TENANT}/{OF_TENANT[0]}/v1/models HTTP/1.1\r\nHost: x\r\n\r\n".encode()

    async def go_on(client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while await loop.sock_recv(client, 1 << 16):
                await loop.sock_sendall(client, sent)

    for _ in range(NUM_FLOODING):
        client = await stage.connect(stage.gateway.port, sent)
        stage.clients.callback(asyncio.create_task(go_on(client)).cancel)


async def streams_of_two_services(stage: Stage) -> None:
    """Open as many streams as there may be requests, of two services of one tenant, which send an event each 20 s."""

    async def send(number: int) -> None:
        address = (ATTACKER, SECOND_ATTACKER)[number % 2]
        await stage.post(b"drip ", service=f"{TENANT}/{OF_TENANT[number % 2]}", address=address)

    await at_rate(stage, 1800, send)


async def documents_of_silent_engines(stage: Stage) -> None:
    """Request the documents of two services of one tenant, whose engines never send them."""

    async def send(number: int) -> None:
        await stage.get(OF_TENANT[number % 2], "/openapi.json", (ATTACKER, SECOND_ATTACKER)[number % 2])

    await at_rate(stage, 128, send)


async def pages_of_a_silent_service(stage: Stage) -> None:
    """Request a page on more connections than there may be, and again after each answer."""

    async def send(number: int) -> None:
        stage.send_again(await stage.get(OF_TENANT[0], "/health"), OF_TENANT[0], "/health")

    await at_rate(stage, 2060, send)


async def guesses(stage: Stage) -> None:
    """Guess 1,000 keys a second, on open connections, for a service that needs one."""
    loop = asyncio.get_running_loop()

    async def guess_on(number: int) -> None:
        client = await stage.connect(stage.gateway.port)
        with contextlib.suppress(OSError):
            for guess in range(GUESSES // GUESSING):
                due = began + (guess * GUESSING + number) / GUESSES_A_SECOND
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                key = f"sk-conveyor-{TENANT}-{secrets.token_hex(32)}"
                head = f"GET /{TENANT}/{GUARDED}/v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n"
                await loop.sock_sendall(client, head.encode())
                answer = await loop.sock_recv(client, 1 << 16)
                assert answer.startswith(b"HTTP/1.1 401"), answer

    began = time.monotonic()
    await asyncio.gather(*(guess_on(number) for number in range(GUESSING)))


# Attacks that are compared with the same attack on another gateway of the same machine.
CLIENTS: dict[str, Attack] = {
    each.__name__.replace("_", " "): each
    for each in (
        refusals,
        queued,
        bodies,
        choices,
        abandoned,
        descriptors,
        forms,
        prefixes,
        chunks,
        floods,
        streams_of_two_services,
        documents_of_silent_engines,
        pages_of_a_silent_service,
        guesses,
    )
}
ATTACKS: dict[str, Attack] = {
    each.__name__: each for each in (idle, ahead, uploads, writers, readers, interim, tiny, nested, services)
}
