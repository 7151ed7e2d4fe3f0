"""Tests which requests and bytes get room, and which holds are evicted for them."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor_gateway.capacity.ledger import MAX_EVICTIONS, Hold, Ledger
from conveyor_gateway.capacity.parts import Owner
from conveyor_gateway.errors import Code, GatewayError


class Request:
    """A request that has arrived and waits for its answer, or a body that is still arriving."""

    def __init__(
        self, ledger: Ledger, service: str, client: str, size_bytes: int = 0, level: int = 0, arriving: bool = False
    ) -> None:
        self.error: GatewayError | None = None
        self.hold: Hold = ledger.hold(Owner(service.partition("/")[0], service, client), self.evict)
        if arriving:
            self.hold.note_arriving()
        self.has_room = self.hold.reserve(size_bytes)
        if not arriving:
            self.hold.note_arrived(self.hold.owner._replace(service=service), size_bytes, level)

    def evict(self, error: GatewayError) -> None:
        assert self.error is None, "nobody is evicted twice"
        self.error = error

    @property
    def code(self) -> Code | None:
        return None if self.error is None else self.error.code


def codes(requests: list[Request]) -> list[Code | None]:
    return [each.code for each in requests]


def test_a_namespace_may_have_seven_eighths_and_the_rest_is_for_others() -> None:
    ledger = Ledger(800, max_requests=16)
    hogs = [Request(ledger, f"a/{n}", f"10.0.0.{n}", 50) for n in range(14)]
    with pytest.raises(GatewayError, match="no room for so many requests"):
        Request(ledger, "a/1", "10.0.0.1")
    others = [Request(ledger, "b/one", "10.0.1.1", 50), Request(ledger, "c/one", "10.0.1.2", 50)]
    assert codes(hogs + others) == [None] * 16
    assert (ledger.requests.total, ledger.bytes.total) == (16, 800)


def test_the_youngest_of_the_largest_namespace_makes_room_however_many_services_and_clients_it_has() -> None:
    ledger = Ledger(800, max_requests=16)
    hogs = [Request(ledger, f"a/{n}", f"10.0.0.{n}") for n in range(13)]
    others = [Request(ledger, "b/one", "10.0.1.1") for _ in range(3)]
    newcomer = Request(ledger, "c/one", "10.0.1.2")
    assert codes([*hogs, *others, newcomer]) == [None] * 12 + [Code.TOO_MANY_REQUESTS] + [None] * 4


def test_within_a_namespace_the_largest_service_makes_room_and_of_it_the_largest_client() -> None:
    ledger = Ledger(800, max_requests=8)
    few = [Request(ledger, "a/one", "10.0.0.1") for _ in range(2)]
    many = [Request(ledger, "a/one", "10.0.0.2") for _ in range(3)]
    other = [Request(ledger, "a/two", "10.0.0.2") for _ in range(2)]
    assert Request(ledger, "a/three", "10.0.0.2").code is None
    assert codes(few + many + other) == [None] * 4 + [Code.TOO_MANY_REQUESTS] + [None] * 2
    assert Request(ledger, "a/one", "10.0.0.3").code is None, "a client that has less than another one of its service"


def test_the_largest_owner_is_refused_itself() -> None:
    ledger = Ledger(800, max_requests=8)
    hogs = [Request(ledger, "a/one", "10.0.0.1") for _ in range(7)]
    with pytest.raises(GatewayError, match="no room for so many requests"):
        Request(ledger, "a/one", "10.0.0.1")
    assert codes(hogs) == [None] * 7


def test_two_namespaces_that_have_equal_parts_do_not_evict_each_other() -> None:
    ledger = Ledger(800, max_requests=8)
    held = [Request(ledger, f"{name}/one", "10.0.0.1") for name in "ab" for _ in range(4)]
    for name in "ab":
        with pytest.raises(GatewayError, match="no room for so many requests"):
            Request(ledger, f"{name}/one", "10.0.0.1")
    assert codes(held) == [None] * 8


def test_a_stream_that_has_begun_is_evicted_after_what_has_not_and_with_a_code_of_its_own() -> None:
    ledger = Ledger(800, max_requests=8)
    streams = [Request(ledger, "a/one", "10.0.0.1") for _ in range(6)]
    for each in streams[1:]:
        each.hold.note_begun()
    others = [Request(ledger, f"{name}/one", "10.0.0.2") for name in "bcde"]
    assert codes(streams) == [Code.TOO_MANY_REQUESTS] + [None] * 4 + [Code.EVICTED]
    assert codes(others) == [None] * 4


def test_of_one_client_s_holds_bodies_that_arrive_go_first_and_then_the_least_urgent_class() -> None:
    ledger = Ledger(800)
    large = Request(ledger, "a/one", "10.0.0.2", 300)
    worse = [Request(ledger, "a/one", "10.0.0.2", size, level=7) for size in (30, 60)]
    arriving = Request(ledger, "a/one", "10.0.0.2", 20, arriving=True)
    Request(ledger, "b/two", "10.0.0.1", 300)
    mine = [large, *worse, arriving]
    assert Request(ledger, "c/three", "10.0.0.3", 100).has_room
    assert codes(mine) == [None, None, None, Code.GATEWAY_MEMORY_FULL]
    assert Request(ledger, "d/four", "10.0.0.4", 40).has_room
    assert codes(mine) == [None, None, Code.GATEWAY_MEMORY_FULL, Code.GATEWAY_MEMORY_FULL]


def test_a_body_that_still_arrives_gives_way_to_one_of_its_own_client() -> None:
    ledger = Ledger(800)
    arriving = Request(ledger, "a/one", "10.0.0.1", 600, arriving=True)
    assert Request(ledger, "a/one", "10.0.0.1", 500).has_room
    assert arriving.code == Code.GATEWAY_MEMORY_FULL
    assert not arriving.hold.reserve(1), "what is evicted gets no more"


def test_whoever_is_evicted_cannot_come_back_with_its_hold() -> None:
    ledger = Ledger(800, max_requests=8)
    hogs = [Request(ledger, "a/one", "10.0.0.1", arriving=True) for _ in range(7)]
    Request(ledger, "b/one", "10.0.0.2")
    Request(ledger, "c/one", "10.0.0.2")
    with pytest.raises(GatewayError, match="no room for so many requests"):
        hogs[-1].hold.note_arrived(hogs[-1].hold.owner._replace(namespace="d", service="d/one"), 0)
    assert Counter(ledger.requests.namespaces) == {"a": 6, "b": 1, "c": 1}


def test_all_is_given_back_at_the_end() -> None:
    ledger = Ledger(800)
    with ledger.hold(Owner("", "", "10.0.0.1"), lambda error: None) as hold:
        assert hold.reserve(300)
        hold.note_arrived(hold.owner._replace(namespace="a", service="a/one"), 200)
        assert (ledger.bytes.total, ledger.bytes.namespaces) == (200, {"a": 200})
    assert (ledger.bytes.total, ledger.requests.total) == (0, 0)
    assert (ledger.bytes.namespaces, ledger.requests.namespaces) == ({}, {})


def test_one_piece_evicts_a_few_at_most() -> None:
    ledger = Ledger(800)
    tiny = [Request(ledger, "a/one", "10.0.0.1", 1, arriving=True) for _ in range(700)]
    assert not Request(ledger, "b/one", "10.0.0.2", 200, arriving=True).has_room
    assert sum(each.error is not None for each in tiny) == MAX_EVICTIONS


class Tenants:
    """Tenants that do whatever a random generator says. Every one of their holds is in `held`, youngest last."""

    def __init__(self, rng: random.Random, ledger: Ledger, names: str) -> None:
        self.rng, self.ledger, self.names = rng, ledger, names
        self.held: list[Request] = []

    def act(self) -> None:
        rng, self.held = self.rng, [each for each in self.held if each.error is None]
        each = rng.choice(self.held) if self.held else None
        match rng.randrange(8):
            case 0 if each is not None:
                each.hold.__exit__()
                self.held.remove(each)
            case 1 if each is not None:
                each.hold.note_begun()
            case 2 if each is not None:
                each.hold.reserve(rng.randrange(1, 5000))
            case 3 if each is not None:
                each.hold.shrink(rng.randrange(0, each.hold.size_bytes + 1))
            case _:
                name = rng.choice(self.names)
                try:
                    client, arriving = f"10.0.0.{rng.randrange(40)}", rng.random() < 0.5
                    service = f"{name}/{rng.randrange(20)}" if rng.random() < 0.8 else ""
                    request = Request(self.ledger, service, client, rng.randrange(3000), rng.randrange(3), arriving)
                except GatewayError:
                    return
                if request.error is None:
                    self.held.append(request)


@given(st.integers(0, 2**32), st.integers(8, 64), st.integers(1, 4))
def test_a_tenant_inside_its_part_is_never_refused_or_evicted_whatever_the_others_do(
    seed: int, max_requests: int, num_others: int
) -> None:
    """The others have any number of services, clients and holds of any kind, also at the root."""
    rng, max_bytes = random.Random(seed), 64_000
    ledger = Ledger(max_bytes, max_requests)
    others = Tenants(rng, ledger, "abcd"[:num_others])
    num_namespaces = num_others + 2  # with the root's, and with "mine"
    mine: list[Request] = []
    for _ in range(150):
        others.act()
        if mine and rng.random() < 0.3:
            mine.pop(rng.randrange(len(mine))).hold.__exit__()
        my_bytes, size_bytes = sum(each.hold.size_bytes for each in mine), rng.randrange(500)
        is_inside = (
            len(mine) + 1 <= max_requests // num_namespaces and my_bytes + size_bytes <= max_bytes // num_namespaces
        )
        if rng.random() < 0.5 and is_inside:
            before = [each for each in others.held if each.error is None]
            request = Request(ledger, "mine/one", "10.0.1.1", size_bytes)
            assert request.has_room
            mine.append(request)
            check_victims(before)
        assert codes(mine) == [None] * len(mine)
        assert ledger.requests.total <= max_requests
        assert ledger.bytes.total <= max_bytes
        assert max([0, *ledger.requests.namespaces.values()]) <= ledger.requests.most_of_namespace


def check_victims(before: list[Request]) -> None:
    """Check that no one was evicted whose owner has an equal but younger hold."""
    for victim in (each for each in before if each.error is not None):
        hold = victim.hold
        for other in before:
            same = (other.hold.owner, other.hold.rank) == (hold.owner, hold.rank)
            if same and other.error is None and victim.code == Code.TOO_MANY_REQUESTS:
                assert other.hold.number < hold.number
