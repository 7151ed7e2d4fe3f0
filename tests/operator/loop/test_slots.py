"""Tests that the namespaces take turns in getting slots."""

import asyncio

from conveyor_operator.loop.slots import Slots, Turn


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def opened(limit: int, share: int) -> Slots:
    slots = Slots(limit, share)
    slots.open()
    return slots


async def acquire(slots: Slots, namespace: str, urgent: bool = True) -> None:
    await slots.take(slots.request(namespace, urgent))


async def take_all(slots: Slots, namespaces: list[str]) -> list[str]:
    """Return the order in which these get a slot, one after the other, if they ask in this order."""
    order: list[str] = []

    async def work(namespace: str) -> None:
        await acquire(slots, namespace)
        order.append(namespace)
        slots.release(namespace)

    await acquire(slots, "before")
    tasks = [asyncio.create_task(work(namespace)) for namespace in namespaces]
    await settle()
    slots.release("before")
    await asyncio.gather(*tasks)
    return order


async def test_a_namespace_with_many_waits_for_one_with_few() -> None:
    order = await take_all(opened(1, 1), ["many"] * 4 + ["few", "many", "one", "few"])
    assert order == ["many", "few", "one", "many", "few", "many", "many", "many"]


async def test_as_many_work_at_once_as_there_are_slots_and_no_namespace_has_more_than_its_share() -> None:
    slots = opened(3, 2)
    tasks = {name: asyncio.create_task(acquire(slots, name[0])) for name in ("a1", "a2", "a3", "b1", "b2", "c1")}

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
    slots = opened(2, 1)
    await acquire(slots, "a")
    second = asyncio.create_task(acquire(slots, "a"))
    await acquire(slots, "b")
    await settle()
    assert not second.done()
    slots.release("b")
    await settle()
    assert not second.done()
    slots.release("a")
    await second


async def test_who_is_cancelled_while_it_waits_takes_no_slot() -> None:
    slots = opened(1, 1)
    await acquire(slots, "a")
    gone, stays = asyncio.create_task(acquire(slots, "a")), asyncio.create_task(acquire(slots, "a"))
    await settle()
    gone.cancel()
    await settle()
    slots.release("a")
    await stays
    slots.release("a")
    await acquire(slots, "b")


async def test_a_slot_that_comes_with_the_cancellation_is_passed_on() -> None:
    slots = opened(1, 1)
    await acquire(slots, "a")
    gone = asyncio.create_task(acquire(slots, "a"))
    await settle()
    slots.release("a")
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    async with asyncio.timeout(120):
        await acquire(slots, "b")


async def test_what_is_urgent_or_has_become_so_goes_before_what_may_wait() -> None:
    slots = opened(1, 1)
    await acquire(slots, "before")
    order: list[str] = []

    async def work(name: str, turn: Turn) -> None:
        await slots.take(turn)
        order.append(name)
        slots.release(turn.namespace)

    turns = {name: slots.request(name[0], urgent=False) for name in ("a1", "a2", "b1", "a3")}
    turns |= {name: slots.request(name[0], urgent=True) for name in ("c1", "b2")}
    tasks = [asyncio.create_task(work(name, turn)) for name, turn in turns.items()]
    await settle()
    slots.make_urgent(turns["a3"])
    slots.make_urgent(turns["c1"])
    slots.release("before")
    await asyncio.gather(*tasks)
    assert order == ["c1", "b2", "a3", "a1", "b1", "a2"]
    slots.make_urgent(turns["a1"])  # too late: it is over
    await acquire(slots, "a")


async def test_a_namespace_that_is_always_urgent_leaves_slots_for_others() -> None:
    slots = opened(2, 1)
    await acquire(slots, "urgent")
    waiting = asyncio.create_task(acquire(slots, "urgent"))
    async with asyncio.timeout(120):
        await acquire(slots, "patient", urgent=False)
    await settle()
    assert not waiting.done()
    later = asyncio.create_task(acquire(slots, "urgent", urgent=False))
    await settle()
    slots.release("urgent")
    await waiting
    await settle()
    assert not later.done(), "its share is taken"
    slots.release("urgent")
    await later


async def test_who_may_wait_and_is_cancelled_takes_no_slot() -> None:
    slots = opened(1, 1)
    await acquire(slots, "a")
    gone = asyncio.create_task(acquire(slots, "b", urgent=False))
    await settle()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    slots.release("a")
    async with asyncio.timeout(120):
        await acquire(slots, "c", urgent=False)


async def test_there_are_no_slots_before_they_are_opened() -> None:
    slots = Slots(1, 1)
    waiting = asyncio.create_task(acquire(slots, "a"))
    await settle()
    assert not waiting.done()
    slots.open()
    await waiting
