"""Times work on a device, and measures what the device can do at most. Used by the stages.

On a GPU, CUDA events time the work. The work is captured in a CUDA graph, so that the launches' cost on the host is not
part of the time. If data must come from memory, pass calls on several copies of the data, which together are larger
than the GPU's cache.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

Work = Callable[[], object]
_BLOCKS = 5  # of passes; the median of the blocks counts


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The maximum speeds of this device, measured in the same process."""

    bytes_per_second: float  # read and written
    flops: float  # of a square product in the stage's number type


def seconds_of(calls: Sequence[Work], device: torch.device, at_least: float, *, capture: bool = True) -> float:
    """Return the mean seconds of one of `calls` in a pass.

    The result is the median over blocks of passes, which take `at_least` seconds together. If one pass takes that long,
    its time is the result.

    capture: False for work that waits for the device, or that a graph cannot hold. Launches are then part of the time.
    """
    with torch.inference_mode():
        run = _captured(calls) if device.type == "cuda" and capture else _in_turn(calls)
        run()
        once = _elapsed(run, 1, device)
        if once >= at_least:
            return once / len(calls)
        passes = max(1, int(at_least / _BLOCKS / max(once, 1e-9)))
        return statistics.median(_elapsed(run, passes, device) / passes for _ in range(_BLOCKS)) / len(calls)


def _in_turn(calls: Sequence[Work]) -> Work:
    def run() -> None:
        for call in calls:
            call()

    return run


def _captured(calls: Sequence[Work]) -> Work:
    """Capture the calls as one graph.

    The calls first run on another stream. A capture requires these runs, which also compile the kernels.
    """
    run, graph = _in_turn(calls), torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _elapsed(run: Work, passes: int, device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(passes):
            run()
        return time.perf_counter() - started
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    events[0].record()
    for _ in range(passes):
        run()
    events[1].record()
    torch.cuda.synchronize(device)
    return sum(float(begin.elapsed_time(end)) for begin, end in pairwise(events)) / 1000


def measure_ceilings(device: torch.device, dtype: torch.dtype, copied_bytes: int, width: int) -> Ceilings:
    """Measure the fastest pass over this many bytes, and a product of matrices (width, width).

    The numbers are random, because zeros would be faster. In a graph, the driver makes the copy, which may be slower
    than a kernel. One of the passes only reads, because attention and products write little.
    """
    source = torch.randn(copied_bytes // dtype.itemsize, device=device, dtype=dtype)
    target = torch.empty_like(source)
    moved = {
        2: (lambda: target.copy_(source), lambda: torch.neg(source, out=target)),
        1: (lambda: torch.amax(source),),
    }
    rates = [
        times * copied_bytes / seconds_of([way], device, 0.1, capture=capture)
        for times, ways in moved.items()
        for way in ways
        for capture in (True, False)
    ]
    a, b = torch.randn((2, width, width), device=device, dtype=dtype).unbind()
    product_seconds = seconds_of([lambda: torch.mm(a, b)], device, 0.5)
    return Ceilings(max(rates), 2 * width**3 / product_seconds)
