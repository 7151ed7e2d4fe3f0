"""Compares the waiting queue's order with a search through a list, and tests the guarantees of the order."""

import math
from collections.abc import Callable
from itertools import count, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.builders import make_state, names_of
from tests.lines_run import count_lines

from conveyor_engine.scheduling.ordered import Key, Ordered
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.waiting_queue import WaitingQueue
from conveyor_protocol.request_headers import LEVEL_AGEING_SECONDS

PARTIES = "abcdef"
LEVELS = dict(zip(PARTIES, (0, 0, 0, 1, 1, 9), strict=True))
TIMEOUTS = dict(zip(PARTIES, (math.inf, 600.0, 2.0, math.inf, 5.0, math.inf), strict=True))


class Listed:
    """The same queue as a list that is searched completely."""

    def __init__(self, bucket_of: Callable[[RequestState], int]) -> None:
        self._bucket_of = bucket_of
        self._turns = count(1)
        self._last: dict[str, Key] = {}  # by party: when the newest of its level came at its last turn, and its number
        self._newest: dict[int, float] = {}
        self._fresh: list[RequestState] = []  # in order of arrival
        self._preempted: list[RequestState] = []
        self._admitted: dict[str, Key] = {}

    def _take(self, request: RequestState) -> None:
        self._last[request.party] = (self._newest[request.level], next(self._turns))

    def _key(self, request: RequestState, last: Key) -> Key:
        return (last[0] + 60 * request.level + min(60, request.deadline - request.arrival_time), last[1])

    def add(self, request: RequestState) -> None:
        self._newest[request.level] = max(self._newest.get(request.level, 0.0), request.arrival_time)
        if request.party not in self._last:
            self._take(request)
        self._fresh.append(request)

    def add_preempted(self, request: RequestState) -> None:
        self._preempted.append(request)

    def remove(self, request: RequestState) -> None:
        (self._preempted if request in self._preempted else self._fresh).remove(request)
        for party in set(self._last) - {each.party for each in self._fresh}:
            del self._last[party]

    def pop(self, request: RequestState) -> None:
        if request in self._fresh:
            self._admitted[request.request_id] = self._key(request, self._last[request.party])
            self._take(request)
        self.remove(request)

    def order(self) -> list[RequestState]:
        fresh, last, order = list(self._fresh), dict(self._last), list[RequestState]()
        turns, preempted = count(10**6), list(self._preempted)
        while fresh or preempted:
            firsts = {(each.party, self._bucket_of(each)): each for each in reversed(fresh)}
            keys = {each.request_id: self._admitted[each.request_id] for each in preempted}
            keys |= {each.request_id: self._key(each, last[each.party]) for each in firsts.values()}
            request = min([*preempted, *firsts.values()], key=lambda each: keys[each.request_id])
            order.append(request)
            if request in preempted:
                preempted.remove(request)
            else:
                fresh.remove(request)
                last[request.party] = (self._newest[request.level], next(turns))
        return order


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, len(PARTIES) - 1), st.integers(0, 100)),
        st.tuples(st.sampled_from(("take", "take", "remove", "preempt")), st.integers(0, 30), st.just(0)),
    ),
    max_size=60,
)


@pytest.mark.parametrize("num_buckets", [1, 2])
def test_any_history_is_that_of_a_list_that_is_searched(num_buckets: int) -> None:
    """All buckets share one order, and a party's turn in one bucket counts in all buckets."""

    def bucket_of(request: RequestState) -> int:
        return request.num_prompt_tokens % num_buckets

    @given(STEPS)
    def check(steps: list[tuple[str, int, int]]) -> None:
        queue, model, now = WaitingQueue(bucket_of), Listed(bucket_of), 0.0
        waiting, running = dict[str, RequestState](), list[RequestState]()
        for number, (step, which, seconds) in enumerate(steps):
            if step == "add":
                party, now = PARTIES[which], now + seconds
                own = {"party": party, "level": LEVELS[party], "arrival_time": now, "deadline": now + TIMEOUTS[party]}
                request = make_state(1 + seconds, request_id=f"{party}{number}", **own)
                waiting[request.request_id] = request
                queue.add(request)
                model.add(request)
            elif step == "preempt" and running:
                request = waiting.setdefault(running[-1].request_id, running.pop())
                queue.add_preempted(request)
                model.add_preempted(request)
            elif step in ("take", "remove") and waiting:
                request = waiting.pop(sorted(waiting)[which % len(waiting)])
                if step == "take":
                    queue.pop(request)
                    running.append(request)
                    model.pop(request)
                else:
                    assert queue.remove(request)
                    model.remove(request)
                assert not queue.remove(request)
            assert len(queue) == len(waiting)
            order = model.order()
            if num_buckets == 1:
                assert names_of(queue) == names_of(order)
            else:
                assert [each.party for each in islice(queue, 1)] == [each.party for each in order[:1]]
                assert sorted(names_of(queue)) == sorted(waiting)

    check()


