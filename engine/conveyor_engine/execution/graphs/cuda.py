"""Captures work on the device as CUDA graphs: later one call launches all of its kernels. Used by `step_graphs`.

Work that is captured reads and writes tensors that stay where they are, and asks the device for nothing.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

Work = Callable[[], None]
Capture = Callable[[Work], Work]  # may run the work; what it returns does the same again


class CudaCapture:
    """Graphs of one device, which share the memory of what they compute: one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Work:
        """Runs the work once before: what loads or compiles at its first call cannot be captured.

        If it raises, the engine can go on without a graph.
        """
        current, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
            torch.cuda.synchronize(self._device)
            with _no_garbage():
                graph.capture_begin(self._pool, capture_error_mode="thread_local")  # another engine's thread may go on
                try:
                    work()
                    graph.capture_end()
                except BaseException:
                    self._abandon(graph)
                    raise
        current.wait_stream(self._stream)
        return graph.replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture that has failed.

        Something that a stream must not do in a capture invalidates it. In torch 2.11 `capture_end` raises then before
        it closes the graph's memory pool, and while a pool is open the allocator refuses to free memory
        (`torch.cuda.empty_cache`). Newer ones close it themselves. To end a capture or a pool twice is an error without
        consequences.
        """
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Disable garbage collection: it could free another engine's graphs, which calls the driver during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def choose_capture(device: torch.device, enforce_eager: bool) -> Capture | None:
    """CUDA graphs, where there are any and they are wanted."""
    return CudaCapture(device) if device.type == "cuda" and not enforce_eager else None


def run_again(work: Work) -> Work:
    """In place of a capture where there is no GPU: in rehearsals and tests."""
    return work
