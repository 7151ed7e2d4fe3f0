"""Slots go to the namespaces in turn."""

import asyncio

from conveyor_operator.loop.slots import Slots


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def take_all(slots: Slots, namespaces: list[str]) -> list[str]:
    """The order in which those who ask in this order get a slot, one after the other."""
    order: list[str] = []

    async def work(namespace: str) -> None:
        await slots.acquire(namespace)
        order.append(namespace)
        slots.release(namespace)

    await slots.acquire("before")
    tasks = [asyncio.create_task(work(namespace)) for namespace in namespaces]
    await settle()
    slots.release("before")
    await asyncio.gather(*tasks)
    return order


async def test_a_namespace_with_many_waits_for_one_with_few() -> None:
    order = await take_all(Slots(1, 1), ["many"] * 4 + ["few", "many", "one", "few"])
    assert order == ["many", "few", "one", "many", "few", "many", "many", "many"]


async def test_as_many_work_at_once_as_there_are_slots_and_no_namespace_has_more_than_its_share() -> None:
    slots = Slots(3, 2)
    tasks = {name: asyncio.create_task(slots.acquire(name[0])) for name in ("a1", "a2", "a3", "b1", "b2", "c1")}

    def waiting() -> set[str]:
        return {name for name, task in tasks.items() if not task.done()}

    await settle()
    assert waiting() == {"a3", "b2", "c1"}
    slots.release("b")
    await settle()
    assert waiting() == {"a3", "c1"}
    slots.release("a")
    await settle()
    assert waiting() == {"a3"}, "c asked before a had room"
    slots.release("a")
    await settle()
    assert not waiting()


async def test_slots_that_one_namespace_may_not_have_are_left_for_others() -> None:
    slots = Slots(2, 1)
    await slots.acquire("a")
    second = asyncio.create_task(slots.acquire("a"))
    await slots.acquire("b")
    await settle()
    assert not second.done()
    slots.release("b")
    await settle()
    assert not second.done()
    slots.release("a")
    await second


async def test_who_is_cancelled_while_it_waits_takes_no_slot() -> None:
    slots = Slots(1, 1)
    await slots.acquire("a")
    gone, stays = asyncio.create_task(slots.acquire("a")), asyncio.create_task(slots.acquire("a"))
    await settle()
    gone.cancel()
    await settle()
    slots.release("a")
    await stays
    slots.release("a")
    await slots.acquire("b")


async def test_a_slot_that_comes_with_the_cancellation_is_passed_on() -> None:
    slots = Slots(1, 1)
    await slots.acquire("a")
    gone = asyncio.create_task(slots.acquire("a"))
    await settle()
    slots.release("a")
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    async with asyncio.timeout(120):
        await slots.acquire("b")
