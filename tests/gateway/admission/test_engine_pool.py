"""Tests which engine gets the next request."""

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
        pool.fills_batches = True
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


def test_an_engine_that_had_no_room_is_asked_after_all_others_but_is_never_left_out_for_it() -> None:
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
