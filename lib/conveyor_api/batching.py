"""`spec.batching` and `spec.kvCache`: how requests become batches, and what memory they may take.

The numbers that gateway, operator and engine must agree on are derived here, once.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from conveyor_api.base import ApiModel, Rule
from conveyor_api.engine import TASKS_OF_ONE_STEP
from conveyor_api.quantities import Duration, between, parse_duration_seconds

BatchingMode = Literal["None", "Static", "Dynamic", "Continuous"]

# What a service gets that names none. `status.effective` tells them: written into the object they could never follow
# the device or a newer release. A Static batch should fill, the window of a Dynamic one should not be felt.
DEFAULT_BATCH_SIZE: Final = 32
DEFAULT_WINDOWS: Final[Mapping[BatchingMode, str]] = {"Static": "1s", "Dynamic": "10ms"}

Tokens = Annotated[int, Field(ge=1, le=16_777_216)]

Window = Annotated[Duration, between("1ms", "1h")]


class Batching(ApiModel):
    """How requests become batches; also what the autoscaler aims at."""

    rules: ClassVar = (
        Rule(
            "!has(self.window) || (has(self.mode) && self.mode in ['Static', 'Dynamic'])",
            "window is only for modes Static and Dynamic; remove it, or set mode: Dynamic",
            lambda batching: batching.window is None or batching.mode in DEFAULT_WINDOWS,
            field="window",
        ),
        Rule(
            "!has(self.maxBatchTokens) || !has(self.maxBatchSize) || (has(self.mode) && self.mode == 'None')"
            " || self.maxBatchTokens >= self.maxBatchSize",
            "maxBatchTokens must be at least maxBatchSize: each request of a batch needs one token per step",
            lambda batching: (
                batching.max_batch_tokens is None or batching.max_batch_tokens >= batching.effective_batch_size
            ),
            field="maxBatchTokens",
        ),
    )

    mode: BatchingMode | None = None
    """None: one request at a time. Static: a batch starts when it is full or the window since its first request ends,
    is padded to its longest prompt, and all its answers leave together. Dynamic: a batch starts so too, unpadded, and
    each answer leaves when it is done; where the model generates, it has requests of similar length. Continuous:
    requests join and leave at every step. Default: Dynamic for tasks that take one step (Embed, Rerank, Classify), else
    Continuous."""
    max_batch_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Requests that run together on one engine; default: see `status.effective`. Mode None runs one, whatever this
    says."""
    window: Window | None = None
    """How long a batch waits for company since its first request, 1ms to 1h; default: `1s` for Static, `10ms` for
    Dynamic."""
    max_batch_tokens: Tokens | None = None
    """Tokens of one step over all requests; default: the engine's choice. In mode Dynamic, a batch whose prompts have
    so many tokens starts too."""

    def settle(self, task: str | None) -> "Batching":
        """The same with a mode: its own, or the one that services of this task have; None: the task is not known."""
        if self.mode is not None:
            return self
        return self.model_copy(update={"mode": "Dynamic" if task in TASKS_OF_ONE_STEP else "Continuous"})

    @property
    def chosen_batch_size(self) -> int:
        """`max_batch_size`, or the default, no more than a step may have tokens."""
        return self.max_batch_size or min(DEFAULT_BATCH_SIZE, self.max_batch_tokens or DEFAULT_BATCH_SIZE)

    @property
    def effective_batch_size(self) -> int:
        """B, the requests that one engine runs together: 1 for mode None."""
        return 1 if self.mode == "None" else self.chosen_batch_size

    @property
    def effective_window(self) -> str | None:
        """How long a batch waits for company; None for modes without a window."""
        return self.window or (None if self.mode is None else DEFAULT_WINDOWS.get(self.mode))

    @property
    def window_seconds(self) -> float:
        """How long a batch waits for company, in seconds; 0 for modes without a window."""
        return parse_duration_seconds(self.effective_window or "0s")

    @property
    def engine_place_limit(self) -> int:
        """Requests that one gateway may have on one engine at a time: its batch and an eighth, at least one more."""
        return self.effective_batch_size + max(1, self.effective_batch_size // 8)


class KVCache(ApiModel):
    """Memory for attention keys and values, in blocks that requests take as they grow."""

    rules: ClassVar = (
        Rule(
            "!(has(self.blockBudget) && has(self.memoryPercent))",
            "set blockBudget or memoryPercent, not both: one counts blocks, the other takes a share of memory",
            lambda kv_cache: kv_cache.block_budget is None or kv_cache.memory_percent is None,
            field="memoryPercent",
        ),
        Rule(
            "self.blockSize in [8, 16, 32, 64, 128]",
            "blockSize must be 8, 16, 32, 64 or 128 tokens",
            lambda kv_cache: kv_cache.block_size in (8, 16, 32, 64, 128),
            field="blockSize",
        ),
    )

    block_budget: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Number of blocks; excludes `memoryPercent`."""
    memory_percent: Annotated[int, Field(ge=1, le=99)] | None = None
    """Share of the device memory that weights and the largest step leave, in per cent; default `85` without
    `blockBudget`."""
    block_size: int = 16
    """Tokens per block: 8, 16, 32, 64 or 128."""

    @property
    def capacity_tokens(self) -> int | None:
        """Tokens that fit into `block_budget` blocks; None when the budget is measured at start."""
        return None if self.block_budget is None else self.block_budget * self.block_size

    @property
    def memory_fraction(self) -> float | None:
        """The share of memory to take; None leaves it to the engine, which takes less of a CPU's memory."""
        return None if self.memory_percent is None else self.memory_percent / 100
