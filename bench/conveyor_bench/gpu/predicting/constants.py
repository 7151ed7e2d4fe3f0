"""The constants of the time model: what was assumed before a GPU had run anything. Plain data.

The values are from the review of commit 5e6c629 (2026-11-24). They are not adjusted to measurements, because a model
that follows its measurements predicts nothing. Measurements on GPUs are in docs/benchmarks.md.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Part:
    """A GPU."""

    capability: int
    processors: int
    bytes_per_second: float  # of a copy
    flops: float  # of a product of bfloat16 matrices
    registers: int = 65_536  # of a processor
    shared_bytes: int = 233_472  # of a processor
    block_bytes: int = 1024  # of shared memory, reserved for each block
    warps: int = 64  # of a processor, at most


PARTS: Final = {
    "h200": Part(90, 132, 4.2e12, 650e12),
    "h100": Part(90, 132, 3.0e12, 650e12),
}

FRACTIONS: Final = (0.75, 0.85)  # shares of a copy's bandwidth that decode attention reaches while all processors work
BLOCK_BYTES_PER_US: Final = 29e3  # the most that a block reads: its bytes in flight divided by the memory's latency
BLOCK_START_US: Final = 2.5
EMPTY_BLOCK_US: Final = 0.7


@dataclass(frozen=True, slots=True)
class DecodeKernel:
    """Decode attention: what the compiler made of it, and how its plan divides the keys."""

    registers: int  # of a thread
    shared_bytes: int
    num_warps: int
    programs_per_processor: int
    least_keys: int  # of a share
    most_shares: int | None  # of a row


@dataclass(frozen=True, slots=True)
class Kernels:
    """All kernels of a step."""

    small_kernel_us: float  # least time of each small kernel: norms, heads with KV write, activation
    gap_us: float  # between two kernels of a graph
    attention_us: float  # of a layer's decode attention, beside its reads
    prompt_flops: float  # share of the FLOP/s that attention over prompts reaches
    logits_copies: float  # bytes that sampling moves, in copies of the logits
    sample_us: float
    host_ms: float  # of a step
    host_row_ms: float
    eager_ms: float  # additional time of the host for a step outside graphs


LAUNCHES_OF_A_LAYER: Final = 9
LAUNCHES_BESIDE_LAYERS: Final = 24

BEFORE: Final = Kernels(2.6, 0.9, 6, 0.35, 3.6, 75, 0.45, 0.0043, 5.5)
DECODES_BEFORE: Final = DecodeKernel(148, 70 * 1024, 4, programs_per_processor=3, least_keys=256, most_shares=None)
AFTER: Final = Kernels(2.2, 0.3, 4, 0.55, 1.0, 30, 0.45, 0.0043, 5.5)
"""The review's goals: early launches, no copy of the logits, one kernel that samples, split loops for prompts."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's shape."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


QWEN3_06B: Final = Shape(28, 1024, 3072, 16, 8, 128, 151_936)
BATCHED_TOKENS: Final = 8192
GRAPH_ROWS: Final = (1, 2, 4, 8, *range(16, 257, 16))

BARS: Final = {"bfloat16": 1.14, "fp8": 1.40, "int8": 1.40}  # least ratio of tokens a second to those of BEFORE
