"""Tests who holds most bytes, against a scan of all holders, after any history."""

from collections import Counter
from dataclasses import dataclass
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from conveyor_gateway.capacity.shares import Amounts, Shares

KEYS = st.sampled_from("abcde")


@given(st.lists(st.tuples(KEYS, st.integers(-3, 5)), max_size=200))
def test_the_largest_is_the_one_that_a_scan_finds(changes: list[tuple[str, int]]) -> None:
    amounts, model = Amounts[str](), Counter[str]()
    for key, amount in changes:
        amount = max(amount, -model[key])
        amounts.add(key, amount)
        model[key] += amount
        largest = amounts.find_largest()
        assert (largest is None) == (not any(model.values()))
        assert amounts[largest or ""] == max(model.values())
        assert len(amounts._heap) <= 2 * len(amounts) + 16


@dataclass(eq=False)
class Request:
    service: str
    client: str
    level: int = 0


REQUESTS = st.builds(Request, KEYS, KEYS, st.integers(0, 2))


@given(
    st.lists(st.tuples(REQUESTS, st.integers(1, 5), st.booleans()), min_size=1, max_size=60),
    st.integers(1, 5),
    st.data(),
)
def test_the_victim_is_of_the_largest_holder(
    added: list[tuple[Request, int, bool]], max_changes: int, data: st.DataObject
) -> None:
    """The victim is of the service or client that holds more; within it, of the largest client or service.

    It is the largest request of that holder's least urgent level, however many changes are applied together, and
    whether or not a victim was looked for before.
    """
    shares, held, newcomer = Shares[Request](1 << 40, 1 << 40, 1 << 40), dict[Request, int](), Request("new", "new")
    with mock.patch("conveyor_gateway.capacity.shares.MAX_CHANGES", max_changes):
        for request, amount, looks in added:
            held[request] = amount
            shares.add(request, amount, is_evictable=True)
            if looks:
                shares.find_victim(newcomer, 1)
        for request in data.draw(st.lists(st.sampled_from([*held]), unique=True, max_size=len(held) - 1)):
            shares.add(request, -held.pop(request), is_evictable=True)
    victim = shares.find_victim(newcomer, 1)
    assert victim is not None

    def total(**wanted: str) -> int:
        return sum(n for each, n in held.items() if all(getattr(each, k) == v for k, v in wanted.items()))

    services, clients = {each.service for each in held}, {each.client for each in held}
    of_service, of_client = total(service=victim.service), total(client=victim.client)
    pair = total(service=victim.service, client=victim.client)
    if of_client == max(total(client=client) for client in clients) >= max(total(service=s) for s in services):
        assert pair == max(total(service=service, client=victim.client) for service in services)
    else:
        assert of_service == max(total(service=service) for service in services)
        assert pair == max(total(service=victim.service, client=client) for client in clients)
    of_holder = [each for each in held if (each.service, each.client) == (victim.service, victim.client)]
    assert victim.level == max(each.level for each in of_holder)
    assert held[victim] == max(held[each] for each in of_holder if each.level == victim.level)


def test_a_request_whose_service_and_level_become_known_is_found_there_and_nowhere_else() -> None:
    """A search in between has already applied what the request held for the unknown service."""
    shares, newcomer = Shares[Request](1 << 40, 1 << 40, 1 << 40), Request("new", "new")
    request, other = Request("", "client"), Request("", "client", level=1)
    shares.add(request, 5, is_evictable=True)
    assert shares.find_victim(newcomer, 1) is request
    shares.add(request, -5, is_evictable=True)
    request.service, request.level = "service", 2
    shares.add(request, 5, is_evictable=True)
    shares.add(other, 4, is_evictable=True)
    assert shares._evictable.find_largest("", None) is other
    assert shares._evictable.find_largest("service", None) is request
    shares.add(other, -4, is_evictable=True)
    shares.add(request, -5, is_evictable=True)
    assert shares.find_victim(newcomer, 1) is None
