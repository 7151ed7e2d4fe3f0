"""Decodes only the wanted fields of the API server's responses, so that other fields cost little.

Used by `watch`. Objects may be as large and as deep as the API server accepts. A page or an event is first split into
raw items, and each item is decoded into the fields that its `shape` (TypedDicts) names. msgspec skips the other fields
without building objects for them, but it does so by recursion. If a text is too deep for that, its deepest parts, which
no shape needs, are first replaced by null.
"""

import asyncio
import re
from collections.abc import Iterable
from typing import Any, Final, NotRequired, TypedDict, TypeVar

import msgspec

Json = dict[str, Any]

MAX_DEPTH: Final = 100  # above the depth of all wanted fields, including the list or event around them

_Decoded = TypeVar("_Decoded")
# A whole string is one token, so that brackets inside it do not count.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)


class Identity(TypedDict):
    """The fields that identify an object."""

    name: str
    namespace: NotRequired[str]


class Named(TypedDict):
    """The fields that every object has."""

    metadata: Identity


class _ListMetadata(msgspec.Struct):
    resource_version: str = msgspec.field(name="resourceVersion")
    more: str = msgspec.field(default="", name="continue")


class Page(msgspec.Struct):
    """One page of a list."""

    metadata: _ListMetadata
    items: list[msgspec.Raw] | None  # Go writes an empty list as null


class Event(msgspec.Struct):
    """One event of a watch."""

    type: str
    object: msgspec.Raw


class Status(msgspec.Struct):
    """Why the API server ended a watch."""

    code: int | None = None
    reason: str | None = None
    message: str | None = None


async def decode(text: bytes | bytearray, shape: type[_Decoded]) -> _Decoded:
    """Decode `text`, of any depth, as a `shape`. Raises ValueError."""
    try:
        return msgspec.json.decode(text, type=shape)
    except RecursionError:
        # This is slow, so it runs in a thread while the event loop serves other requests.
        return msgspec.json.decode(await asyncio.to_thread(cut_depth, text), type=shape)


def decode_item(item: msgspec.Raw, shape: Any) -> Json:
    """Return the object's fields that `shape` names; if the object does not fit the shape, only its identity.

    Raises ValueError if it has no identity.
    """
    wanted: Json
    try:
        wanted = msgspec.json.decode(item, type=shape)
    except (ValueError, RecursionError):
        wanted = msgspec.json.decode(cut_depth(bytes(item)), type=Named)
    return wanted


def cut_depth(text: bytes | bytearray, max_depth: int = MAX_DEPTH) -> bytes:
    """Return the JSON with null in place of each array and object that is deeper than `max_depth`."""
    kept, begin, depth = [], 0, 0
    for token in _TOKEN.finditer(text):
        bracket = token[0]
        if bracket in (b"{", b"["):
            depth += 1
            if depth == max_depth + 1:
                kept.append(text[begin : token.start()] + b"null")
        elif bracket in (b"}", b"]"):
            if depth == max_depth + 1:
                begin = token.end()
            depth -= 1
    kept.append(text[begin:])
    return b"".join(kept)


def find_key(body: Json) -> str:
    """Return the object's `namespace/name`."""
    metadata = body["metadata"]
    return f"{metadata['namespace']}/{metadata['name']}"


def keys_within(namespace: str, keys: Iterable[str]) -> set[str]:
    """Return the keys of one namespace, or all keys if `namespace` is empty."""
    return {key for key in keys if not namespace or key.startswith(f"{namespace}/")}
