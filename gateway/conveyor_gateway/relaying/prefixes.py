"""Finds the part of a request that decides which engine has its prompt's beginning in its prefix cache. Pure.

Called by `request_life`. `admission` sends requests with the same prefix to the same engine, as far as its load allows.
The prefix of a conversation is the same in each of its turns: the system messages, and the beginning of the first other
message. ADR 122 has the reasons.
"""

import hashlib
from collections.abc import Iterator
from typing import Final

import msgspec

from conveyor_gateway.relaying.bodies import QueueFields

# Of a first message or a prompt. OpenAI hashes about 256 tokens (https://developers.openai.com/api/docs/guides/prompt-caching).
MAX_BEGINNING_BYTES: Final = 1024
_SYSTEM_ROLES: Final = frozenset(("system", "developer"))


class _Message(msgspec.Struct):
    role: str = ""


_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_MESSAGE: Final = msgspec.json.Decoder(_Message)


def find_prefix(fields: QueueFields) -> int | None:
    """Return 64 bits that are the same for requests whose prompts begin alike; None if there is no prompt.

    Requests with different `model`, `cache_salt` or `prompt_cache_key` have different prefixes.
    """
    beginning = list(_find_beginning(fields.messages or fields.input or fields.prompt))
    if not beginning:
        return None
    names = (fields.model, fields.cache_salt, fields.prompt_cache_key, fields.system, fields.instructions)
    parts = b"\0".join([*names, *beginning])  # JSON contains no such byte
    return int.from_bytes(hashlib.blake2b(parts, digest_size=8).digest())


def _find_beginning(prompt: msgspec.Raw) -> Iterator[memoryview]:
    """Yield the system messages and the beginning of the first other message, or the beginning of another prompt."""
    for message in _split_messages(prompt):
        if not _is_system(message):
            yield memoryview(message)[:MAX_BEGINNING_BYTES]
            return
        yield memoryview(message)


def _split_messages(prompt: msgspec.Raw) -> list[msgspec.Raw]:
    """Return the messages. Any other prompt, such as a text or a list of tokens, counts as one message."""
    if _first_byte(prompt) != b"[":
        return [prompt] if _first_byte(prompt) else []
    items = _ITEMS.decode(prompt)
    return items if items and _first_byte(items[0]) == b"{" else [prompt]


def _first_byte(json: msgspec.Raw) -> bytes:
    return bytes(memoryview(json)[:1])  # without a copy of the rest


def _is_system(item: msgspec.Raw) -> bool:
    try:
        return _MESSAGE.decode(item).role in _SYSTEM_ROLES
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
