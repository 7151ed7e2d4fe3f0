"""Tests results that are kept for some seconds and shared."""

import asyncio

import pytest

from conveyor_console.sharing import Shared


class Source:
    """Counts its reads. `failing`: whether they fail."""

    def __init__(self) -> None:
        self.num_reads = 0
        self.failing = False

    async def read(self) -> int:
        self.num_reads += 1
        await asyncio.sleep(0.01)
        if self.failing:
            raise OSError
        return self.num_reads


async def test_those_who_ask_at_once_and_soon_after_share_one_read() -> None:
    source, shared = Source(), Shared[str, int](60, 10)
    assert await asyncio.gather(*(shared.get("a", source.read) for _ in range(100))) == [1] * 100
    assert await shared.get("a", source.read) == 1
    assert await shared.get("b", source.read) == 2


async def test_an_old_result_is_read_again() -> None:
    source, shared = Source(), Shared[str, int](0.1, 10)
    await shared.get("a", source.read)
    await asyncio.sleep(0.15)
    assert await shared.get("a", source.read) == 2


async def test_the_oldest_results_are_evicted() -> None:
    source, shared = Source(), Shared[str, int](60, 2)
    for key in ("a", "b", "c"):
        await shared.get(key, source.read)
    assert await shared.get("b", source.read) == 2
    assert await shared.get("a", source.read) == 4


async def test_a_failure_reaches_all_who_share_it_and_is_not_kept() -> None:
    source, shared = Source(), Shared[str, int](60, 10)
    source.failing = True
    failures = await asyncio.gather(*(shared.get("a", source.read) for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in failures] == [OSError] * 3
    source.failing = False
    assert await shared.get("a", source.read) == 2


async def test_a_caller_that_is_cancelled_ends_no_read_of_others() -> None:
    source, shared = Source(), Shared[str, int](60, 10)
    first, second = (asyncio.create_task(shared.get("a", source.read)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 1
    with pytest.raises(asyncio.CancelledError):
        await first
