"""Whatever the sort key is, the waiting queue is in its order, as a search through a list finds it."""

from collections.abc import Callable
from itertools import count, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.builders import make_state, names_of
from tests.lines_run import count_lines

from conveyor_engine.scheduling import waiting_queue
from conveyor_engine.scheduling.ordered import Key, Ordered
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.waiting_queue import WaitingQueue, sort_key

SortKey = Callable[[RequestState, int], Key]
PARTIES = "abcd"


def by_priority(request: RequestState, last_turn: int) -> Key:
    """As vLLM's: the lowest number first, also before those that were preempted; parties of one priority take turns."""
    return (PARTIES.index(request.party) // 2, request.turn is None, request.turn or last_turn)


def by_deadline(request: RequestState, last_turn: int) -> Key:
    return (request.arrival_time + 10 * len(request.party), request.turn is None, request.turn or last_turn)


KEYS: dict[str, SortKey] = {"turns": sort_key, "priority": by_priority, "deadline": by_deadline}


class Listed:
    """The same queue as a list that is searched from end to end."""

    def __init__(self, key: SortKey, bucket_of: Callable[[RequestState], int]) -> None:
        self._key = key
        self._bucket_of = bucket_of
        self._turns = count(1)
        self._last: dict[str, int] = {}
        self._fresh: list[RequestState] = []  # in order of arrival
        self._preempted: list[RequestState] = []

    def add(self, request: RequestState) -> None:
        if request.party not in self._last:
            self._last[request.party] = next(self._turns)
        self._fresh.append(request)

    def add_preempted(self, request: RequestState) -> None:
        self._preempted.append(request)

    def remove(self, request: RequestState) -> None:
        (self._preempted if request in self._preempted else self._fresh).remove(request)
        for party in set(self._last) - {each.party for each in self._fresh}:
            del self._last[party]

    def pop(self, request: RequestState) -> None:
        """The real queue has given the request its turn: only the party's is missing here."""
        is_fresh = request in self._fresh
        self.remove(request)
        if is_fresh:
            turn = next(self._turns)
            if request.party in self._last:
                self._last[request.party] = turn

    def order(self) -> list[RequestState]:
        fresh, last, order = list(self._fresh), dict(self._last), list[RequestState]()
        turns, preempted = count(10**6), list(self._preempted)
        while fresh or preempted:
            firsts = {(each.party, self._bucket_of(each)): each for each in reversed(fresh)}
            request = min([*preempted, *firsts.values()], key=lambda each: self._key(each, last.get(each.party, 0)))
            order.append(request)
            if request in preempted:
                preempted.remove(request)
            else:
                fresh.remove(request)
                last[request.party] = next(turns)
        return order


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, len(PARTIES) - 1), st.integers(0, 3)),
        st.tuples(st.sampled_from(("take", "take", "remove", "preempt")), st.integers(0, 30), st.just(0)),
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("num_buckets", [1, 2])
def test_any_history_is_that_of_a_list_that_is_searched(name: str, num_buckets: int) -> None:
    """Requests of the second bucket wait in one order with the others; a turn in one bucket is one in all."""

    def bucket_of(request: RequestState) -> int:
        return request.num_prompt_tokens % num_buckets

    @given(STEPS)
    def check(steps: list[tuple[str, int, int]]) -> None:
        queue, model = WaitingQueue(bucket_of), Listed(KEYS[name], bucket_of)
        waiting, running = dict[str, RequestState](), list[RequestState]()
        for number, (step, which, length) in enumerate(steps):
            if step == "add":
                party = PARTIES[which]
                request = make_state(1 + length, request_id=f"{party}{number}", party=party, arrival_time=float(length))
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting_queue, "sort_key", KEYS[name])
        check()


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
    """Of each kind of event, with all these requests in the queue."""
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


@pytest.mark.parametrize("parties", ["one", "each its own"])
def test_an_event_does_not_cost_by_what_waits(parties: str) -> None:
    def cost(number: int) -> list[int]:
        names = ["p" if parties == "one" else str(index) for index in range(number)]
        requests = [make_state(request_id=str(index), party=party) for index, party in enumerate(names)]
        return cost_events(WaitingQueue(lambda request: 0), requests)

    for few, many in zip(cost(FEW), cost(MANY), strict=True):
        assert many <= 2 * few