ARRIVALS = st.lists(
    st.tuples(
        st.floats(0.0, 200.0),  # seconds after the one before
        st.integers(0, 5),  # level
        st.one_of(st.just(math.inf), st.floats(0.1, 600.0)),  # seconds until the deadline
        st.booleans(),  # whether somebody is admitted afterwards
    ),
    max_size=60,
)


@given(ARRIVALS)
def test_a_request_yields_for_a_bounded_time(arrivals: list[tuple[float, int, float, bool]]) -> None:
    """This is the bound on starvation. A request that arrives this many seconds after another never goes before it."""
    queue, waiting, now = WaitingQueue(lambda request: 0), list[RequestState](), 0.0

    def admit() -> None:
        first = next(iter(queue))
        queue.pop(first)
        waiting.remove(first)
        for other in waiting:
            levels = other.level - first.level
            assert first.arrival_time <= other.arrival_time + (levels + 1) * LEVEL_AGEING_SECONDS
            if first.arrival_time > other.arrival_time and levels <= 0:
                assert levels == 0, "nobody yields to a worse level that comes later, but for a deadline"
                assert first.deadline - first.arrival_time < LEVEL_AGEING_SECONDS
            if levels > 0 and first.deadline == other.deadline == math.inf:
                assert first.arrival_time <= other.arrival_time + levels * LEVEL_AGEING_SECONDS

    for number, (seconds, level, timeout, admits) in enumerate(arrivals):
        now += seconds
        request = make_state(request_id=str(number), level=level, arrival_time=now, deadline=now + timeout)
        queue.add(request)
        waiting.append(request)
        if admits:
            admit()
    while waiting:
        admit()


@given(st.lists(st.tuples(st.integers(0, 12), st.one_of(st.none(), st.integers(0, 99))), max_size=60))
def test_an_item_is_where_its_newest_key_puts_it(steps: list[tuple[int, int | None]]) -> None:
    ordered, model = Ordered[int](), dict[int, Key]()
    for number, (item, key) in enumerate(steps):
        if key is not None:
            model[item] = (key, number)
            ordered.put(item, model[item])
        elif item in model:
            del model[item]
            ordered.remove(item)
        else:
            with pytest.raises(KeyError):
                ordered.remove(item)
        assert list(ordered.entries()) == sorted((key, item) for item, key in model.items())
        assert (len(ordered), item in ordered) == (len(model), item in model)


FOLDER = "/conveyor_engine/scheduling/"
FEW, MANY = 100, 3_200  # logarithms of these differ by a factor of 1.75


def cost_events(queue: WaitingQueue, requests: list[RequestState]) -> list[int]:
    """Return the cost of each kind of event with all these requests in the queue."""
    first, middle, new = requests[0], requests[len(requests) // 2], make_state(request_id="new")
    for request in requests:
        queue.add(request)
    events: list[Callable[[], object]] = [
        lambda: queue.pop(first),
        lambda: queue.add_preempted(first),
        lambda: list(islice(queue, 4)),
        lambda: queue.remove(first),
        lambda: queue.remove(middle),
        lambda: queue.add(new),
    ]
    return [count_lines(event, FOLDER) for event in events]


@pytest.mark.parametrize("num_levels", [1, 7, 1001])
@pytest.mark.parametrize("parties", ["one", "each its own"])
def test_an_event_does_not_cost_by_what_waits(parties: str, num_levels: int) -> None:
    def cost(number: int) -> list[int]:
        names = ["p" if parties == "one" else str(index) for index in range(number)]
        requests = [
            make_state(request_id=str(index), party=party, level=0 if parties == "one" else index % num_levels)
            for index, party in enumerate(names)
        ]
        return cost_events(WaitingQueue(lambda request: 0), requests)

    for few, many in zip(cost(FEW), cost(MANY), strict=True):
        assert many <= 2 * few
