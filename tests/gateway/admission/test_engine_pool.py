"""Tests which engine gets the next request."""

import random

import pytest
from tests.lines_run import count_lines

from conveyor_gateway.admission.engine_order import MAX_SKIPPED, Engine
from conveyor_gateway.admission.engine_pool import LEFT_OUT_SECONDS, MAX_LEFT_OUT_SECONDS, PROBE_SECONDS, EnginePool


def make_pool(*addresses: str, place_limit: int = 2) -> EnginePool:
    pool = EnginePool()
    pool.place_limit = place_limit
    pool.set_ready(addresses)
    return pool


def choose(pool: EnginePool, times: int, now: float = 0.0) -> list[str | None]:
    chosen = [pool.choose(now) for _ in range(times)]
    return [engine.address if engine else None for engine in chosen]


def test_requests_go_in_turn_to_the_least_loaded_until_all_places_are_taken() -> None:
    pool = make_pool("a:1", "b:1", "c:1")
    chosen = choose(pool, 7)
    assert sorted(str(address) for address in chosen[:3]) == ["a:1", "b:1", "c:1"]
    assert chosen[3:6] == chosen[:3]
    assert chosen[6] is None


def test_the_least_loaded_comes_before_the_one_whose_turn_it_would_be() -> None:
    pool = make_pool("a:1", "b:1", place_limit=4)
    engines = [pool.choose(0.0) for _ in range(4)]
    last = engines[-1]
    assert last is not None
    assert engines[1] is last
    pool.release(last)
    pool.release(last)
    assert [pool.choose(0.0), pool.choose(0.0)] == [last, last]


def test_where_batches_are_filled_one_engine_has_all_and_the_same_one_for_each_gateway() -> None:
    here, there = make_pool("a:1", "b:1"), make_pool("b:1", "a:1")
    for pool in (here, there):
        pool.configure(2, fills_batches=True)
        assert choose(pool, 5) == ["a:1", "a:1", "b:1", "b:1", None]


def test_a_place_given_back_is_taken_next() -> None:
    pool = make_pool("a:1", "b:1")
    engines = [pool.choose(0.0) for _ in range(4)]
    assert engines[1] is not None
    pool.release(engines[1])
    assert pool.choose(0.0) is engines[1]


def test_of_idle_engines_the_one_chosen_longest_ago_is_next() -> None:
    pool = make_pool("a:1", "b:1", "c:1")
    seen = []
    for _ in range(6):
        engine = pool.choose(0.0)
        assert engine is not None
        seen.append(engine.address)
        pool.release(engine)
    assert seen[:3] == seen[3:]
    assert len(set(seen)) == 3


def test_an_engine_that_is_no_longer_ready_is_not_chosen_and_is_forgotten_with_its_last_request() -> None:
    pool = make_pool("a:1", "b:1")
    engine = pool.choose(0.0)
    assert engine is not None
    other = "b:1" if engine.address == "a:1" else "a:1"
    pool.set_ready([other])
    assert choose(pool, 3) == [other, other, None]
    assert pool.num_ready == 1
    pool.release(engine)
    assert engine.address not in pool._engines


def test_an_engine_that_comes_back_keeps_the_count_of_its_requests() -> None:
    pool = make_pool("a:1")
    choose(pool, 1)
    pool.set_ready([])
    pool.set_ready(["a:1"])
    assert choose(pool, 2) == ["a:1", None]


def test_an_engine_that_failed_is_left_out_for_longer_each_time() -> None:
    pool, now, pauses = make_pool("a:1"), 100.0, []
    engine = pool.choose(now)
    assert engine is not None
    for _ in range(7):
        pool.leave_out(engine, now)
        returns = pool.next_return_seconds(now)
        assert returns is not None
        pauses.append(round(returns - now, 6))
        assert pool.choose((now + returns) / 2) is None
        now = returns
    assert pauses == [min(LEFT_OUT_SECONDS * 2**turn, MAX_LEFT_OUT_SECONDS) for turn in range(7)]
    assert pool.next_return_seconds(now) is None
    assert pool.choose(now) is engine


def test_many_failures_of_one_moment_count_as_one() -> None:
    pool = make_pool("a:1")
    engine = pool.choose(0.0)
    assert engine is not None
    for _ in range(30):
        pool.leave_out(engine, 0.0)
    assert pool.next_return_seconds(0.0) == LEFT_OUT_SECONDS


def test_an_engine_without_room_is_chosen_after_all_others_but_is_never_left_out() -> None:
    pool = make_pool("a:1", "b:1", place_limit=2)
    full = pool.choose(0.0)
    assert full is not None
    for _ in range(3):  # requests of any number, by anybody
        pool.note_full(full, 0.0)
    pool.release(full)
    assert [engine is full for engine in (pool.choose(0.1), pool.choose(0.1), pool.choose(0.1))] == [False, False, True]
    assert pool.next_return_seconds(0.1) is None
    pool.note_answer(full)
    pool.set_ready(["a:1", "b:1"])
    assert full.rank(0.1) == (False, 1, full.last_chosen)


