"""Runs a sweep, and lets it restore what it has changed before SIGINT, SIGTERM or SIGHUP ends the program."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_interruptible(work: Coroutine[Any, Any, int], say: Callable[[str], None]) -> int:
    """Run `work` and return its exit code, or 128 plus the signal's number. Further signals have no effect."""
    return asyncio.run(_guard(work, say))


async def _guard(work: Coroutine[Any, Any, int], say: Callable[[str], None]) -> int:
    loop, task, received = asyncio.get_running_loop(), asyncio.ensure_future(work), list[signal.Signals]()

    def stop(number: signal.Signals) -> None:
        if not received:
            task.cancel()
            say(f"{number.name}: putting back what was changed")
        else:
            say("still putting back; please wait")
        received.append(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `asyncio.to_thread`, but a cancellation waits for the call to end, because a thread cannot be stopped."""
    call = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        raise
