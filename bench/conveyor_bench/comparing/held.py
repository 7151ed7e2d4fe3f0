"""Runs work step by step, with one forward a step, for systems that have no step function. Used by `systems`."""

from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Semaphore
from typing import TypeVar

import greenlet
from torch import nn

T = TypeVar("T")


def in_steps(model: nn.Module, work: Callable[[], T]) -> Generator[int, None, T]:
    """Run the work. Yield after each forward how many are done. Return what the work returns, or raise what it raises.

    The work runs only while the caller requests a step, in the caller's thread. A separate thread would have its own
    OpenMP threads. With more OpenMP threads than processors, GNU's OpenMP waits in the kernel at every barrier, which
    halves the speed of all threads.
    """
    results: list[T] = []
    paused = greenlet.greenlet(lambda: results.append(work()))

    def pause(*_: object) -> None:
        assert paused.parent is not None, "`_resume` has set it"
        paused.parent.switch()

    hook = model.register_forward_pre_hook(pause)
    try:
        _resume(paused)
        number = 0
        while not paused.dead:
            _resume(paused)
            number += 1
            yield number
    finally:
        hook.remove()
        while not paused.dead:  # a caller that stops early waits for the rest of the work
            _resume(paused)
    return results[0]


def _resume(paused: greenlet.greenlet) -> None:
    """Run the work until its next forward, or to its end."""
    paused.parent = greenlet.getcurrent()
    paused.switch()


def in_steps_of_threads(model: nn.Module, work: Callable[[], T]) -> Generator[int, None, T]:
    """Like `in_steps`, for work that starts its own thread for its forwards."""
    go, stopped = Semaphore(0), Semaphore(0)

    def hold(*_: object) -> None:
        stopped.release()
        go.acquire()

    hook = model.register_forward_pre_hook(hold)
    with ThreadPoolExecutor(1) as thread:
        future: Future[T] = thread.submit(work)
        future.add_done_callback(lambda _: stopped.release())
        try:
            stopped.acquire()
            number = 0
            while not future.done():
                go.release()
                stopped.acquire()
                number += 1
                yield number
        finally:
            hook.remove()
            go.release()  # a caller that stops early waits for the rest of the work
    return future.result()