def test_an_engine_that_answers_again_starts_afresh() -> None:
    pool = make_pool("a:1")
    engine = pool.choose(0.0)
    assert engine is not None
    pool.leave_out(engine, 0.0)
    pool.leave_out(engine, 1.0)
    pool.note_answer(engine)
    pool.leave_out(engine, 10.0)
    assert pool.next_return_seconds(10.0) == 10.0 + LEFT_OUT_SECONDS


def test_an_engine_that_took_no_connection_in_time_gets_one_request_at_a_time_until_it_answers() -> None:
    pool = make_pool("a:1", "b:1", place_limit=8)
    engine = pool.choose(0.0)
    assert engine is not None
    pool.leave_out(engine, 3.0, unreachable=True)
    pool.release(engine)
    for now in (4.0, 4.0 + PROBE_SECONDS):
        assert choose(pool, 3, now).count(engine.address) == 1
    pool.note_answer(engine)
    assert choose(pool, 2, now) == [engine.address] * 2


def test_an_engine_that_refused_gets_as_many_requests_as_any_other_after_its_pause() -> None:
    pool = make_pool("a:1", "b:1", place_limit=8)
    engine = pool.choose(0.0)
    assert engine is not None
    pool.leave_out(engine, 0.0, unreachable=True)
    pool.leave_out(engine, 1.0)
    pool.release(engine)
    assert choose(pool, 4, 2.0).count(engine.address) == 2


def rank_all(pool: EnginePool, now: float, excluded: int) -> dict[Engine, tuple[object, ...]]:
    """Return the rank of each engine that `choose` may choose, by a look at all of them."""
    rank = Engine.rank_to_fill if pool.fills_batches else Engine.rank
    return {
        engine: rank(engine, now)
        for engine in pool._engines.values()
        if engine.ready and engine.load < pool.place_limit and engine.left_out_until <= now
        if engine not in pool._occupied and not engine.bit & excluded
    }


def happen(pool: EnginePool, now: float, draw: random.Random, held: list[Engine]) -> None:
    """Let something happen to a random engine."""
    engine = draw.choice(list(pool._engines.values()))
    events = [
        lambda: pool.leave_out(engine, now, draw.random() < 0.5),
        lambda: pool.note_full(engine, now),
        lambda: pool.note_no_place(engine),
        lambda: pool.note_place_answer(engine, draw.random() < 0.5),
        lambda: pool.note_answer(engine),
        lambda: pool.configure(draw.randrange(1, 4), pool.fills_batches),
        lambda: pool.set_ready(f"{letter}:1" for letter in "abcdefgh" if letter == "a" or draw.random() < 0.8),
    ]
    if held and draw.random() < 0.4:
        pool.release(held.pop(draw.randrange(len(held))))
    elif draw.random() < 0.5:
        draw.choice(events)()


@pytest.mark.parametrize("seed", range(20))
def test_after_any_events_the_first_of_all_engines_is_chosen(seed: int) -> None:
    pool, draw, now, held = make_pool("a:1", "b:1", "c:1"), random.Random(seed), 0.0, list[Engine]()
    pool.configure(2, fills_batches=seed % 4 == 0)
    for _ in range(400):
        happen(pool, now, draw, held)
        now += draw.choice([0.0, 0.01, 0.3, 5.0])
        excluded = draw.getrandbits(8) << 2
        ranks = rank_all(pool, now, excluded)
        chosen = pool.choose(now, excluded)
        if chosen is None:
            assert not ranks
        else:
            assert ranks[chosen] == min(ranks.values())
            held.append(chosen)
        assert pool._ready_load == sum(engine.load for engine in pool._engines.values() if engine.ready)
        assert pool.num_ready == sum(engine.ready for engine in pool._engines.values())


def make_large_pool(num_engines: int) -> EnginePool:
    return make_pool(*(f"10.0.{number // 256}.{number % 256}:80" for number in range(num_engines)), place_limit=8)


@pytest.mark.parametrize("prefix", [None, 7])
def test_a_choice_costs_little_more_among_thousands_of_engines(prefix: int | None) -> None:
    costs = []
    for num_engines in (100, 5_000):
        pool = make_large_pool(num_engines)
        pool.choose(0.0, 0, prefix)

        def run(pool: EnginePool = pool) -> None:
            pool.find_home(prefix)
            pool.find_places(1.0)
            engine = pool.choose(1.0, 0, prefix)
            assert engine is not None
            pool.next_return_seconds(1.0)
            pool.release(engine)

        costs.append(count_lines(run, "/conveyor_gateway/admission/"))
    assert costs[1] < 1.5 * costs[0], costs


def test_a_request_that_excludes_many_engines_gets_another_at_little_cost() -> None:
    pool = make_large_pool(2_000)
    excluded = 0
    for engine in list(pool._engines.values())[:1_990]:
        excluded |= engine.bit
    cost = count_lines(lambda: pool.choose(0.0, excluded), "/conveyor_gateway/admission/")
    assert cost < 20 * MAX_SKIPPED
    others = [pool.choose(0.0, excluded) for _ in range(79)]
    assert all(engine is not None and not engine.bit & excluded for engine in others)
    assert pool.choose(0.0, excluded) is None
