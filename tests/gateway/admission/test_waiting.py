"""Compares the index of waiting requests with a search through a sorted list."""

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from conveyor_gateway.admission.ticket import Ticket
from conveyor_gateway.admission.waiting import Waiting, sort_key


class Numbered:
    """The attributes of a ticket that the index reads."""

    admitted_at = offset_seconds = 0.0

    def __init__(self, number: int, excluded: int) -> None:
        self.number = number
        self.level = number % 3
        self.excluded = excluded


MASK = st.integers(0, 15)  # of four engines
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 40), MASK),
        st.tuples(st.just("remove"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("first"), st.just(0), MASK),
    ),
    max_size=80,
)


@given(STEPS)
def test_any_history_of_arrivals_departures_and_searches_is_that_of_a_sorted_list(
    steps: list[tuple[str, int, int]],
) -> None:
    index, model = Waiting(), dict[int, Ticket]()
    for step, number, mask in steps:
        if step == "add" and number not in model:
            model[number] = cast(Ticket, Numbered(number, mask))
            index.add(model[number])
        elif step == "remove" and number in model:
            index.remove(model.pop(number))
        in_order = sorted(model.values(), key=sort_key)
        for level in range(3):
            of_level = [each for each in in_order if each.level == level]
            assert index.count(level) == len(of_level)
            better = [each for each in in_order if each.level < level]
            assert index.first(mask, level) == next((each for each in better if mask & ~each.excluded), None)
        assert index.last() == max(in_order, key=lambda each: (each.level, sort_key(each)), default=None)
        assert list(index) == in_order
        assert len(index) == len(in_order)
        assert index.first(mask) is next((each for each in in_order if mask & ~each.excluded), None)
