"""Decodes the wanted members of what the API server sends, at the cost of those members.

Used by `watch`. An object may be as large and as deep as the API server takes it, so only wanted members are built: a
page and an event are split into raw items, and an item is decoded into the members that its `shape` (TypedDicts) names.
msgspec skips the rest without making an object of it, but by recursion: text that is too deep for that loses what lies
below any member that is wanted, and is decoded then.
"""

import asyncio
import re
from collections.abc import Iterable
from typing import Any, Final, NotRequired, TypedDict, TypeVar

import msgspec

Json = dict[str, Any]

MAX_DEPTH: Final = 100  # nothing that is wanted lies as deep, with the list or the event around it

_Decoded = TypeVar("_Decoded")
# A string is one token, so that the brackets in it do not count.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)


class Identity(TypedDict):
    """Which object it is."""

    name: str
    namespace: NotRequired[str]
    resourceVersion: NotRequired[str]


class Named(TypedDict):
    """The members that every object has."""

    metadata: Identity


class _Version(TypedDict):
    resourceVersion: str


class Bookmark(TypedDict):
    """A bookmark event: the resource version from which a watch can resume. It contains no object."""

    metadata: _Version


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
    """`text` as a `shape`, whatever its depth. Raises ValueError."""
    try:
        return msgspec.json.decode(text, type=shape)
    except RecursionError:
        # This is slow, so it runs in a thread, and other requests go on meanwhile.
        return msgspec.json.decode(await asyncio.to_thread(cut_depth, text), type=shape)


def decode_item(item: msgspec.Raw, shape: Any) -> Json:
    """The members of an object that `shape` names; of one that has another shape its identity. Raises ValueError."""
    wanted: Json
    try:
        wanted = msgspec.json.decode(item, type=shape)
    except (ValueError, RecursionError):
        wanted = msgspec.json.decode(cut_depth(bytes(item)), type=Named)
    return wanted


def cut_depth(text: bytes | bytearray, max_depth: int = MAX_DEPTH) -> bytes:
    """The same JSON with null for every array and object that lies deeper than `max_depth`."""
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
    """`namespace/name`."""
    metadata = body["metadata"]
    return f"{metadata['namespace']}/{metadata['name']}"


def keys_within(namespace: str, keys: Iterable[str]) -> set[str]:
    """Return the keys of one namespace, or all keys if `namespace` is empty."""
    return {key for key in keys if not namespace or key.startswith(f"{namespace}/")}
