"""Finds the receipt of a request at the gateways, and prints where its time went."""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp
import msgspec

from conveyor_api import names
from conveyor_http.reading import AnswerTooLong, read_answer
from conveyor_insight.facts import Unanswered
from conveyor_insight.receipts import explain_receipt
from conveyor_kubectl.cluster import Cluster
from conveyor_kubectl.forwarding import forwarded, kubectl_flags
from conveyor_protocol.usage import RequestReceipt

DESCRIPTION: Final = """Say in one sentence where the time of a request went: in queues, for its batch, in the prefill,
in the decoding. Each gateway keeps the receipts of its last 10,000 requests. The command reads them through `kubectl
port-forward`, so you need the right to create pods/portforward in the namespace of the gateways."""

_TIMEOUT: Final = aiohttp.ClientTimeout(total=10)
_MAX_PAGE_BYTES: Final = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="REQUEST-ID", help="the header X-Request-Id of the answer")
    parser.add_argument(
        "--system-namespace", metavar="NAME", default=names.SYSTEM_NAMESPACE,
        help="namespace of the gateways (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--gateway", metavar="URL", action="append", default=[],
        help="URL of a gateway's admin port, such as http://127.0.0.1:8081, instead of the gateways of a cluster",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", choices=["text", "json"], default="text", help="format (default: %(default)s)"
    )


def show_why(connect: Callable[[], Cluster], flags: argparse.Namespace, show: Callable[[str], None]) -> int:
    """Run the command and return its exit code. Raises Unanswered. connect: called unless flags name gateways."""
    for receipt in asyncio.run(_find(connect, flags)):
        show(_write_json(receipt) if flags.output == "json" else explain_receipt(receipt))
    return 0


def _write_json(receipt: RequestReceipt) -> str:
    built: Any = msgspec.to_builtins(receipt)
    if receipt.used is not None and receipt.used.receipt is not None:
        built["used"]["receipt"] = msgspec.structs.asdict(receipt.used.receipt)
    return json.dumps(built, indent=2)


async def _find(connect: Callable[[], Cluster], flags: argparse.Namespace) -> list[RequestReceipt]:
    """Return the receipts of all gateways, that of the request that ended last first.

    Raises Unanswered if no gateway that answers has one.
    """
    num_gateways, found, failed = 0, list[RequestReceipt](), list[Unanswered]()
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        async for url in _list_gateways(connect, flags):
            num_gateways += 1
            try:
                found += await _fetch(session, url, flags.request_id)
            except Unanswered as error:
                failed.append(error)
    if found:
        return sorted(found, key=lambda receipt: receipt.ended_unix, reverse=True)
    if failed:
        raise failed[0]
    if not num_gateways:
        raise Unanswered(f"no gateway runs in the namespace {flags.system_namespace}; name it with --system-namespace")
    raise Unanswered(
        f"no gateway keeps a receipt of {flags.request_id}: it has not ended, was never sent to a model's path, is not "
        "among the last 10,000 requests of its gateway, or the gateway has restarted since"
    )


async def _list_gateways(connect: Callable[[], Cluster], flags: argparse.Namespace) -> AsyncIterator[str]:
    """Yield the URL of each gateway's admin port, valid until the next one is requested."""
    for url in flags.gateway:
        yield url.rstrip("/")
    if flags.gateway:
        return
    cluster, namespace = connect(), flags.system_namespace
    selector = ",".join(f"{key}={value}" for key, value in names.GATEWAY_POD_LABELS.items())
    found = cluster.get(f"/api/v1/namespaces/{namespace}/pods", {"labelSelector": selector})
    for pod in found["items"]:
        if (pod.get("status") or {}).get("phase") == "Running":
            where = f"pod/{pod['metadata']['name']}"
            async with forwarded(namespace, where, names.GATEWAY_ADMIN_PORT, kubectl_flags(flags)) as url:
                yield url


async def _fetch(session: aiohttp.ClientSession, url: str, request_id: str) -> list[RequestReceipt]:
    """Return the receipts that this gateway keeps: one for each service that had a request with the id."""
    try:
        async with session.get(f"{url}{names.RECEIPT_PATH}?{urlencode({'id': request_id})}") as response:
            body = bytes(await read_answer(response.content, _MAX_PAGE_BYTES))
            if response.status == 404:
                return []
            if response.status != 200:
                raise Unanswered(f"{url} answers {response.status}")
            return msgspec.json.decode(body, type=list[RequestReceipt])
    except (aiohttp.ClientError, TimeoutError, AnswerTooLong, msgspec.DecodeError) as error:
        raise Unanswered(f"{url}: {error or type(error).__name__}") from error
