"""Pauses work between the forwards of its model, for systems that cannot be stepped. Used by `systems`."""

from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Semaphore
from typing import TypeVar

from torch import nn

T = TypeVar("T")


def in_steps(model: nn.Module, work: Callable[[], T]) -> Generator[int, None, T]:
    """Yields the number of forwards done, with what follows each; returns what the work does, or raises what it raises.

    The work runs in another thread, whichever of its threads calls the model, and only while a step is asked for.
    """
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
