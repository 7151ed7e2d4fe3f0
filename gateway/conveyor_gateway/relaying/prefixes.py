"""Finds the part of a request that decides which engine has its prompt's beginning in its prefix cache. Pure.

Called by `request_life`. `admission` sends requests with the same prefix to the same engine, as far as its load allows.
The prefix of a conversation is the same in each of its turns: the system messages, and the beginning of the first other
message. ADR 122 has the reasons, ADR 125 the limits of what is read, and ADR 162 what is read of an image.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from conveyor_gateway.relaying.bodies import QueueFields
from conveyor_gateway.relaying.images import sample_image
from conveyor_gateway.watching.catalog import Service

# Of a first message or a prompt. OpenAI hashes about 256 tokens (https://developers.openai.com/api/docs/guides/prompt-caching).
MAX_BEGINNING_BYTES: Final = 1024
MAX_MESSAGES: Final = 16  # further messages are not decoded
MAX_SYSTEM_BYTES: Final = 64 << 10  # hashed of all system messages and other fields together
_SYSTEM_ROLES: Final = frozenset((b'"system"', b'"developer"'))
_MAX_NAME_BYTES: Final = 1024
_MAX_ROLE_BYTES: Final = max(map(len, _SYSTEM_ROLES))
_ABSENT: Final = msgspec.Raw()


class _Enough(Exception):
    """Raised to stop decoding after the last message that counts."""


class _Message(msgspec.Struct):
    """A message. The decoder creates the messages of a list one by one, and each is added to `_decoded`."""

    role: msgspec.Raw = _ABSENT
    content: msgspec.Raw = _ABSENT

    def __post_init__(self) -> None:
        _decoded.append(self)
        if not self.is_system or len(_decoded) == MAX_MESSAGES:
            raise _Enough

    @property
    def is_system(self) -> bool:
        return bytes(memoryview(self.role)[: _MAX_ROLE_BYTES + 1]) in _SYSTEM_ROLES


_MESSAGES: Final = msgspec.json.Decoder(list[_Message])
_decoded: Final[list[_Message]] = []  # by the current call, because `__post_init__` gets no other context


def find_prefix(fields: QueueFields, service: Service) -> int | None:
    """Return 64 bits that are the same for requests whose prompts begin alike; None if there is no prompt.

    Requests with different `model`, `cache_salt` or `prompt_cache_key` have different prefixes. If the service has more
    adapters than its engines have slots, all requests with an adapter have one prefix, so that few engines load it.
    """
    prompt = fields.messages or fields.input or fields.prompt
    if not prompt:
        return None
    if service.adapters:
        name = bytes(memoryview(fields.model)[:_MAX_NAME_BYTES]).strip(b'"').decode(errors="replace")
        if adapter := service.find_scarce_adapter(name):
            return _hash(adapter.encode())
    messages = _read_messages(prompt)
    system = [message.content for message in messages if message.is_system]
    others = [message.content for message in messages if not message.is_system] if messages else [prompt]
    names = (fields.model, fields.cache_salt, fields.prompt_cache_key, fields.system, fields.instructions)
    beginning = (memoryview(other)[:MAX_BEGINNING_BYTES] for other in others)
    # Files of one camera or program begin alike, so the beginning does not tell them apart.
    samples = (sample_image(other, MAX_BEGINNING_BYTES) for other in others)
    # JSON contains no byte 0.
    parts = b"\0".join([*_cut((*names, *system), MAX_SYSTEM_BYTES), *beginning, *samples])
    return _hash(parts)


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())


def _read_messages(prompt: msgspec.Raw) -> list[_Message]:
    """Return the leading system messages and the first other one. Empty for any other prompt, such as a text."""
    _decoded.clear()
    with contextlib.suppress(_Enough, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        _MESSAGES.decode(prompt)
    return _decoded.copy()


def _cut(texts: Iterable[msgspec.Raw], most: int) -> Iterator[memoryview]:
    """Yield the texts, up to `most` bytes of all together."""
    for text in texts:
        kept = memoryview(text)[:most]
        most -= len(kept)
        yield kept
