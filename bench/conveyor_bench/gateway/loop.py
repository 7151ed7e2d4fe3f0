"""Measures what the gateway's event loop spends on the worst input that we know for each parser, and on many services.

Runs the gateway's own classes in this process, without an API server. For a parser, prints the milliseconds for a
request of 64 KiB and for one MiB. For work on 5,000 services or engines, prints the longest turn of the loop. Each
figure is the shortest of several runs, because other load only adds time. Exits with 1 if a bar of ADR 125 is missed:
3 ms a request, 15 ms a MiB, 20 ms a turn. The last line is one JSON object.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from tests.gateway.builders import NeverAsked
from tests.gateway.cluster import make_service

from conveyor_gateway.admission.engine_pool import EnginePool
from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.clients import Clients
from conveyor_gateway.engines.fetching import EnginePage, parse_load
from conveyor_gateway.errors import GatewayError
from conveyor_gateway.pages.demand import encode_demand
from conveyor_gateway.pages.models import encode_model_list
from conveyor_gateway.recording.gauges import ServiceGauges
from conveyor_gateway.recording.metrics import Metrics
from conveyor_gateway.relaying.bodies import read_model, read_queue_fields, rename_model
from conveyor_gateway.relaying.forms import find_model_field
from conveyor_gateway.relaying.prefixes import find_prefix
from conveyor_gateway.settings import PROGRAM
from conveyor_gateway.usage import parse_usage
from conveyor_gateway.watching.catalog import Catalog, parse_service
from conveyor_gateway.watching.view import View
from conveyor_http.framing import MIN_CHUNK_BYTES
from conveyor_http.server import Server
from conveyor_protocol.usage import UsedTokens

MIB: Final = 1 << 20
REQUEST_BYTES: Final = 64 << 10
READ_BYTES: Final = 256 << 10  # of a socket at a time, as uvloop reads
REQUEST_BAR_MS, MIB_BAR_MS, TURN_BAR_MS = 3.0, 15.0, 20.0
RUNS: Final = 3


@dataclass(frozen=True, slots=True)
class Row:
    """The milliseconds of one kind of work; None where it does not apply."""

    name: str
    request_ms: float | None = None
    mib_ms: float | None = None
    turn_ms: float | None = None

    @property
    def met(self) -> bool:
        bars = ((self.request_ms, REQUEST_BAR_MS), (self.mib_ms, MIB_BAR_MS), (self.turn_ms, TURN_BAR_MS))
        return all(value is None or value <= bar for value, bar in bars)


def measure_ms(work: Callable[[], object]) -> float:
    """Return the processor time of the shortest of RUNS runs."""
    shortest = float("inf")
    for _ in range(RUNS):
        began = time.process_time()
        work()
        shortest = min(shortest, time.process_time() - began)
    return shortest * 1000


def longest_ms(turns: Iterable[object]) -> float:
    """Return the processor time of the longest step of an iteration."""
    longest, began = 0.0, time.process_time()
    for _ in turns:
        now = time.process_time()
        longest, began = max(longest, now - began), now
    return longest * 1000


# Parsers of bodies


def fill(begin: bytes, piece: bytes, end: bytes, size: int) -> bytes:
    return begin + piece * ((size - len(begin) - len(end)) // len(piece)) + end


JSON_INPUTS: Final[dict[str, tuple[bytes, bytes, bytes]]] = {
    "deep arrays": (b'{"model":"m","x":[', b"[" * 900 + b"]" * 900 + b",", b"1]}"),
    "empty objects": (b'{"model":"m","x":[', b"{},", b"1]}"),
    "equal members": (b'{"model":"m"', b',"messages":0', b"}"),
    "models": (b'{"model":"m"', b',"model":"m"', b',"model":"n"}'),
    "escapes": (b'{"model":"m","x":"', rb"\u0041", b'"}'),
    "system messages": (b'{"model":"m","messages":[', b'{"role":"system"},', b"{}]}"),
    "token ids": (b'{"model":"m","prompt":[', b"1,", b"1]}"),
    "one deep message": (b'{"model":"m","messages":[{"role":"system","content":[', b"[],", b"[]]}]}"),
}
FORM_INPUTS: Final = (
    b"--x\r\n\r\n\r\n",
    b"--x\r\na:\r\n\r\n\r\n",
    b'--x\r\nContent-Disposition:form-data; name="a"\r\n\r\n\r\n',
)


SERVICE: Final = parse_service(
    {"metadata": {"namespace": "a", "name": "m"}, "spec": {"model": {"uri": "hf://example/model"}}}
)


def refused(work: Callable[[], object]) -> None:
    with contextlib.suppress(GatewayError):
        work()


def route_body(body: bytes) -> None:
    """Do what the gateway does with a body at the root, for a service with several engines."""
    read_model(body)
    refused(partial(rename_model, body, "other"))
    find_prefix(read_queue_fields(body), SERVICE)


def measure_bodies() -> Iterable[Row]:
    for name, pieces in JSON_INPUTS.items():
        small, large = (partial(route_body, fill(*pieces, size)) for size in (REQUEST_BYTES, MIB))
        yield Row(f"JSON: {name}", measure_ms(small), measure_ms(large))
    for piece in FORM_INPUTS:
        form = fill(b"", piece, b"", REQUEST_BYTES)
        work = partial(refused, partial(find_model_field, form, "multipart/form-data; boundary=x"))
        yield Row(f"form: parts of {len(piece)} bytes", measure_ms(work))


# Headers, and what engines send


def measure_headers() -> Iterable[Row]:
    clients = Clients(PROGRAM.parse(["--trusted-proxies=10.0.0.0/8"], {}).trusted_proxies)
    headers = {"X-Forwarded-For": ", ".join(["10.1.2.3"] * 3_200)}
    request = make_mocked_request("POST", "/", headers=headers).clone(remote="10.0.0.1")
    yield Row("X-Forwarded-For of 32 KiB", measure_ms(lambda: clients.find(request)))
    for text in (b'{"waiting":' + b"9" * 60_000 + b"}", b"[" * 60_000, b'{"x":[' + b"{}," * 20_000 + b"0]}"):
        page = EnginePage(200, "application/json", text)
        yield Row(f"an engine's load, {text[:12].decode()}...", measure_ms(partial(parse_load, page)))
    yield Row("an engine's usage of 8 KiB", measure_ms(partial(parse_usage, b'{"prompt_tokens":' + b"9" * 8_000)))


# Chunks


class _Transport(asyncio.Transport):
    """A transport that sends nothing."""

    def write(self, data: Any) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def is_closing(self) -> bool:
        return False


async def upload(chunk_bytes: int, wire_bytes: int) -> None:
    """Send a body in chunks of this size to a port."""
    ended = asyncio.Event()

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        with contextlib.suppress(web.RequestPayloadError):
            await request.content.read()
        ended.set()
        return web.Response()

    connection: Any = Server(handle, 10)()
    connection.connection_made(_Transport())
    connection.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"%x\r\n%b\r\n" % (chunk_bytes, b"x" * chunk_bytes)
    sent = chunk * (wire_bytes // len(chunk)) + b"0\r\n\r\n"
    for start in range(0, len(sent), READ_BYTES):
        connection.data_received(sent[start : start + READ_BYTES])
        while connection._unparsed and not connection._close:  # noqa: ASYNC110  a transport would not read meanwhile
            await asyncio.sleep(0)
    await ended.wait()
    connection.connection_lost(None)


def measure_chunks() -> Iterable[Row]:
    def run(chunk_bytes: int, size: int) -> None:
        asyncio.run(upload(chunk_bytes, size))

    for chunk_bytes in (1, 16, MIN_CHUNK_BYTES, 4096):
        small, large = (measure_ms(partial(run, chunk_bytes, size)) for size in (REQUEST_BYTES, MIB))
        yield Row(f"chunks of {chunk_bytes} bytes", small, large)


# Many services and engines


def measure_services(num_services: int) -> Iterable[Row]:
    async def measure() -> list[Row]:
        catalog, metrics = Catalog(), Metrics()
        engines: Any = NeverAsked()
        queues = Queues(catalog, asyncio.get_running_loop(), engines, Ledger(1), on_gone=metrics.drop_service)
        metrics.gauges = ServiceGauges(queues)
        bodies = [make_service(f"s{number}", "team", listed=True) for number in range(num_services)]
        rows = [Row("a new service", turn_ms=longest_ms(map(catalog.services.put, bodies)))]
        gc.freeze()  # as the gateway does once it has listed all services
        for service, _ in queues.items():
            metrics.count_request(service.key, 200)
            metrics.observe_answer(service.key, 0.0, 0.1)
            metrics.count_used(service.key, 0.1, UsedTokens(1, 0, 2))
        rows.append(Row("/metrics", turn_ms=longest_ms(metrics.write_page())))
        rows.append(Row("/v1/models", turn_ms=longest_ms(encode_model_list(View(catalog.directory), lists_all=True))))
        rows.append(Row("/demand", turn_ms=longest_ms(encode_demand(queues))))
        rows.append(Row("a full garbage collection", turn_ms=measure_ms(gc.collect)))
        rows.append(Row("a deleted service", turn_ms=longest_ms(catalog.services.keep_only(set(), ""))))
        return rows

    return asyncio.run(measure())


def measure_engines(num_engines: int) -> Iterable[Row]:
    pool = EnginePool()
    pool.configure(8)
    addresses = [f"10.0.{number // 250}.{number % 250}:8000" for number in range(num_engines)]
    pool.set_ready(addresses[1:])
    yield Row("an engine more", turn_ms=measure_ms(partial(pool.set_ready, addresses)))

    def choose(prefix: int | None) -> None:
        pool.find_home(prefix)
        pool.find_places(0.0)
        if (engine := pool.choose(0.0, 0, prefix)) is not None:
            pool.next_return_seconds(0.0)
            pool.release(engine)

    yield Row("choice of an engine by load", measure_ms(partial(choose, None)))
    yield Row("choice of an engine by prefix", measure_ms(partial(choose, 7)))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench loop", description=__doc__)
    parser.add_argument("--services", type=int, default=5_000, help="services, and engines (default: %(default)s)")
    number = parser.parse_args(arguments).services
    gc.collect()
    gc.freeze()  # as the gateway does at its start
    gc.disable()  # it has a row of its own
    print(f"{'':36} {'ms a request':>12} {'ms a MiB':>9} {'ms a turn':>9}")
    rows = []
    for measured in (
        measure_bodies(),
        measure_headers(),
        measure_chunks(),
        measure_services(number),
        measure_engines(number),
    ):
        for row in measured:
            figures = (row.request_ms, row.mib_ms, row.turn_ms)
            request, mib, turn = ("" if each is None else f"{each:.2f}" for each in figures)
            print(f"{row.name:36} {request:>12} {mib:>9} {turn:>9}  {'met' if row.met else 'MISSED'}", flush=True)
            rows.append(row)
    result = [asdict(row) | {"met": row.met} for row in rows]
    print(json.dumps({"benchmark": "loop", "load_average": os.getloadavg(), "rows": result}))
    return 0 if all(row.met for row in rows) else 1
