"""Tests which class a request gets, and its position in the class."""

import json
from typing import Any

import pytest
from tests.gateway.builders import make_known_service

from conveyor_api.queue import Queue
from conveyor_gateway.errors import Code, GatewayError
from conveyor_gateway.relaying.bodies import MAX_ROUTED_BYTES, NO_FIELDS, read_queue_fields
from conveyor_gateway.relaying.priority import Priority, choose_priority
from conveyor_gateway.relaying.work import estimate_work
from conveyor_gateway.watching.catalog import Service
from conveyor_gateway.watching.classes import parse_classes
from conveyor_protocol.request_headers import MAX_OFFSET_SECONDS

CLASSES = [{"name": "batch", "level": 100}, {"name": "chat", "level": 10}, {"name": "tools", "level": 20}]


def make_service(classes: list[dict[str, Any]] = CLASSES, **queue: Any) -> Service:
    parsed = parse_classes(Queue.model_validate({"classes": classes, **queue}))
    return make_known_service("default/qwen", classes=parsed, refuses_priority=not classes)


def choose(service: Service, named: str | None = None, /, timeout_seconds: float = 600.0, **body: Any) -> Priority:
    sent = json.dumps(body).encode()
    fields = read_queue_fields(sent)
    work = estimate_work(service, sent, fields, may_generate=True)
    return choose_priority(service, named, sent, fields, timeout_seconds, work)


def name_of(priority: Priority) -> str:
    return priority.request_class.name


@pytest.mark.parametrize(
    ("priority", "expected"),
    [(-5, "chat"), (0, "chat"), (10, "chat"), (11, "tools"), (20, "tools"), (21, "batch"), (10**30, "batch")],
)
def test_priority_means_the_class_of_the_nearest_level_at_or_above_it(priority: int, expected: str) -> None:
    assert name_of(choose(make_service(), priority=priority)) == expected


@pytest.mark.parametrize(
    "body", [{}, {"priority": None}, {"priority": "0"}, {"priority": 1.5}, {"messages": "priority"}]
)
def test_a_request_without_a_usable_priority_gets_the_default_class(body: dict[str, Any]) -> None:
    """The engine refuses a priority that is not a number."""
    assert name_of(choose(make_service(), **body)) == "batch"
    assert name_of(choose(make_service(defaultClass="tools"), **body)) == "tools"


def test_the_header_wins_over_the_body() -> None:
    assert name_of(choose(make_service(), "tools", priority=0)) == "tools"


def test_a_better_class_than_a_client_may_have_is_lowered() -> None:
    service = make_service(maxClass="tools", defaultClass="chat")
    assert name_of(choose(service)) == "tools"
    for priority in (choose(service, "chat"), choose(service, priority=0)):
        assert (name_of(priority), priority.is_lowered) == ("tools", True)
    assert not choose(service, "batch").is_lowered
    assert not choose(service).is_lowered, "the client named none"


@pytest.mark.parametrize(
    ("max_class", "expected"), [("", "chat"), ("chat", "chat"), ("tools", "tools"), ("batch", "batch"), ("x", "batch")]
)
def test_the_limit_of_a_key_lowers_the_class_and_an_unknown_name_is_the_strictest_limit(
    max_class: str, expected: str
) -> None:
    service = make_service()
    work = estimate_work(service, b"{}", NO_FIELDS, may_generate=True)
    assert name_of(choose_priority(service, "chat", b"{}", NO_FIELDS, 600.0, work, max_class)) == expected
    classless = make_service([])
    assert name_of(choose_priority(classless, None, b"{}", NO_FIELDS, 600.0, work, max_class)) == ""


@pytest.mark.parametrize("named", ["best", "", "Chat", "x" * 500])
def test_an_unknown_class_is_refused_with_those_that_there_are(named: str) -> None:
    with pytest.raises(GatewayError, match="its classes are chat, tools, batch") as caught:
        choose(make_service(), named)
    assert (caught.value.code, caught.value.param, len(str(caught.value)) < 300) == (
        Code.UNKNOWN_CLASS, "X-Request-Class", True,
    )  # fmt: skip
    with pytest.raises(GatewayError, match="it has no classes"):
        choose(make_service([]), named)


def test_without_classes_a_priority_is_refused_by_name() -> None:
    service = make_service([])
    with pytest.raises(GatewayError, match=r"spec\.queue\.classes; leave it out, or send 0") as caught:
        choose(service, priority=3)
    assert (caught.value.code, caught.value.param) == (Code.NO_CLASSES, "priority")
    for accepted in ({}, {"priority": 0}, {"priority": None}, {"prompt": 'say "priority": 3'}):
        assert choose(service, **accepted) == Priority(service.classes.default, 0.0, False)


def test_a_body_that_is_too_long_to_be_read_is_refused_only_if_it_has_a_priority() -> None:
    long = "x" * MAX_ROUTED_BYTES
    assert name_of(choose(make_service(), prompt=long)) == "batch"
    assert name_of(choose(make_service(), "chat", prompt=long, priority=1)) == "chat"
    with pytest.raises(GatewayError, match="name a class with X-Request-Class"):
        choose(make_service(), prompt=long, priority=1)


def test_a_shorter_time_out_counts_as_an_earlier_arrival_up_to_a_bound() -> None:
    offsets = [choose(make_service(), timeout_seconds=seconds).offset_seconds for seconds in (600.0, 595.0, 5.0)]
    assert offsets == [0.0, -5.0, -MAX_OFFSET_SECONDS]
    assert choose(make_service([]), timeout_seconds=5.0).offset_seconds == 0, "without classes nothing changes"


def test_shortest_first_orders_by_prompt_and_answer_up_to_a_bound() -> None:
    service = make_service(order="ShortestFirst")
    bodies = [
        {"max_tokens": 10},
        {"max_tokens": 9999, "max_completion_tokens": 100},
        {"max_output_tokens": 150},
        {"prompt": "x" * 4000, "max_tokens": 100},
        {"prompt": "x"},  # as long as the model's answers get
        {"max_tokens": 10**12},
    ]
    offsets = [choose(service, **body).offset_seconds for body in bodies]
    assert offsets == sorted(set(offsets))
    assert 0 < offsets[0] < offsets[-1] == MAX_OFFSET_SECONDS
    nothing = estimate_work(service, b"{}", NO_FIELDS, may_generate=False)
    assert choose_priority(service, None, b"{}", NO_FIELDS, 600.0, nothing).offset_seconds == 0.0
