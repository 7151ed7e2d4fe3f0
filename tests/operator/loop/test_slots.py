"""Slots go to the namespaces in turn."""

import asyncio

from conveyor_operator.loop.slots import Slots


async def take_all(slots: Slots, namespaces: list[str]) -> list[str]:
    """The order in which those who ask in this order get a slot, one after the other."""
    order: list[str] = []

    async def work(namespace: str) -> None:
        await slots.acquire(namespace)
        order.append(namespace)
        slots.release()

    await slots.acquire("before")
    tasks = [asyncio.create_task(work(namespace)) for namespace in namespaces]
    await asyncio.sleep(0)
    slots.release()
    await asyncio.gather(*tasks)
    return order


async def test_a_namespace_with_many_waits_for_one_with_few() -> None:
    order = await take_all(Slots(1), ["many"] * 4 + ["few", "many", "one", "few"])
    assert order == ["many", "few", "one", "many", "few", "many", "many", "many"]


async def test_as_many_work_at_once_as_there_are_slots() -> None:
    slots = Slots(2)
    await slots.acquire("a")
    await slots.acquire("a")
    third = asyncio.create_task(slots.acquire("b"))
    await asyncio.sleep(0)
    assert not third.done()
    slots.release()
    await third


async def test_who_is_cancelled_while_it_waits_takes_no_slot() -> None:
    slots = Slots(1)
    await slots.acquire("a")
    gone, stays = asyncio.create_task(slots.acquire("a")), asyncio.create_task(slots.acquire("a"))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    slots.release()
    await stays
    slots.release()
    await slots.acquire("b")


async def test_a_slot_that_comes_with_the_cancellation_is_passed_on() -> None:
    slots = Slots(1)
    await slots.acquire("a")
    gone = asyncio.create_task(slots.acquire("a"))
    await asyncio.sleep(0)
    slots.release()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    async with asyncio.timeout(5):
        await slots.acquire("b")
