"""Pauses work between the forwards of its model, for systems that cannot be stepped. Used by `systems`.

Each thread that computes has OpenMP threads of its own. While there are more of these than processors, GNU's OpenMP
waits through the kernel at every barrier, in all of them, whatever its environment says. So a pause ends them.
"""

import ctypes
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Semaphore
from typing import TypeVar

from torch import nn

T = TypeVar("T")

_SOFT_PAUSE = 1  # omp_pause_soft: settings stay


def end_openmp_threads() -> None:
    """Those of the calling thread; its next parallel region starts them anew."""
    ctypes.CDLL("libgomp.so.1").omp_pause_resource_all(_SOFT_PAUSE)  # torch has loaded it


def in_steps(model: nn.Module, work: Callable[[], T]) -> Generator[int, None, T]:
    """Yields the number of forwards done, with what follows each; returns what the work does, or raises what it raises.

    The work runs in another thread, whichever of its threads calls the model, and only while a step is asked for.
    """
    go, stopped = Semaphore(0), Semaphore(0)

    def hold(*_: object) -> None:
        end_openmp_threads()
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
