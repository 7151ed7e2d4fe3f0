"""Finds the class of a request, and its order within the class. Pure.

Called by `request_life` after the body has arrived. A client names a class with the header `X-Request-Class`, or with
vLLM's `priority` in the body. The header takes precedence. A class more urgent than `queue.maxClass`, or than the
`maxClass` of the caller's key, is lowered to it.
"""

import math
from dataclasses import dataclass
from typing import Final

from conveyor_gateway.admission.ticket import Work
from conveyor_gateway.errors import Code, GatewayError
from conveyor_gateway.relaying.bodies import MAX_ROUTED_BYTES, QueueFields
from conveyor_gateway.watching.catalog import Service
from conveyor_gateway.watching.classes import QueueClass, QueueClasses
from conveyor_protocol.request_headers import CLASS_HEADER, MAX_OFFSET_SECONDS

# In JSON these bytes can only be a whole string, because quotes within a string are escaped.
_PRIORITY: Final = b'"priority"'
_LOG2_MOST_TOKENS: Final = 24.0  # above any model's context


@dataclass(frozen=True, slots=True)
class Priority:
    """The class of a request. In the class, the request counts as if it had arrived `offset_seconds` later."""

    request_class: QueueClass
    offset_seconds: float
    is_lowered: bool  # the client named a more urgent class than allowed


def choose_priority(
    service: Service,
    named_class: str | None,
    body: bytes,
    fields: QueueFields,
    timeout_seconds: float,
    work: Work,
    max_class: str = "",
) -> Priority:
    """Return the priority of a request whose `X-Request-Class` is `named_class`. Raises GatewayError.

    body: with the fields `fields`; empty if it is a form, whose fields have no effect on the order. max_class: the most
    urgent class that the caller may have; "" if the caller has no limit of its own.
    """
    classes = service.classes
    if named_class is not None:
        named: QueueClass | None = _find_named(classes, named_class)
    else:
        named = _find_by_priority(service, fields.priority, body)
    granted = classes.lower(named or classes.default, max_class)
    offset_seconds = 0.0
    if classes.is_shortest_first:
        offset_seconds = _delay_long(work.prompt_tokens + work.answer_tokens)
    elif classes.ordered:
        offset_seconds = -min(MAX_OFFSET_SECONDS, max(0.0, service.request_timeout_seconds - timeout_seconds))
    return Priority(granted, offset_seconds, named not in (None, granted))


def _find_named(classes: QueueClasses, name: str) -> QueueClass:
    found = classes.find_name(name)
    if found is None:
        known = ", ".join(each.name for each in classes.ordered)
        there_are = f"its classes are {known}" if known else "it has no classes (spec.queue.classes)"
        message = f"{CLASS_HEADER} names no class of this service: {name[:63]!r}; {there_are}"
        raise GatewayError(message, Code.UNKNOWN_CLASS, CLASS_HEADER)
    return found


def _find_by_priority(service: Service, priority: int | None, body: bytes) -> QueueClass | None:
    """Return the class for `priority`, or None without a priority.

    Raises GatewayError for a priority that has no effect.
    """
    if not service.classes.ordered and not service.refuses_priority:
        return None
    if len(body) > MAX_ROUTED_BYTES and _PRIORITY in body:
        message = f"priority works in bodies of at most {MAX_ROUTED_BYTES} bytes; name a class with {CLASS_HEADER}"
        raise GatewayError(message, Code.PRIORITY_NOT_READ, "priority")
    if service.classes.ordered:
        return None if priority is None else service.classes.find_priority(priority)
    if priority:
        message = "priority is not supported by this service, which has no spec.queue.classes; leave it out, or send 0"
        raise GatewayError(message, Code.NO_CLASSES, "priority")
    return None


def _delay_long(num_tokens: float) -> float:
    """Return an offset in seconds that grows with the length: twice the tokens add 1.25 s."""
    return MAX_OFFSET_SECONDS * min(math.log2(1 + num_tokens) / _LOG2_MOST_TOKENS, 1.0)
