"""Tests that requests with one beginning go to one engine, and how far the load and the order bound this."""

import random
import subprocess
import sys
from collections import Counter

import pytest
from tests.gateway.admission.queues import FAR, make_queue

from conveyor_gateway.admission.engine_order import Engine
from conveyor_gateway.admission.engine_pool import MAX_HOME_LOAD, EnginePool
from conveyor_gateway.admission.served_tokens import HOME_SECONDS
from conveyor_gateway.admission.service_queue import ServiceQueue
from conveyor_gateway.admission.ticket import Ticket

ADDRESSES = [f"10.0.0.{number}:8000" for number in range(8)]
PREFIXES = range(1 << 40, (1 << 40) + 400)


def make_pool(addresses: list[str] = ADDRESSES, place_limit: int = 100) -> EnginePool:
    pool = EnginePool()
    pool.place_limit = place_limit
    pool.set_ready(addresses)
    return pool


def choose(pool: EnginePool, prefix: int | None, excluded: int = 0) -> Engine:
    engine = pool.choose(0.0, excluded, prefix)
    assert engine is not None
    return engine


def find_homes(addresses: list[str]) -> dict[int, str]:
    """Return the engine that each prefix gets while no engine has another request."""
    pool, homes = make_pool(addresses), dict[int, str]()
    for prefix in PREFIXES:
        engine = choose(pool, prefix)
        homes[prefix] = engine.address
        pool.release(engine)
    return homes


def test_a_prefix_has_one_home_and_each_engine_is_the_home_of_about_equally_many() -> None:
    homes = find_homes(ADDRESSES)
    assert homes == find_homes(ADDRESSES[::-1])
    counts = Counter(homes.values())
    assert len(counts) == len(ADDRESSES)
    assert max(counts.values()) < 2 * min(counts.values()), counts


def test_when_an_engine_goes_only_its_own_prefixes_move() -> None:
    before, after = find_homes(ADDRESSES), find_homes(ADDRESSES[1:])
    moved = {prefix for prefix in PREFIXES if before[prefix] != after[prefix]}
    assert moved == {prefix for prefix in PREFIXES if before[prefix] == ADDRESSES[0]}


def test_among_many_engines_homes_are_spread_and_few_prefixes_move() -> None:
    addresses = [f"10.0.{number // 250}.{number % 250}:8000" for number in range(1_000)]
    draw = random.Random(0)
    prefixes = [draw.getrandbits(64) for _ in range(10_000)]
    before, after = make_pool(addresses), make_pool(addresses[1:])
    homes = [before.find_home(prefix) for prefix in prefixes]
    counts = Counter(homes)
    assert len(counts) > 990
    assert max(counts.values()) < 35  # 10 on average
    bits = {engine.bit: address for address, engine in after._engines.items()}
    moved = [
        number
        for number, prefix in enumerate(prefixes)
        if before._engines[bits[after.find_home(prefix)]].bit != homes[number]
    ]
    of_gone = counts[before._engines[addresses[0]].bit]
    assert of_gone <= len(moved) <= of_gone + 40


def test_all_gateways_choose_the_same_home() -> None:
    program = (
        "from conveyor_gateway.admission.engine_order import Engine\n"
        "print([Engine(address, 4).rank_as_home(1 << 63) for address in ('a:1', 'b:1')])"
    )
    requests = {
        subprocess.check_output([sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, text=True)
        for seed in ("1", "2")
    }
    assert len(requests) == 1


@pytest.mark.parametrize("num_engines", [2, 3, 8])
def test_one_prefix_for_all_requests_loads_the_engines_almost_equally(num_engines: int) -> None:
    pool = make_pool(ADDRESSES[:num_engines])
    for num_requests in range(1, 200):
        choose(pool, 7)
        loads = [engine.load for engine in pool._engines.values()]
        assert max(loads) <= MAX_HOME_LOAD * num_requests / num_engines + 1


def test_a_request_waits_for_no_home() -> None:
    pool = make_pool(place_limit=1)
    homes = [choose(pool, 7) for _ in ADDRESSES]
    assert len(set(homes)) == len(ADDRESSES)
    assert pool.choose(0.0, 0, 7) is None


def test_where_batches_are_filled_a_prefix_that_still_waits_has_no_home() -> None:
    pool = make_pool(place_limit=2)
    pool.configure(2, fills_batches=True)
    assert [choose(pool, prefix).address for prefix in (1, 2, 3, None)] == [ADDRESSES[0]] * 2 + [ADDRESSES[1]] * 2


def test_an_engine_that_has_or_had_no_room_is_nobody_s_home() -> None:
    pool = make_pool()
    home = choose(pool, 7)
    assert choose(pool, 7, excluded=home.bit) is not home
    pool.release(home)
    pool.note_full(home, 0.0)
    assert choose(pool, 7) is not home


async def start_full(prefixes: list[int], place_limit: int = 4) -> tuple[ServiceQueue, list[Ticket]]:
    """Return a queue of two engines without a free place, and a waiting request for each prefix, in this order."""
    queue = make_queue(*ADDRESSES[:2], place_limit=place_limit, max_queued_requests=100)
    now = queue.loop.time()
    queue.loop.time = lambda: now  # type: ignore[method-assign]
    running = [queue.admit(FAR) for _ in range(2 * place_limit)]
    assert all(ticket.engine is not None for ticket in running)
    waiting = []
    for prefix in prefixes:
        waiting.append(queue.admit(FAR, prefix=prefix))
        now += HOME_SECONDS / 2
    return queue, [*running, *waiting]


def find_prefixes(address: str) -> list[int]:
    """Return prefixes whose home, of the first two engines, is this one."""
    return [prefix for prefix, home in find_homes(ADDRESSES[:2]).items() if home == address]


async def test_a_place_that_becomes_free_goes_to_a_request_at_its_home() -> None:
    here, there = find_prefixes(ADDRESSES[0])[0], find_prefixes(ADDRESSES[1])[0]
    queue, tickets = await start_full([there, here, here])
    waiting = tickets[8:]
    queue.finish(next(each for each in tickets[:8] if each.bound_engine.address == ADDRESSES[0]))
    assert [each.engine is not None for each in waiting] == [False, True, False]
    queue.finish(next(each for each in tickets[:8] if each.engine and each.engine.address == ADDRESSES[1]))
    assert [each.engine and each.engine.address for each in waiting] == [ADDRESSES[1], ADDRESSES[0], None]


async def test_nobody_is_overtaken_by_requests_that_came_much_later() -> None:
    here, there = find_prefixes(ADDRESSES[0])[0], find_prefixes(ADDRESSES[1])[0]
    queue, tickets = await start_full([there, there, there, here])
    queue.finish(next(each for each in tickets[:8] if each.bound_engine.address == ADDRESSES[0]))
    assert [each.engine is not None for each in tickets[8:]] == [True, False, False, False]
