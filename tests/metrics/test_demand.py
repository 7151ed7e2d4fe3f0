"""Tests the sum of the gateways' reports, in which each request counts once."""

from typing import Any

import msgspec
import pytest
from msgspec import structs

from conveyor_metrics.demand import ClassSum, sum_demand
from conveyor_metrics.errors import NotFound
from conveyor_protocol.pages import Demand, Replicas, Targets


def make_demand(in_flight: int, depth: int, **engines: tuple[int | str | None, ...]) -> Demand:
    """One gateway's; of each engine what it has dispatched, and what the engine says: what waits, what it carries, and
    why."""
    keys = ("dispatched", "waiting", "carried", "limit_reason")
    at = {name: dict(zip(keys, values, strict=False)) for name, values in engines.items()}
    service: dict[str, Any] = {"in_flight": in_flight, "queue_depth": depth, "batch_size": 4, "engines": at}
    return msgspec.convert({"services": {"default/qwen": service}}, Demand)


@pytest.mark.parametrize(
    ("demands", "depth"),
    [
        ([make_demand(10, 5, a=(5, 1))], 6),
        ([make_demand(5, 0, a=(5, 6)), make_demand(5, 0, a=(5, 6))], 6),  # it is the same six
        ([make_demand(5, 0, a=(5, 5)), make_demand(5, 0, a=(5, 6))], 6),  # asked a moment apart
        ([make_demand(5, 0, a=(5, None)), make_demand(5, 0, a=(5, 6))], 6),  # once it answered too late
        ([make_demand(5, 0, a=(5, None)), make_demand(5, 0, a=(5, None))], 6),  # it never says
        ([make_demand(9, 3, a=(2, None), b=(4, None))], 3),
        ([make_demand(9, 3, a=(2, 2), b=(4, 0))], 5),  # one that cannot run two at once
        ([make_demand(5, 0, a=(5, 10**12))], 5),  # never more than is there
        ([make_demand(5, 0)], 0),
    ],
)
def test_each_waiting_request_counts_once_wherever_it_waits(demands: list[Demand], depth: int) -> None:
    found = sum_demand("default/qwen", demands)
    in_flight = sum(demand.services["default/qwen"].in_flight for demand in demands)
    assert (found.in_flight, found.queue_depth) == (in_flight, depth)


@pytest.mark.parametrize(
    ("demands", "in_flight", "depth"),
    [
        ([make_demand(10, 5, a=(5, 1, 2))], 20, 12),  # a batch of 4 of which the cache carries half
        ([make_demand(5, 2, a=(5, 1, 2)), make_demand(5, 3, a=(5, 1, 2))], 20, 12),
        ([make_demand(10, 0, a=(5, 0, 1), b=(5, 0, 3))], 20, 0),
        ([make_demand(10, 0, a=(5, 0, 2), b=(5, 0, None))], 20, 0),  # it was not short, or is new
        ([make_demand(10, 0, a=(5, 0, 3))], 14, 0),  # rounded up
        ([make_demand(10, 0, a=(5, 0, 10**12))], 10, 0),  # never more than a batch
        ([make_demand(10, 10)], 10, 10),
    ],
)
def test_a_request_counts_for_as_many_places_as_it_takes_of_a_full_batch(
    demands: list[Demand], in_flight: int, depth: int
) -> None:
    found = sum_demand("default/qwen", demands)
    assert (found.in_flight, found.queue_depth) == (in_flight, depth)


@pytest.mark.parametrize(
    ("demands", "limit", "reasons"),
    [
        ([make_demand(9, 0, a=(5, 0, 2, "missed"))], 2, {"missed": 1}),
        ([make_demand(9, 0, a=(5, 0, 2, "missed")), make_demand(9, 0, a=(5, 0, 2, "slack"))], 2, {"missed": 1}),
        ([make_demand(9, 0, a=(5, 0, 2, "missed"), b=(5, 0, 3, "missed"), c=(1, 0, None, "declared"))], 2,
         {"missed": 2, "declared": 1}),
        ([make_demand(9, 0, a=(5, 0, None, "declared"))], 4, {"declared": 1}),
        ([make_demand(9, 0, a=(5, None))], 4, {}),
        ([make_demand(9, 0)], 4, {}),
    ],
)  # fmt: skip
def test_an_engine_s_limit_counts_once_with_its_reason(
    demands: list[Demand], limit: int, reasons: dict[str, int]
) -> None:
    found = sum_demand("default/qwen", demands)
    assert (found.running_limit, found.limited_engines) == (limit, reasons)


