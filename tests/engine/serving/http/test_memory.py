import asyncio

import pytest

from conveyor_engine.errors import DeadlineExceeded, Overloaded
from conveyor_engine.serving.http.memory import Held, Memory

MIB = 2**20


async def hold(memory: Memory, num_bytes: int, held: list[Held]) -> None:
    async with memory.hold(600) as own:
        held.append(own)
        own.grow(num_bytes)
        await asyncio.Event().wait()


async def started(memory: Memory, num_bytes: int, age_seconds: float = 0.0) -> asyncio.Task[None]:
    held: list[Held] = []
    task = asyncio.create_task(hold(memory, num_bytes, held))
    await asyncio.sleep(0)
    held[0].since -= age_seconds
    return task


async def test_who_has_held_the_most_for_the_longest_gives_way() -> None:
    memory = Memory(10 * MIB)
    small, old, young = await started(memory, MIB, 5), await started(memory, 4 * MIB, 9), await started(memory, 4 * MIB)
    async with memory.hold(600) as newcomer:
        newcomer.grow(3 * MIB)
        with pytest.raises(Overloaded):
            await old
        newcomer.grow(2 * MIB)
        assert not any(task.done() for task in (small, young))
    for task in (small, young):
        task.cancel()


async def test_what_is_given_back_is_free_again() -> None:
    memory = Memory(2 * MIB)
    for _ in range(10):
        async with memory.hold(600) as held:
            held.grow(MIB)
            held.grow(-MIB)
            held.grow(2 * MIB)


async def test_a_holder_that_is_alone_and_too_large_gives_way() -> None:
    memory = Memory(MIB)
    task = await started(memory, 4 * MIB)
    with pytest.raises(Overloaded):
        await task
    async with memory.hold(600) as held:
        held.grow(MIB)


async def test_many_small_holders_keep_what_they_have() -> None:
    memory = Memory(MIB)
    tasks = [await started(memory, 60_000) for _ in range(100)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()


async def test_time_ends() -> None:
    with pytest.raises(DeadlineExceeded):
        async with Memory().hold(0.0):
            await asyncio.Event().wait()


async def test_a_request_past_its_deadline_may_be_evicted() -> None:
    """It has held the most memory for the longest time, but its task needs some turns to end."""
    memory = Memory(2 * MIB)

    async def overdue() -> None:
        async with memory.hold(0.0) as held:
            held.grow(2 * MIB)
            try:
                await asyncio.Event().wait()
            finally:
                left.set()
                await asyncio.shield(grown.wait())

    left, grown = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(overdue())
    await left.wait()
    async with memory.hold(600) as newcomer:
        newcomer.grow(MIB)
        grown.set()
        with pytest.raises(Overloaded):
            await task
