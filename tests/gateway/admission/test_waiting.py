"""Compares the index of waiting requests with a search through a sorted list, and tests who overtakes whom."""

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from conveyor_gateway.admission.ticket import Ticket
from conveyor_gateway.admission.waiting import HOME_SECONDS, Waiting, sort_key


class Numbered:
    """The attributes of a ticket that the index reads."""

    offset_seconds = 0.0

    def __init__(self, number: int, excluded: int, home: int = 0) -> None:
        self.number = number
        self.admitted_at = number * HOME_SECONDS / 4
        self.level = number % 3
        self.excluded = excluded
        self.home = home


MASK = st.integers(0, 15)  # of four engines
HOME = st.sampled_from([0, 1, 2, 4, 8])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 40), MASK, HOME),
        st.tuples(st.just("remove"), st.integers(0, 40), st.just(0), st.just(0)),
        st.tuples(st.just("first"), st.just(0), MASK, st.just(0)),
    ),
    max_size=80,
)


@given(STEPS)
def test_any_history_of_arrivals_departures_and_searches_is_that_of_a_sorted_list(
    steps: list[tuple[str, int, int, int]],
) -> None:
    index, model = Waiting(), dict[int, Ticket]()
    for step, number, mask, home in steps:
        if step == "add" and number not in model:
            model[number] = cast(Ticket, Numbered(number, mask, home))
            index.add(model[number])
        elif step == "remove" and number in model:
            index.remove(model.pop(number))
        in_order = sorted(model.values(), key=sort_key)
        for level in range(3):
            of_level = [each for each in in_order if each.level == level]
            assert index.count(level) == len(of_level)
            better = [each for each in in_order if each.level < level]
            assert index.first(mask, level) is find_next(better, mask)
        assert index.last() == max(in_order, key=lambda each: (each.level, sort_key(each)), default=None)
        assert list(index) == in_order
        assert len(index) == len(in_order)
        assert index.first(mask) is find_next(in_order, mask)


def find_next(in_order: list[Ticket], mask: int) -> Ticket | None:
    """Return the ticket that gets a place on one of the engines `mask`."""
    possible = [each for each in in_order if mask & ~each.excluded]
    at_home = [
        each
        for each in possible
        if mask & ~each.excluded & each.home and sort_key(each)[0] <= sort_key(possible[0])[0] + HOME_SECONDS
    ]
    return next(iter(at_home or possible), None)
