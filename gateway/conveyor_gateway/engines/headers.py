"""Selects the headers that pass between clients and engines, from one list for each direction.

Called by `exchange` for answers, by `relaying` for requests and by `fetching` for content types. An engine runs its
owner's image, and all services share one origin. So engines do not get the clients' credentials, and they cannot set
headers on which a browser or a proxy acts. ADR 58 has the reasons.
"""

from functools import lru_cache
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

from conveyor_api.names import engine_name
from conveyor_process.tracing import TRACE_PARENT_HEADER
from conveyor_protocol.open_inference import JSON_LENGTH_HEADER
from conveyor_protocol.request_headers import RECEIPT_HEADER, REQUEST_ID_HEADER, USAGE_HEADER

EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
# With these headers, proxies forward the answer without buffering it.
EVENT_STREAM_HEADERS: Final = {"Content-Type": EVENT_STREAM, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

_TO_ENGINES: Final = frozenset(
    [
        "accept",
        "accept-encoding",
        "content-type",
        TRACE_PARENT_HEADER,  # W3C Trace Context, which vLLM continues
        "tracestate",
        "user-agent",
        JSON_LENGTH_HEADER.lower(),
    ]
)
_TO_CLIENTS: Final = frozenset(
    [
        "content-encoding",
        "content-length",
        "retry-after",
        "warning",  # the keywords of a JSON schema that the answer might not follow
        "metadata",  # vLLM's description of embeddings that are sent as bytes
        JSON_LENGTH_HEADER.lower(),
        RECEIPT_HEADER.lower(),
    ]
)
_CONTENT_TYPES: Final = {
    "application/json": "application/json",
    "text/event-stream": EVENT_STREAM,
    "text/plain": "text/plain; charset=utf-8",
}
_NO_DOCUMENT: Final = "application/octet-stream"  # browsers save this type and do not show it


def build_engine_headers(headers: CIMultiDictProxy[str], request_id: str, usage_key: str) -> CIMultiDict[str]:
    """Return the headers for an engine: the allowed ones of the client, and the gateway's own for this request."""
    kept = _select(headers, _TO_ENGINES)
    kept[REQUEST_ID_HEADER], kept[USAGE_HEADER] = request_id, usage_key
    return kept


@lru_cache(1024)
def find_host(service: str, address: str) -> str:
    """Return the header `Host` for the engine at `address`: the name and port of its Service, which meshes route by.

    service: `namespace/name`; if it is "", return the address.
    """
    namespace, _, name = service.partition("/")
    return f"{engine_name(name)}.{namespace}.svc:{address.rpartition(':')[2]}" if name else address


def build_answer_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return the headers for a client: the allowed ones of the engine, with one of the gateway's content types."""
    kept = _select(headers, _TO_CLIENTS)
    content_type = kept["Content-Type"] = choose_content_type(headers.get("Content-Type", ""))
    if content_type == EVENT_STREAM:
        kept.popall("Content-Length", None)  # the gateway may add an event with the reason why the stream ends
        kept.update(EVENT_STREAM_HEADERS)
    return kept


def choose_content_type(given: str) -> str:
    """Return the content type that a client gets if an engine's content type is `given`."""
    return _CONTENT_TYPES.get(given.partition(";")[0].strip().lower(), _NO_DOCUMENT)


def _select(headers: CIMultiDictProxy[str], allowed: frozenset[str]) -> CIMultiDict[str]:
    """Return the allowed headers, except those that `Connection` names for this hop only (RFC 9110, 7.6.1)."""
    for named in headers.getall("Connection", ()):
        allowed = allowed - {name.strip().lower() for name in named.split(",")}
    kept = CIMultiDict[str]()
    for name, value in headers.items():
        if name.lower() in allowed and value.isascii() and value.isprintable():
            kept.add(name, value)
    return kept
