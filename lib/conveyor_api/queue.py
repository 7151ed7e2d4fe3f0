"""`spec.queue`: the queue in the gateways, its limits, order and classes.

The gateway reads it and sorts the queue. The operator reads it and reports the classes in `status.effective`.
"""

import re
from collections.abc import Callable
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from conveyor_api.base import ApiModel, KeyedBy, Rule
from conveyor_api.quantities import Duration, between, parse_duration_seconds
from conveyor_protocol.request_headers import LEVEL_MAX

MAX_CLASSES: Final = 16

_NAME_PATTERN: Final = "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"

QueueOrder = Literal["FIFO", "ShortestFirst"]
OnTimeout = Literal["Reject", "Delay"]
ClassName = Annotated[
    str,
    Field(max_length=63),
    Rule(
        f"self.matches('{_NAME_PATTERN}')",
        "must be a name of lower-case letters, digits and '-' such as batch",
        lambda value: re.fullmatch(_NAME_PATTERN, value) is not None,
    ),
]
ChosenClass = Annotated[str, Field(max_length=63)]
MaxRequests = Annotated[int, Field(ge=1, le=100_000)]
WaitTimeout = Annotated[Duration, between("1s", "1h")]


class RequestClass(ApiModel):
    """A class of requests. Clients select it with the header `X-Request-Class`, or with `priority` in the body."""

    name: ClassName
    """Name that clients give in `X-Request-Class`."""
    level: Annotated[int, Field(ge=0, le=LEVEL_MAX)]
    """Lower levels go first. Each minute of waiting counts as one level."""
    max_requests: MaxRequests | None = None
    """Limit of waiting requests of this class over all gateways. Requests beyond it get 429."""
    timeout: WaitTimeout | None = None
    """Longest wait of this class until an engine can take the request; default: `queue.timeout`."""
    on_timeout: OnTimeout = "Reject"
    """Action after `timeout`. Reject: 504. Delay: the request keeps waiting, at the level of the least urgent class,
    until `queue.timeout`."""
    max_share: Annotated[int, Field(ge=1, le=100)] | None = None
    """Limit of the requests of this class and of all less urgent ones at engines, in percent of all that engines
    accept. Each gateway may send one. Each engine also applies the limit to the rows and KV blocks of its batch."""

    @property
    def timeout_seconds(self) -> float | None:
        return None if self.timeout is None else parse_duration_seconds(self.timeout)


def _names_a_class(field: str, find_name: Callable[["Queue"], str | None]) -> Rule:
    return Rule(
        f"!has(self.{field}) || (has(self.classes) && self.classes.exists(c, c.name == self.{field}))",
        f"{field} must be the name of one of classes",
        lambda queue: find_name(queue) in (None, *(each.name for each in queue.classes)),
        field=field,
    )


def _delays_in_time(queue: "Queue") -> bool:
    delayed = [each for each in queue.classes if each.on_timeout == "Delay"]
    return all(each.timeout_seconds and each.timeout_seconds < queue.timeout_seconds for each in delayed)


class Queue(ApiModel):
    """Limits of the queue in the gateways."""

    rules: ClassVar = (
        Rule(
            "!has(self.classes) || self.classes.all(c, self.classes.exists_one(other, other.level == c.level))",
            "each class needs a different level",
            lambda queue: len({each.level for each in queue.classes}) == len(queue.classes),
            field="classes",
        ),
        Rule(
            "!has(self.classes) || self.classes.all(c, c.onTimeout != 'Delay' ||"
            " (has(c.timeout) && duration(c.timeout) < duration(self.timeout)))",
            "a class with onTimeout: Delay needs a timeout below queue.timeout, which ends its wait",
            _delays_in_time,
            field="classes",
        ),
        _names_a_class("defaultClass", lambda queue: queue.default_class),
        _names_a_class("maxClass", lambda queue: queue.max_class),
    )

    max_requests: MaxRequests = 1024
    """Limit of waiting requests over all gateways. Each gateway allows an equal share of it, at least one request.
    Requests beyond it get 429 with Retry-After. A gateway holds at most 1,568 requests of a namespace, those at engines
    included, unless its setting `--max-connections` is raised."""
    timeout: WaitTimeout = "60s"
    """Longest wait until an engine can take the request; then 504."""
    order: QueueOrder = "FIFO"
    """Order within a class. FIFO: by arrival; with `classes`, requests with a shorter time-out from the client go
    earlier. ShortestFirst: by expected tokens, the prompt's plus `max_tokens`. A request overtakes only requests that
    arrived at most half a minute before it."""
    classes: Annotated[list[RequestClass], Field(max_length=MAX_CLASSES), KeyedBy("name")] = Field(default_factory=list)
    """Classes of requests. Without classes all requests are equal."""
    default_class: ChosenClass | None = None
    """Class of requests that do not name one; default: the class with the highest level, which goes last."""
    max_class: ChosenClass | None = None
    """Most urgent class that clients may use. Requests that name a more urgent one get this one. Default: no limit."""

    @property
    def timeout_seconds(self) -> float:
        return parse_duration_seconds(self.timeout)

    @property
    def ordered_classes(self) -> list[RequestClass]:
        """Return the classes, the most urgent first."""
        return sorted(self.classes, key=lambda each: each.level)
