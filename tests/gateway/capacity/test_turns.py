"""Tests that no tenant's requests take the turns of the event loop from another's."""

import asyncio
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor_gateway.capacity import turns
from conveyor_gateway.capacity.turns import MOST, Turns


class Gateway:
    """Requests that wait for a turn, and the turn in which each began."""

    def __init__(self, cost_seconds: float = 0.0) -> None:
        self.turns = Turns()
        self.began: list[tuple[int, str, int]] = []  # turn, owner, number of its request
        self.turn = 0
        self._cost_seconds = cost_seconds
        self._numbers = Counter[str]()

    async def send(self, owner: str) -> None:
        self._numbers[owner] += 1
        number = self._numbers[owner]
        await self.turns.wait(owner)
        self.began.append((self.turn, owner, number))
        time.sleep(self._cost_seconds)  # noqa: ASYNC251  work on the loop

    async def run(self, arrivals: list[list[str]]) -> None:
        """Let requests of these owners arrive in each turn, and wait until all have begun."""
        tasks = []
        while len(self.began) < len(tasks) or arrivals:
            tasks += [asyncio.create_task(self.send(owner)) for owner in (arrivals.pop(0) if arrivals else ())]
            await asyncio.sleep(0)
            self.turn += 1
        await asyncio.gather(*tasks)


@given(st.lists(st.lists(st.sampled_from("aaaaaabc"), max_size=40), max_size=12))
def test_all_requests_begin_few_in_each_turn_and_nearly_in_the_order_of_their_owner(arrivals: list[list[str]]) -> None:
    """One that arrives while others wake up may overtake these."""
    gateway, count = Gateway(), Counter(owner for turn in arrivals for owner in turn)
    asyncio.run(gateway.run(arrivals))
    assert Counter(owner for _, owner, _ in gateway.began) == count
    for owner in count:
        numbers = [number for _, each, number in gateway.began if each == owner]
        assert all(abs(number - place) <= MOST for place, number in enumerate(numbers, start=1))
    assert max(Counter(turn for turn, _, _ in gateway.began).values(), default=0) <= 2 * MOST  # the test's turns


@given(st.integers(0, 2000), st.integers(1, 6))
def test_a_request_waits_for_at_most_one_of_each_other_tenant_however_many_they_have(count: int, others: int) -> None:
    async def run() -> None:
        gateway = Gateway()
        flood = [asyncio.create_task(gateway.send(f"hostile-{number % others}")) for number in range(count)]
        await asyncio.sleep(0)
        num_before = len(gateway.began)
        await gateway.send("mine")
        owners = [owner for _, owner, _ in gateway.began[num_before:]]
        assert owners.index("mine") <= MOST + others  # up to MOST have got their turn already
        await asyncio.gather(*flood)

    asyncio.run(run())


def test_after_a_long_turn_one_request_begins_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_LONG_SECONDS", 0.0)
    gateway = Gateway(cost_seconds=0.001)
    asyncio.run(gateway.run([["a"] * 40, ["b"]]))
    position = next(place for place, (_, owner, _) in enumerate(gateway.began) if owner == "b")
    assert position <= MOST + 2


def test_a_cancelled_request_takes_no_turn() -> None:
    async def run() -> None:
        gateway = Gateway()
        tasks = [asyncio.create_task(gateway.send("a")) for _ in range(3 * MOST)]
        await asyncio.sleep(0)
        for task in tasks[MOST : 2 * MOST]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(gateway.began) == 2 * MOST
        assert not gateway.turns._waiting

    asyncio.run(run())
