"""Captures work on the device as CUDA graphs, so that later one call launches all of its kernels.

Used by `tasks.generate` and `step_graphs`. Captured work must read and write tensors that stay at the same address,
and must not wait for a value from the device.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

Work = Callable[[], None]
# Captures the work and returns a function that runs it again. The capture may run the work too.
Capture = Callable[[Work], Work]


class CudaCapture:
    """Captures graphs on one device. They share the memory of their results, so only one may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Work:
        """Capture the work and return a function that replays it.

        Runs the work once before, because kernels that load or compile at their first call cannot be captured. If the
        capture raises, the engine can still run without a graph.
        """
        current, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
            torch.cuda.synchronize(self._device)
            with _no_garbage():
                # With "thread_local", the threads of other engines may call CUDA during the capture.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    work()
                    graph.capture_end()
                except BaseException:
                    self._abandon(graph)
                    raise
        current.wait_stream(self._stream)
        return graph.replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that has failed.

        An operation that is not allowed in a capture invalidates the capture. In torch 2.11, `capture_end` then raises
        before it closes the graph's memory pool, and while a pool is open the allocator cannot free memory
        (`torch.cuda.empty_cache`). Newer versions close the pool themselves. Ending a capture or a pool twice raises an
        error without further effect.
        """
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Disable garbage collection. During a capture, freeing another engine's graphs would call the driver."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def choose_capture(device: torch.device, enforce_eager: bool) -> Capture | None:
    """Return how to capture steps; None on devices other than CUDA, or if `enforce_eager` is set."""
    return CudaCapture(device) if device.type == "cuda" and not enforce_eager else None


def run_again(work: Work) -> Work:
    """Return the work itself. Replaces a capture in tests and trial runs without a GPU."""
    return work
