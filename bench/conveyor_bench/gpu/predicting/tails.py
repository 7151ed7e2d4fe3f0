"""Simulates how the blocks of decode attention share the memory's bandwidth until the last one ends. Pure.

The plan divides the keys as `execution/kernels/decode_plan.py` does on the device.
"""

import heapq
from collections import deque
from collections.abc import Sequence

from conveyor_bench.gpu.predicting.constants import (
    BLOCK_BYTES_PER_US,
    BLOCK_START_US,
    EMPTY_BLOCK_US,
    DecodeKernel,
    Part,
)

_ALIGNED_TO = 64  # keys


def count_blocks_at_once(part: Part, kernel: DecodeKernel) -> int:
    """Return how many blocks one processor runs at the same time."""
    by_registers = part.registers // (-(-kernel.registers // 8) * 8 * 32 * kernel.num_warps)
    by_memory = part.shared_bytes // (kernel.shared_bytes + part.block_bytes)
    return min(by_registers, by_memory, part.warps // kernel.num_warps)


def plan_shares(contexts: Sequence[int], kv_heads: int, part: Part, kernel: DecodeKernel) -> list[int]:
    """Return the keys of each program of one KV head, in the order of the grid; 0 for programs without work."""
    spread = max(1, kernel.programs_per_processor * part.processors // kv_heads)
    most = _align(max(kernel.least_keys, -(-sum(contexts) // spread)))
    shares: list[int] = []
    for keys in contexts:
        number = -(-keys // most)
        if kernel.most_shares is not None:
            number = min(number, kernel.most_shares)
        share = _align(-(-keys // number))
        shares += [max(0, min(share, keys - begin * share)) for begin in range(number)]
    return shares + [0] * (len(contexts) + spread - len(shares))


def _align(keys: int) -> int:
    return -(-keys // _ALIGNED_TO) * _ALIGNED_TO


def find_efficiency(contexts: Sequence[int], kv_heads: int, key_bytes: int, part: Part, kernel: DecodeKernel) -> float:
    """Return the share of a copy's bandwidth that one layer's decode attention reaches from first to last block.

    contexts: the number of keys of each row. key_bytes: the bytes of a key and a value of one head.
    """
    shares = plan_shares(contexts, kv_heads, part, kernel)
    blocks = deque(keys * key_bytes for keys in shares for _ in range(kv_heads))
    bandwidth = part.bytes_per_second / 1e6
    seconds = _run(blocks, count_blocks_at_once(part, kernel) * part.processors, bandwidth)
    return sum(contexts) * kv_heads * key_bytes / bandwidth / seconds


def _run(blocks: "deque[int]", places: int, bandwidth: float) -> float:
    """Return the microseconds until all blocks have read their bytes. bandwidth: bytes per microsecond."""
    now, done = 0.0, 0.0  # done: bytes that a block would have read if it had read since time 0
    starting: list[tuple[float, int]] = []  # when a block begins to read, and its bytes
    reading: list[float] = []  # for each block, the value of `done` at which it ends
    while blocks or starting or reading:
        while blocks and len(starting) + len(reading) < places:
            size = blocks.popleft()
            heapq.heappush(starting, (now + (BLOCK_START_US if size else EMPTY_BLOCK_US), size))
        rate = min(BLOCK_BYTES_PER_US, bandwidth / max(1, len(reading)))
        ends = now + (reading[0] - done) / rate if reading else float("inf")
        if starting and starting[0][0] <= ends:
            then, size = heapq.heappop(starting)
            done, now = done + (then - now) * rate, then
            if size:
                heapq.heappush(reading, done + size)
        else:
            done, now = heapq.heappop(reading), ends
    return now
