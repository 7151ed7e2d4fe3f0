"""Tests who is the first to lose, against a scan of all members, after any history."""

from collections import Counter
from dataclasses import dataclass
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from conveyor_gateway.capacity.amounts import Amounts
from conveyor_gateway.capacity.parts import Owner, Parts

KEYS = st.sampled_from("abcde")


@given(st.lists(st.tuples(KEYS, st.integers(-3, 5)), max_size=200))
def test_the_first_is_the_one_that_a_scan_finds(changes: list[tuple[str, int]]) -> None:
    amounts, model = Amounts[str](), Counter[str]()
    for key, amount in changes:
        amount = max(amount, -model[key])
        amounts.add(key, amount)
        model[key] += amount
        largest = amounts.find_first()
        assert (largest is None) == (not any(model.values()))
        assert amounts[largest or ""] == max(model.values())
        assert len(amounts._heap) <= 2 * len(amounts) + 16


@dataclass(eq=False)
class Member:
    owner: Owner
    rank: int = 0
    number: int = 0


OWNERS = st.builds(lambda n, s, c: Owner(n, f"{n}/{s}", c), *(st.sampled_from("abc"),) * 3)
MEMBERS = st.builds(Member, OWNERS, st.integers(0, 2), st.integers(0, 10**6))


@given(
    st.lists(st.tuples(MEMBERS, st.integers(1, 5), st.booleans()), min_size=1, max_size=60),
    st.integers(1, 5),
    st.data(),
)
def test_the_victim_is_of_the_largest_client_of_the_largest_service_of_the_largest_namespace(
    added: list[tuple[Member, int, bool]], max_changes: int, data: st.DataObject
) -> None:
    """However many changes are applied together, and whether or not a victim was looked for before."""
    parts, held, newcomer = Parts[Member](0), dict[Member, int](), Owner("new", "new/new", "new")
    with mock.patch("conveyor_gateway.capacity.parts.MAX_CHANGES", max_changes):
        for member, amount, looks in added:
            held[member] = amount
            parts.add(member, amount)
            if looks:
                parts.find_victim(newcomer, 0)
        for member in data.draw(st.lists(st.sampled_from([*held]), unique=True, max_size=len(held) - 1)):
            parts.add(member, -held.pop(member))
    victim = parts.find_victim(newcomer, 0)
    assert victim is not None
    among = held
    for level in range(3):
        totals = Counter[str]()
        for member, amount in among.items():
            totals[member.owner[level]] += amount
        assert totals[victim.owner[level]] == max(totals.values())
        among = {each: amount for each, amount in among.items() if each.owner[level] == victim.owner[level]}
    first = max((each.rank, amount, each.number) for each, amount in among.items())
    assert (victim.rank, held[victim], victim.number) == first


def test_a_member_whose_owner_and_rank_become_known_is_found_there_and_nowhere_else() -> None:
    """A search in between has already applied what the member had for the unknown service."""
    parts, newcomer = Parts[Member](0), Owner("new", "new/new", "new")
    member, other = Member(Owner("", "", "client")), Member(Owner("", "", "client"), rank=1)
    parts.add(member, 5)
    assert parts.find_victim(newcomer, 1) is member
    parts.add(member, -5)
    member.owner, member.rank = Owner("a", "a/one", "client"), 2
    parts.add(member, 5)
    parts.add(other, 4)
    assert parts.find_victim(newcomer, 0) is member
    parts.add(member, -5)
    assert parts.find_victim(newcomer, 0) is other
    parts.add(other, -4)
    assert parts.find_victim(newcomer, 0) is None
    assert not parts._groups
    assert not parts._members
