"""Which class a request has, and how it is ordered within its class. Pure.

Called by `request_life` once the body is here. A client names a class by the header `X-Request-Class`, or by vLLM's
`priority` in the body; the header wins. Nobody is identified, so a class better than `queue.maxClass` is lowered to it.
"""

import math
from dataclasses import dataclass
from typing import Final

from conveyor_gateway.errors import Code, InvalidRequest
from conveyor_gateway.relaying.bodies import MAX_ROUTED_BYTES, read_order_fields
from conveyor_gateway.watching.catalog import Service
from conveyor_gateway.watching.classes import QueueClass
from conveyor_protocol.request_headers import CLASS_HEADER, MAX_OFFSET_SECONDS

# No JSON text holds these bytes but as a string of its own: a quote within a string is escaped. Searching them costs
# 0.1 ms for a MiB at most; only a body that has them is parsed.
_PRIORITY: Final = b'"priority"'
_BYTES_PER_TOKEN: Final = 4
_UNKNOWN_LENGTH_TOKENS: Final = 4096
_LOG2_MOST_TOKENS: Final = 24.0  # more than any model takes


@dataclass(frozen=True, slots=True)
class Priority:
    """The class of a request; within it, how many seconds earlier (negative) or later it counts as having arrived."""

    request_class: QueueClass
    offset_seconds: float
    is_lowered: bool  # the client named a better class than it may have


def choose_priority(
    service: Service, named_class: str | None, body: bytes, timeout_seconds: float, may_generate: bool
) -> Priority:
    """The priority of a request whose `X-Request-Class` is `named_class`. Raises InvalidRequest."""
    classes = service.classes
    named = _find_named(service, named_class, body)
    granted = classes.lower(named or classes.default)
    offset_seconds = 0.0
    if classes.is_shortest_first:
        offset_seconds = _delay_long(_expect_tokens(service, body, may_generate))
    elif classes.ordered:
        offset_seconds = -min(MAX_OFFSET_SECONDS, max(0.0, service.request_timeout_seconds - timeout_seconds))
    return Priority(granted, offset_seconds, named not in (None, granted))


def _find_named(service: Service, named_class: str | None, body: bytes) -> QueueClass | None:
    """The class that the client names. None: it names none."""
    classes = service.classes
    if named_class is not None:
        if (found := classes.find_name(named_class)) is not None:
            return found
        known = ", ".join(each.name for each in classes.ordered)
        there_are = f"there are {known}" if known else "this service has no classes (spec.queue.classes)"
        message = f"{CLASS_HEADER} names no class of this service: {named_class[:63]!r}; {there_are}"
        raise InvalidRequest(message, Code.UNKNOWN_CLASS, CLASS_HEADER)
    if not (classes.ordered or service.refuses_priority) or _PRIORITY not in body:
        return None
    if len(body) > MAX_ROUTED_BYTES:
        message = f"a body above {MAX_ROUTED_BYTES} bytes is not read for priority; name a class by {CLASS_HEADER}"
        raise InvalidRequest(message, Code.PRIORITY_NOT_READ, "priority")
    priority = read_order_fields(body).priority
    if classes.ordered:
        return None if priority is None else classes.find_priority(priority)
    if priority:  # the service refuses it
        message = "priority is not supported by this service, which has no spec.queue.classes; leave it out, or send 0"
        raise InvalidRequest(message, Code.NO_CLASSES, "priority")
    return None


def _expect_tokens(service: Service, body: bytes, may_generate: bool) -> int:
    """Tokens of prompt and answer, as far as the gateway can tell."""
    prompt_tokens = len(body) // _BYTES_PER_TOKEN
    if not may_generate:
        return prompt_tokens
    fields = read_order_fields(body) if len(body) <= MAX_ROUTED_BYTES else None
    answer_tokens = fields.num_answer_tokens if fields else None
    if answer_tokens is None:
        answer_tokens = service.max_model_len or _UNKNOWN_LENGTH_TOKENS
    return prompt_tokens + max(0, answer_tokens)


def _delay_long(num_tokens: int) -> float:
    """Seconds that grow with the length: a request that is twice as long counts as having come 1.25 s later."""
    return MAX_OFFSET_SECONDS * min(math.log2(1 + num_tokens) / _LOG2_MOST_TOKENS, 1.0)
