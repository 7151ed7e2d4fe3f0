"""Tests that the queues of all services follow the limits in their InferenceServices."""

import asyncio

import pytest
from tests.gateway.builders import NeverAsked
from tests.gateway.cluster import make_service

from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.watching.catalog import Catalog


def make_queues(catalog: Catalog, max_requests: int = 1_000_000) -> Queues:
    ledger = Ledger(1, max_requests)
    return Queues(catalog, asyncio.get_running_loop(), NeverAsked(), ledger, on_gone=lambda key: None)


@pytest.mark.parametrize(("allowed", "gateways", "here"), [(7, 1, 7), (7, 3, 2), (1, 3, 1)])
async def test_a_gateway_takes_its_share_of_what_may_wait_and_at_least_one(
    allowed: int, gateways: int, here: int
) -> None:
    catalog = Catalog()
    queues = make_queues(catalog)
    catalog.services.put(make_service("before", "default", queue={"maxRequests": allowed}))
    queues.set_num_gateways(gateways)
    catalog.services.put(make_service("after", "default", queue={"maxRequests": allowed}))
    for name in ("before", "after"):
        assert queues[f"default/{name}"].limits.max_queued_requests == here


async def test_a_gateway_that_no_list_has_yet_takes_all_that_may_wait() -> None:
    catalog = Catalog()
    queues = make_queues(catalog)
    queues.set_num_gateways(0)
    catalog.services.put(make_service("qwen", "default", queue={"maxRequests": 7}))
    assert queues["default/qwen"].limits.max_queued_requests == 7


async def test_a_share_that_the_gateway_cannot_hold_is_logged_once_for_each_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    catalog = Catalog()
    make_queues(catalog, max_requests=11)  # one of them is for other namespaces
    for allowed in (10, 11, 11, 5, 11):
        catalog.services.put(make_service("qwen", "default", queue={"maxRequests": allowed}))
    logged = [each.message for each in caplog.records if "queue_limit_unreachable" in each.message]
    assert len(logged) == 2
    assert "service=default/qwen share=11 max_held=10" in logged[0]


async def test_new_shares_of_many_services_are_set_over_several_turns_of_the_loop() -> None:
    catalog = Catalog()
    queues = make_queues(catalog)
    for number in range(250):
        catalog.services.put(make_service(f"s{number}", "default", queue={"maxRequests": 10}))

    def count_changed() -> int:
        return sum(queue.limits.max_queued_requests == 5 for _, queue in queues.items())

    queues.set_num_gateways(2)
    catalog.services.delete(make_service("s249", "default"))
    changed = [count_changed()]
    for _ in range(4):
        await asyncio.sleep(0)
        changed.append(count_changed())
    assert changed == [100, 200, 249, 249, 249]
