"""Pauses work between the forwards of its model, for systems that cannot be stepped. Used by `systems`."""

from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Semaphore
from typing import TypeVar

import greenlet
from torch import nn

T = TypeVar("T")


def in_steps(model: nn.Module, work: Callable[[], T]) -> Generator[int, None, T]:
    """Yields the number of forwards done, with what follows each; returns what the work does, or raises what it raises.

    The work runs only while a step is asked for, and in the thread that asks: a thread of its own would have its own
    OpenMP threads, and while there are more of these than processors GNU's OpenMP lets all of them wait in the kernel.
    That halves the speed of whoever computes.
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
        while not paused.dead:  # whoever stops asking waits for the rest
            _resume(paused)
    return results[0]


def _resume(paused: greenlet.greenlet) -> None:
    """Until before the work's next forward, or to its end."""
    paused.parent = greenlet.getcurrent()
    paused.switch()


def in_steps_of_threads(model: nn.Module, work: Callable[[], T]) -> Generator[int, None, T]:
    """As `in_steps`, for work whose forwards run in a thread that it starts itself."""
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
            go.release()  # whoever stops asking waits for the rest
    return future.result()
