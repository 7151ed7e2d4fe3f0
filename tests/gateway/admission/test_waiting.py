"""Compares the index of waiting requests with a search through a sorted list, and tests who overtakes whom."""

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from conveyor_gateway.admission.served_tokens import HOME_SECONDS, HOME_TOKENS, sort_key
from conveyor_gateway.admission.ticket import Ticket, Work
from conveyor_gateway.admission.waiting import Waiting


class Numbered:
    """The attributes of a ticket that the index reads. The clients' counters differ, so that they never are equal."""

    offset_seconds = 0.0

    def __init__(self, number: int, excluded: int, home: int = 0) -> None:
        self.number = number
        self.admitted_at = number * HOME_SECONDS / 4
        self.level = number % 3
        self.client = "abcd"[number % 4]
        self.work = Work(HOME_TOKENS // 2 + number)
        self.charged = 0.0
        self.excluded = excluded
        self.home = home


MASK = st.integers(0, 15)  # of four engines
HOME = st.sampled_from([0, 1, 2, 4, 8])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 40), MASK, HOME),
        st.tuples(st.just("remove"), st.integers(0, 40), st.just(0), st.just(0)),
        st.tuples(st.just("begin"), st.integers(0, 40), st.just(0), st.just(0)),
        st.tuples(st.just("first"), st.just(0), MASK, st.just(0)),
    ),
    max_size=80,
)


class Model:
    """The waiting tickets in a list, and the counters of the clients in each level, which are never dropped."""

    def __init__(self) -> None:
        self.tickets: dict[int, Ticket] = {}
        self.served: dict[tuple[int, str], float] = {}
        self.last_served = dict.fromkeys(range(3), 0.0)

    def of(self, ticket: Ticket) -> tuple[int, str]:
        return ticket.level, ticket.client

    def add(self, ticket: Ticket) -> None:
        if all(self.of(each) != self.of(ticket) for each in self.tickets.values()):
            before = self.served.get(self.of(ticket), 0.0)
            self.served[self.of(ticket)] = max(before, self.last_served[ticket.level])
        self.tickets[ticket.number] = ticket

    def begin(self, number: int) -> Ticket:
        ticket = self.tickets.pop(number)
        served = self.served[self.of(ticket)]
        self.last_served[ticket.level] = max(self.last_served[ticket.level], served)
        self.served[self.of(ticket)] = served + ticket.work.prompt_tokens
        return ticket

    def next(self, mask: int, below: int = 3) -> set[int]:
        """Return the numbers of the tickets that may come next; several if counters are equal."""
        in_order = sorted(self.tickets.values(), key=sort_key)
        possible = [each for each in in_order if mask & ~each.excluded and each.level < below]
        if not possible:
            return set()
        level = [each for each in possible if each.level == self.oldest(possible).level]
        least = min(self.served[self.of(each)] for each in level)
        firsts = [next(each for each in level if self.of(each) == client) for client in self.clients(level, least)]
        return {found.number for first in firsts for found in self.at_home(first, level, mask)}

    def clients(self, level: list[Ticket], served: float) -> set[tuple[int, str]]:
        return {self.of(each) for each in level if self.served[self.of(each)] == served}

    def oldest(self, possible: list[Ticket]) -> Ticket:
        """Return the first possible ticket of the client whose first ticket is the oldest, of the most urgent level."""
        heads: dict[tuple[int, str], Ticket] = {}
        for each in sorted(self.tickets.values(), key=sort_key):
            heads.setdefault(self.of(each), each)
        firsts = {}
        for level in {each.level for each in possible}:
            client = min(
                {self.of(each) for each in possible if each.level == level}, key=lambda each: sort_key(heads[each])
            )
            firsts[level] = next(each for each in possible if self.of(each) == client)
        return min(firsts.values(), key=sort_key)

    def at_home(self, first: Ticket, level: list[Ticket], mask: int) -> list[Ticket]:
        """Return what may overtake `first` because it is at home; `first` itself if nothing may."""
        at_home = [each for each in level if mask & each.home & ~each.excluded]
        if not at_home or mask & first.home & ~first.excluded:
            return [first]
        least = min(self.served[self.of(each)] for each in at_home)
        firsts = [next(each for each in at_home if self.of(each) == client) for client in self.clients(at_home, least)]
        is_near = least <= self.served[self.of(first)] + HOME_TOKENS
        return [
            each if is_near and sort_key(each)[0] <= sort_key(first)[0] + HOME_SECONDS else first for each in firsts
        ]


@given(STEPS)
def test_any_history_of_arrivals_departures_and_searches_is_that_of_a_sorted_list(
    steps: list[tuple[str, int, int, int]],
) -> None:
    index, model = Waiting(), Model()
    for step, number, mask, home in steps:
        if step == "add" and number not in model.tickets:
            ticket = cast(Ticket, Numbered(number, mask, home))
            model.add(ticket)
            index.add(ticket)
        elif step == "remove" and number in model.tickets:
            index.remove(model.tickets.pop(number))
        elif step == "begin" and number in model.tickets:
            ticket = model.begin(number)
            index.begin(ticket)
            index.end(ticket, None)
        in_order = sorted(model.tickets.values(), key=sort_key)
        for level in range(3):
            assert index.count(level) == sum(each.level == level for each in in_order)
            assert find_number(index.first(mask, level)) in (model.next(mask, level) or {None})
            assert index.first_of(level) == next((each for each in in_order if each.level == level), None)
        assert list(index) == in_order
        assert len(index) == len(in_order)
        assert find_number(index.first(mask)) in (model.next(mask) or {None})
        check_last(index, in_order)


def find_number(ticket: Ticket | None) -> int | None:
    return None if ticket is None else ticket.number


def check_last(index: Waiting, in_order: list[Ticket]) -> None:
    last = index.last()
    assert (last is None) == (not in_order)
    if last is not None:
        worst = [each for each in in_order if each.level == max(each.level for each in in_order)]
        lengths = [sum(each.client == client for each in worst) for client in "abcd"]
        own = [each for each in worst if each.client == last.client]
        assert (last, len(own)) == (own[-1], max(lengths))