def test_a_gateway_of_an_earlier_release_is_summed_with_the_fields_that_it_has() -> None:
    old = msgspec.convert({"services": {"default/qwen": {"in_flight": 2, "queue_depth": 1, "queued": 1}}}, Demand)
    assert sum_demand("default/qwen", [old, make_demand(5, 0, a=(5, 1))]).queue_depth == 2


def test_a_service_that_no_gateway_knows_is_not_found() -> None:
    with pytest.raises(NotFound):
        sum_demand("default/gone", [make_demand(1, 1), Demand(services={})])


def test_of_each_class_what_waits_is_added_up_and_the_longest_wait_counts() -> None:
    def make(**classes: tuple[int, float]) -> Demand:
        documents = {name: {"queued": queued, "wait_seconds": seconds} for name, (queued, seconds) in classes.items()}
        return msgspec.convert(
            {"services": {"default/qwen": {"in_flight": 9, "queue_depth": 9, "classes": documents}}}, Demand
        )

    found = sum_demand("default/qwen", [make(chat=(1, 0.5), batch=(4, 7.9)), make(chat=(2, 3.2), new=(1, 1.0))])
    assert found.classes == {"chat": ClassSum(3, 3), "batch": ClassSum(4, 7), "new": ClassSum(1, 1)}
    assert sum_demand("default/qwen", [make_demand(1, 1)]).classes == {}, "a gateway of an earlier release"


def see_replicas(demand: Demand, ready: int, starting: int, desired: int = 1, from_start: int = 0) -> Demand:
    """Add what the gateway sees of a service with a batch of 4 and the default targets."""
    service = demand.services["default/qwen"]
    replicas, targets = Replicas(ready, starting, desired), Targets(3.0, 1.0)
    return Demand({"default/qwen": structs.replace(service, replicas=replicas, targets=targets, from_start=from_start)})


@pytest.mark.parametrize(
    ("demands", "in_flight", "depth"),
    [
        # Four requests at zero, wherever they wait: the places of the starting engine are left out once.
        ([see_replicas(make_demand(4, 4), 0, 1)], 3, 0),
        ([see_replicas(make_demand(3, 3), 0, 1), see_replicas(make_demand(1, 1), 0, 1)], 3, 0),
        ([see_replicas(make_demand(2, 2), 0, 1), see_replicas(make_demand(2, 2), 0, 1)] * 2, 6, 2),
        # One gateway has not seen yet that the engine is ready, or is of an earlier release.
        ([see_replicas(make_demand(3, 0, a=(3, 0)), 1, 0), see_replicas(make_demand(1, 1), 0, 1)], 4, 0),
        ([see_replicas(make_demand(2, 2), 0, 1), make_demand(2, 2)], 3, 0),
        ([make_demand(4, 4), make_demand(1, 1)], 5, 5),
        # A burst on one engine, before the HPA has decided and after it.
        ([see_replicas(make_demand(10, 5, a=(5, 1)), 1, 0)], 10, 6),
        ([see_replicas(make_demand(10, 5, a=(5, 1)), 1, 2, 3)], 10, 0),
        ([see_replicas(make_demand(17, 12, a=(5, 1)), 1, 2, 3)], 15, 5),
        # Engines run two of a batch of four, so eight requests are sixteen places.
        ([see_replicas(make_demand(8, 4, a=(4, 0, 2)), 1, 1, 2)], 15, 4),
        # The requests from zero fill the batch of the first engine; others are compared with the target.
        ([see_replicas(make_demand(4, 0, a=(4, 0)), 1, 0, from_start=4)], 3, 0),
        ([see_replicas(make_demand(4, 0, a=(4, 0)), 1, 0, from_start=1)], 4, 0),
        ([see_replicas(make_demand(12, 8, a=(4, 0)), 1, 2, 3, from_start=4)], 9, 0),
        ([see_replicas(make_demand(9, 4, a=(5, 1)), 1, 0, from_start=5)], 9, 5),
        # Nothing can start.
        ([see_replicas(make_demand(20, 20), 0, 0)], 3, 1),
    ],
)
def test_requests_for_starting_engines_are_left_out_once(demands: list[Demand], in_flight: int, depth: int) -> None:
    found = sum_demand("default/qwen", demands)
    assert (found.in_flight, found.queue_depth) == (in_flight, depth)
    assert found.requests >= found.in_flight
    assert found.waiting >= found.queue_depth
