"""Tests the places of an engine: which are free, which request is next, and which are returned."""

import asyncio
from contextlib import ExitStack, suppress

import pytest

from conveyor_engine.errors import NoPlace, Unavailable
from conveyor_engine.serving.places import BEYOND_SECONDS, GRANT_SECONDS, Places
from conveyor_protocol.request_headers import PLACE_GRANTED, PLACE_IF_FREE


def fill(places: Places, *request_ids: str, place: str = PLACE_IF_FREE) -> None:
    for request_id in request_ids:
        with places.reserve(place):
            places.hold([request_id])


async def start(places: Places, level: int = 0) -> asyncio.Task[None]:
    """Start to ask for a place. The place is granted immediately, or the request is queued."""
    task = asyncio.create_task(places.request(level))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_what_finds_the_batch_full_is_refused_until_a_request_ends() -> None:
    places = Places(2)
    fill(places, "a", "b")
    with pytest.raises(NoPlace), places.reserve(PLACE_IF_FREE):
        pass
    places.release("a")
    fill(places, "c")


async def test_a_request_of_many_choices_has_one_place_until_the_last_of_them_has_ended() -> None:
    places = Places(2)
    with places.reserve(PLACE_IF_FREE):
        places.hold(["a-0", "a-1", "a-2"])
    fill(places, "b")
    for request_id in ("a-0", "a-2", "a-0"):
        places.release(request_id)
        with pytest.raises(NoPlace), places.reserve(PLACE_IF_FREE):
            pass
    places.release("a-1")
    fill(places, "c")


async def test_others_than_gateways_take_no_places() -> None:
    places = Places(1)
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(places.reserve(None))
        fill(places, "a")


async def test_places_are_granted_in_the_order_of_the_questions() -> None:
    places = Places(1)
    fill(places, "a", place=PLACE_IF_FREE)
    first, second = [await start(places), await start(places)]
    await first  # beyond the batch
    fill(places, "b", place=PLACE_GRANTED)
    assert not second.done()
    places.release("a")
    await second
    with pytest.raises(NoPlace), places.reserve(PLACE_IF_FREE):  # it is kept for whoever asked
        pass
    fill(places, "c", place=PLACE_GRANTED)


async def test_better_levels_are_granted_places_first_and_yield_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places(1)
    fill(places, "a")
    await places.request()  # beyond the batch
    worst, worse, better, late = [await start(places, level) for level in (9, 3, 1, 1)]
    for request in (better, late, worse, worst):
        assert not request.done()
        places.give_back()
        await request
    patient = await start(places, 1)
    monkeypatch.setattr("conveyor_engine.serving.places.LEVEL_AGEING_SECONDS", 0.0)  # as if so much time had passed
    aged, newer = await start(places, 1), await start(places, 0)
    places.give_back()
    await aged
    assert not newer.done()
    assert not patient.done()
    newer.cancel()
    patient.cancel()


async def test_a_place_in_the_batch_is_granted_at_once_and_one_beyond_a_moment_later() -> None:
    loop, places = asyncio.get_running_loop(), Places(8)
    fill(places, *"abcdefg")
    in_batch = await start(places)
    assert in_batch.done()
    began = loop.time()
    await (await start(places))
    assert loop.time() - began >= BEYOND_SECONDS * 0.9
    third = await start(places)
    await asyncio.sleep(2 * BEYOND_SECONDS)
    assert not third.done()  # an eighth of the batch, and no more
    third.cancel()


async def test_a_granted_place_that_nobody_takes_is_granted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places(1)
    await places.request()
    await places.request()
    third = await start(places)
    places.give_back()
    await third
    assert GRANT_SECONDS >= 10 * BEYOND_SECONDS  # time enough for the request to come
    monkeypatch.setattr("conveyor_engine.serving.places.GRANT_SECONDS", 0.01)
    places.give_back()
    await places.request()
    await places.request()  # once the one before is over


async def test_where_nobody_joins_a_batch_that_runs_there_are_places_in_the_next_one_alone() -> None:
    places = Places(4, fills=True)
    fill(places, "a", "b")
    places.observe_step(num_running=2)
    with pytest.raises(NoPlace), places.reserve(PLACE_IF_FREE):
        pass
    waits = await start(places)
    await asyncio.sleep(2 * BEYOND_SECONDS)
    assert not waits.done()
    for request_id in ("a", "b"):
        places.release(request_id)
    await waits
    places.observe_step(num_running=0)
    fill(places, "c", place=PLACE_GRANTED)
    fill(places, "d", "e", "f")
    full = await start(places)
    await asyncio.sleep(2 * BEYOND_SECONDS)
    assert not full.done()  # none beyond
    full.cancel()


async def test_who_leaves_the_line_is_not_granted_a_place() -> None:
    places = Places(1)
    fill(places, "a")
    await places.request()
    gone, waits = await start(places), await start(places)
    gone.cancel()
    with suppress(asyncio.CancelledError):
        await gone
    places.release("a")
    await waits


async def test_every_queued_gateway_gets_the_error_when_no_place_will_come() -> None:
    places = Places(1)
    fill(places, "a")
    await places.request()
    tasks = [await start(places) for _ in range(3)]
    places.close(Unavailable("the engine is draining"))
    for task in tasks:
        with pytest.raises(Unavailable):
            await task
