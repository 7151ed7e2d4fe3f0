"""Tests which bytes get room and which request is evicted."""

import pytest

from conveyor_gateway.capacity.reservations import MAX_EVICTIONS, Capacity, Reservation
from conveyor_gateway.errors import Code, GatewayError, TooManyRequests


def never() -> None:
    raise AssertionError("nobody has to go")


class Waiting:
    """A request that has arrived and waits for its answer."""

    def __init__(self, capacity: Capacity, service: str, client: str, size_bytes: int = 1, level: int = 0) -> None:
        self.is_evicted = False
        self.reservation = Reservation(capacity, service, client)
        assert self.reservation.reserve(size_bytes)
        self.reservation.hold_request(service, size_bytes, self.evict, level)

    def evict(self) -> None:
        self.is_evicted = True


class Upload:
    """A body that is still arriving."""

    def __init__(self, capacity: Capacity, service: str, client: str, size_bytes: int) -> None:
        self.stopped = False
        self.reservation = Reservation(capacity, service, client)
        self._arriving = self.reservation.arriving(self.stop)
        self._arriving.__enter__()
        self.was_reserved = self.reservation.reserve(size_bytes)

    def stop(self) -> None:
        self.stopped = True


def test_one_service_has_half_and_one_client_seven_eighths() -> None:
    capacity = Capacity(800)
    assert Reservation(capacity, "a/one", "10.0.0.1").reserve(400)
    assert not Reservation(capacity, "a/one", "10.0.0.2").reserve(1)
    assert Reservation(capacity, "a/two", "10.0.0.1").reserve(300)
    assert not Reservation(capacity, "a/three", "10.0.0.1").reserve(1)
    assert Reservation(capacity, "a/three", "10.0.0.2").reserve(100)
    assert not Reservation(capacity, "a/four", "10.0.0.3").reserve(1)


def test_the_client_that_holds_most_in_arriving_bodies_loses_its_largest() -> None:
    capacity = Capacity(800)
    small = Upload(capacity, "a/one", "10.0.0.1", 50)
    large = [Upload(capacity, service, "10.0.0.2", n) for service, n in (("a/one", 350), ("a/two", 345))]
    assert Upload(capacity, "a/three", "10.0.0.3", 60).was_reserved
    assert [each.stopped for each in (small, *large)] == [False, True, False]
    assert capacity.held_bytes == 50 + 345 + 60
    assert not large[0].reservation.reserve(1), "what was given up gets no more"


def test_the_largest_holder_loses_a_request_of_its_worst_class_first() -> None:
    capacity = Capacity(800)
    large = Waiting(capacity, "a/one", "10.0.0.2", 300)
    worse = [Waiting(capacity, "a/one", "10.0.0.2", size, level=7) for size in (30, 60)]
    Waiting(capacity, "a/two", "10.0.0.1", 300)
    assert Reservation(capacity, "a/three", "10.0.0.3").reserve(150)
    assert [each.is_evicted for each in (large, *worse)] == [False, False, True]
    assert Reservation(capacity, "a/four", "10.0.0.4").reserve(40)
    assert [each.is_evicted for each in (large, *worse)] == [False, True, True]


def test_where_one_service_is_full_only_its_own_arriving_bodies_give_way() -> None:
    capacity = Capacity(800)
    other = Upload(capacity, "a/two", "10.0.0.2", 300)
    own = Upload(capacity, "a/one", "10.0.0.1", 200)
    waiting = Reservation(capacity, "a/one", "10.0.0.1")
    assert waiting.reserve(200)
    assert Upload(capacity, "a/one", "10.0.0.3", 150).was_reserved
    assert (other.stopped, own.stopped) == (False, True)


def test_whoever_asks_is_refused_when_it_is_the_one_to_give_way() -> None:
    capacity = Capacity(800)
    assert Reservation(capacity, "a/one", "10.0.0.1").reserve(390)
    asking = Upload(capacity, "a/one", "10.0.0.1", 10)
    assert not asking.reservation.reserve(1)
    assert not asking.stopped


def test_all_is_given_back_at_the_end() -> None:
    capacity = Capacity(800)
    with Reservation(capacity, "", "10.0.0.1") as reservation:
        assert reservation.reserve(300)
        reservation.hold_request("a/one", 200, evict=never)
        assert capacity.held_bytes == 200
    assert capacity.held_bytes == 0
    assert Reservation(capacity, "a/one", "10.0.0.1").reserve(400)


def test_requests_of_the_largest_holder_make_room_for_others_newest_first() -> None:
    capacity = Capacity(800, max_requests=8)
    hogs = [Waiting(capacity, "a/one", "10.0.0.1") for _ in range(5)]
    small = [Waiting(capacity, "a/two", "10.0.0.2") for _ in range(3)]
    newcomer = Waiting(capacity, "a/three", "10.0.0.3")
    assert [each.is_evicted for each in hogs] == [False] * 4 + [True]
    assert not any(each.is_evicted for each in (*small, newcomer))


def test_behind_one_proxy_all_clients_are_one_and_the_largest_service_makes_room() -> None:
    capacity = Capacity(800, max_requests=16)
    hogs = [Waiting(capacity, "a/one", "10.0.0.1") for _ in range(12)]
    others = [Waiting(capacity, "a/two", "10.0.0.1") for _ in range(2)]
    Waiting(capacity, "a/three", "10.0.0.1")
    assert [each.is_evicted for each in (*hogs, *others)] == [False] * 11 + [True] + [False] * 2


def test_a_request_of_the_largest_holder_is_refused_itself() -> None:
    capacity = Capacity(800, max_requests=8)
    hogs = [Waiting(capacity, "a/one", "10.0.0.1") for _ in range(6)]
    with pytest.raises(TooManyRequests):
        Waiting(capacity, "a/one", "10.0.0.1")
    assert not any(each.is_evicted for each in hogs)


def test_a_request_whose_answer_has_begun_is_not_evicted() -> None:
    capacity = Capacity(800, max_requests=8)
    for service in ("a/one", "a/two", "a/three", "a/four"):
        for number in (1, 2):
            Waiting(capacity, service, f"10.0.0.{number}").reservation.protect()
    with pytest.raises(GatewayError) as caught:
        Waiting(capacity, "a/five", "10.0.0.3")
    assert caught.value.code == Code.TOO_MANY_CONNECTIONS


def test_bytes_of_requests_that_wait_make_room_too() -> None:
    capacity = Capacity(800)
    hogs = [Waiting(capacity, service, client, 190) for service in ("a/one", "a/two") for client in ("1", "2")]
    assert Upload(capacity, "a/three", "3", 100).was_reserved
    assert sum(each.is_evicted for each in hogs) == 1


def test_one_piece_evicts_a_few_at_most() -> None:
    capacity = Capacity(800)
    tiny = [Upload(capacity, "a/one", "10.0.0.1", 1) for _ in range(400)]
    assert not Upload(capacity, "a/one", "10.0.0.2", 200).was_reserved
    assert sum(each.stopped for each in tiny) <= MAX_EVICTIONS


def test_what_has_left_is_not_evicted() -> None:
    capacity = Capacity(800, max_requests=8)
    gone = Waiting(capacity, "a/one", "10.0.0.1")
    gone.reservation.__exit__()
    for number in range(8):
        Waiting(capacity, "a/two" if number < 4 else "a/one", f"10.0.0.{number}")
    Waiting(capacity, "a/three", "10.0.0.9")
    assert not gone.is_evicted
