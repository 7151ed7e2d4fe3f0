"""Tests the order of new connections, in rounds instead of time, against a scan of all waiting connections."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from conveyor_process.arrivals import MAX_A_ROUND, Arrivals, Peer

PEERS = "abcde"
FLOOD = 500


@given(st.lists(st.lists(st.sampled_from(PEERS), max_size=12), min_size=1, max_size=30))
def test_a_connection_waits_behind_those_of_its_own_peer_only(rounds: list[list[str]]) -> None:
    """It waits as many rounds as its peer had waiting connections, whatever the other peers do."""
    arrivals, waiting, due = Arrivals[int](10_000), Counter[str](), dict[int, int]()
    number = 0
    for now in range(len(rounds) + sum(map(len, rounds))):
        for peer in rounds[now] if now < len(rounds) else "":
            due[number] = now + waiting[peer]
            assert arrivals.add(Peer(peer), number) is None
            waiting[peer] += 1
            number += 1
        assert [due.pop(each) for each in arrivals.take_round()] == [now] * len(+waiting)
        waiting -= Counter(dict.fromkeys(waiting, 1))
    assert not due


@given(st.integers(1, 3 * MAX_A_ROUND), st.integers(0, FLOOD))
def test_a_newcomer_waits_one_turn_of_each_other_peer_however_much_they_flood(num_others: int, more: int) -> None:
    arrivals = Arrivals[str](1_000_000)
    for other in range(num_others):
        for _ in range(1 + more):
            arrivals.add(Peer(f"other {other}"), "other")
    arrivals.add(Peer("new"), "new")
    num_before = 0
    while "new" not in (taken := arrivals.take_round()):
        num_before += len(taken)
    assert num_before + taken.index("new") <= num_others


@given(st.integers(1, 200), st.integers(1, 40))
def test_a_peer_with_more_in_a_turn_gets_them_and_delays_others_by_one_round(count: int, count_a_turn: int) -> None:
    arrivals = Arrivals[str](1_000_000)
    for _ in range(count):
        arrivals.add(Peer("proxy", count_a_turn), "proxy")
    arrivals.add(Peer("new"), "new")
    first = arrivals.take_round()
    assert first.count("proxy") == min(count, count_a_turn, MAX_A_ROUND)
    assert "new" in first + arrivals.take_round()


@given(
    st.lists(st.sampled_from([*PEERS, "round"]), max_size=300),
    st.integers(1, 20),
    st.dictionaries(st.sampled_from(PEERS), st.integers(1, 5)),
)
def test_of_too_many_the_newest_of_the_peer_that_needs_most_turns_goes(
    events: list[str], most: int, weights: dict[str, int]
) -> None:
    arrivals = Arrivals[int](most)
    waiting = dict[str, list[int]]()
    for number, peer in enumerate(events):
        if peer == "round":
            for taken in arrivals.take_round():
                owner = next(name for name, items in waiting.items() if taken in items)
                assert waiting[owner].pop(0) == taken, "those of one peer go in their order"
        else:
            waiting.setdefault(peer, []).append(number)
            turns = {name: -(-len(items) // weights.get(name, 1)) for name, items in waiting.items()}
            dropped = arrivals.add(Peer(peer, weights.get(peer, 1)), number)
            if dropped is not None:
                owner = next(name for name, items in waiting.items() if dropped in items)
                assert turns[owner] == max(turns.values())
                assert waiting[owner].pop() == dropped
        assert len(arrivals) == sum(map(len, waiting.values())) <= most


def test_as_many_go_in_a_round_as_the_event_loop_takes() -> None:
    arrivals = Arrivals[int](1000)
    for number in range(2 * MAX_A_ROUND + 1):
        arrivals.add(Peer(f"peer {number}"), number)
    assert [len(arrivals.take_round()) for _ in range(4)] == [MAX_A_ROUND, MAX_A_ROUND, 1, 0]
