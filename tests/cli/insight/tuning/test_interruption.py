"""Checks that signals end a sweep in order, and only once."""

import asyncio
import os
import signal

import pytest

from conveyor_insight.tuning.interruption import in_thread, run_interruptible


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_work_after_its_clean_up_which_a_second_one_does_not_stop(number: signal.Signals) -> None:
    lines: list[str] = []

    async def work() -> int:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(60)
        finally:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.1)
            lines.append("put back")
        return 0

    assert run_interruptible(work(), lines.append) == 128 + number
    assert lines == [f"{number.name}: putting back what was changed", "still putting back; please wait", "put back"]


def test_without_a_signal_the_code_is_the_work_s_and_errors_are_its_own() -> None:
    async def work(code: int) -> int:
        if code > 5:
            raise ValueError("broken")
        return code

    assert run_interruptible(work(3), print) == 3
    with pytest.raises(ValueError, match="broken"):
        run_interruptible(work(6), print)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


async def test_a_call_in_a_thread_ends_before_its_cancellation_is_reported() -> None:
    """Otherwise its write could come after the restoring write."""
    begun, release, ended = asyncio.Event(), asyncio.Event(), False
    loop = asyncio.get_running_loop()

    def write() -> None:
        nonlocal ended
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
        ended = True

    task = asyncio.create_task(in_thread(write))
    await begun.wait()
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended
