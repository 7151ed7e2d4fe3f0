"""Tests the page that lists whose requests wait."""

import asyncio

from tests.gateway.admission.queues import FAR
from tests.gateway.builders import NeverAsked
from tests.gateway.cluster import make_service

from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.pages.waiting import read_waiting
from conveyor_gateway.watching.catalog import Catalog


def make_queues(**spec: object) -> Queues:
    catalog = Catalog()
    queues = Queues(catalog, asyncio.get_running_loop(), NeverAsked(), Ledger(10_000), on_gone=lambda service: None)
    catalog.services.put(make_service("chat", "team", **spec))
    return queues


async def test_the_clients_that_wait_are_listed_by_class() -> None:
    queues = make_queues(queue={"classes": [{"name": "online", "level": 0}, {"name": "batch", "level": 5}]})
    classes = {each.name: each for _, queue in queues.items("team/chat") for each in queue.limits.classes.ordered}
    for name, client, number in (("online", "team/ann", 2), ("batch", "team/bob", 1), ("batch", "apps/*", 3)):
        for _ in range(number):
            queues["team/chat"].admit(FAR, classes[name], client=client)
    found = read_waiting(queues, "team/chat").clients
    assert sorted((each.request_class, each.client, each.queued) for each in found) == [
        ("batch", "apps/*", 3),
        ("batch", "team/bob", 1),
        ("online", "team/ann", 2),
    ]
    assert all(0 <= each.wait_seconds < 60 for each in found)
    assert read_waiting(queues, "team/other").clients == []


async def test_of_many_clients_those_that_wait_longest_are_listed_and_the_one_with_most_requests() -> None:
    queues = make_queues(queue={"maxRequests": 1000})
    for number in range(100):
        queues["team/chat"].admit(FAR, client=f"team/{number:03}")
    for _ in range(5):
        queues["team/chat"].admit(FAR, client="team/flood")
    found = read_waiting(queues, "team/chat").clients
    assert [each.client for each in found] == [*(f"team/{number:03}" for number in range(20)), "team/flood"]
    assert found[-1].queued == 5
