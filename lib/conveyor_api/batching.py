"""`spec.batching` and `spec.kvCache`: how requests become batches, and how much memory they may take.

Gateway, operator and engine must agree on some numbers. This module derives these numbers for all of them.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from conveyor_api.base import ApiModel, Rule
from conveyor_api.quantities import Duration, between, parse_duration_seconds
from conveyor_protocol.tasks import TASKS

BatchingMode = Literal["None", "Static", "Dynamic", "Continuous"]
KVCacheDtype = Literal["Auto", "FP8", "INT8"]

# Defaults for services that do not set these fields. `status.effective` reports them. They are not written into the
# object, because they depend on the device and may change in a newer release. The window of Static is long, so that
# batches become full. The window of Dynamic is too short for clients to notice.
DEFAULT_BATCH_SIZE: Final = 32
DEFAULT_BATCH_SIZE_CUDA: Final = 256  # for models that generate text
DEFAULT_WINDOWS: Final[Mapping[BatchingMode, str]] = {"Static": "1s", "Dynamic": "10ms"}

Tokens = Annotated[int, Field(ge=1, le=16_777_216)]

Window = Annotated[Duration, between("1ms", "1h")]


Objective = Annotated[Duration, between("1ms", "1h")]


class Objectives(ApiModel):
    """Latencies that 95 of 100 requests or tokens should not exceed. Depending on the traffic, the engine changes how
    many requests run together and how many prompt tokens a step has, up to `maxBatchSize` and `maxBatchTokens`. If even
    the lowest limits miss an objective, docs/objectives.md lists which limits the engine uses."""

    rules: ClassVar = (
        Rule(
            "has(self.timeToFirstToken) || has(self.interTokenLatency) || has(self.latency)",
            "name timeToFirstToken, interTokenLatency or latency, or remove objectives",
            lambda objectives: objectives.of_tokens or objectives.latency is not None,
        ),
        Rule(
            "!has(self.latency) || (!has(self.timeToFirstToken) && !has(self.interTokenLatency))",
            "latency is for models that take one step, timeToFirstToken and "
            "interTokenLatency are for models that generate; keep what fits the model",
            lambda objectives: objectives.latency is None or not objectives.of_tokens,
            field="latency",
        ),
    )

    time_to_first_token: Objective | None = None
    """Time from a request's arrival at an engine to its first token, 1ms to 1h. Time during which the batch is full
    does not count; the autoscaler shortens that time by adding replicas."""
    inter_token_latency: Objective | None = None
    """Time between two tokens of an answer, 1ms to 1h."""
    latency: Objective | None = None
    """Time to the result of a request, 1ms to 1h, measured like `timeToFirstToken`, for tasks that take one step."""

    @property
    def of_tokens(self) -> bool:
        """Return whether an objective for models that generate is set."""
        return self.time_to_first_token is not None or self.inter_token_latency is not None


class Batching(ApiModel):
    """How requests are grouped into batches. The autoscaler derives its targets from the batch size."""

    rules: ClassVar = (
        Rule(
            "!has(self.window) || (has(self.mode) && self.mode in ['Static', 'Dynamic'])",
            "window is only for modes Static and Dynamic; remove it, or set mode: Dynamic",
            lambda batching: batching.window is None or batching.mode in DEFAULT_WINDOWS,
            field="window",
        ),
        Rule(
            "self.lengthGrouping == 'Auto' || (has(self.mode) && self.mode in ['Static', 'Dynamic'])",
            "lengthGrouping is only for modes Static and Dynamic; remove it, or set mode: Dynamic",
            lambda batching: batching.length_grouping == "Auto" or batching.mode in DEFAULT_WINDOWS,
            field="lengthGrouping",
        ),
        Rule(
            "!self.eager || (has(self.mode) && self.mode in ['Static', 'Dynamic'])",
            "eager is only for modes Static and Dynamic; remove it, or set mode: Dynamic",
            lambda batching: not batching.eager or batching.mode in DEFAULT_WINDOWS,
            field="eager",
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
        Rule(
            "!has(self.objectives) || !has(self.mode) || self.mode in ['Continuous', 'Dynamic']",
            "objectives are for modes Continuous and Dynamic; remove them, or change mode",
            lambda batching: batching.objectives is None or batching.mode in (None, "Continuous", "Dynamic"),
            field="objectives",
        ),
    )

    mode: BatchingMode | None = None
    """None: one request at a time. Static: a batch starts when it is full, or `window` after its first request. It is
    padded, and its responses are sent together. Dynamic: a batch starts as in Static, without padding, and each
    response is sent when it is done. Continuous: requests join and leave the batch at every step. Default: Continuous
    for Generate, Transcribe and ImageGenerate; otherwise Dynamic."""
    max_batch_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Requests that run together on one engine; default: 256 for models that generate text with `engine.device: CUDA`,
    32 for all other models and for `runtime: VLLM`; see `status.effective`. Mode None always runs one."""
    window: Window | None = None
    """How long a batch waits for more requests after its first one, 1ms to 1h; default: `1s` for Static, `10ms` for
    Dynamic."""
    max_batch_tokens: Tokens | None = None
    """Limit of tokens in one step; default: chosen by the engine. In modes Static and Dynamic also of the prompts of a
    batch: the sum of their tokens, or with padding the longest times their number. A longer prompt forms a batch by
    itself. For images it counts pixels: those that the model reads, or that a step of ImageGenerate computes."""
    length_grouping: Literal["Auto", "Off"] = "Auto"
    """Whether a batch in modes Static and Dynamic prefers requests of similar length, or images of similar size. Auto:
    if batches are padded, or if responses of different lengths wait for each other. A request whose window has passed
    joins the next batch with room. Off: only the order of the queue counts."""
    eager: bool = False
    """Whether an idle engine starts a batch at once with the waiting requests, without waiting for `window`; for modes
    Static and Dynamic."""

    objectives: Objectives | None = None
    """Latencies that the engine meets by adapting its batch limits; default: the limits are fixed."""

    def settle(self, task: str | None, default_batch_size: int = DEFAULT_BATCH_SIZE) -> "Batching":
        """Return the same settings with a mode and a batch size: those that are set, else the defaults.

        task: None if it is not known yet. default_batch_size: for the service's device and task.
        """
        mode = self.mode or (TASKS[task].default_mode if task else "Continuous")
        size = self.max_batch_size or min(default_batch_size, self.max_batch_tokens or default_batch_size)
        return self.model_copy(update={"mode": mode, "max_batch_size": size})

    @property
    def chosen_batch_size(self) -> int:
        """Return `max_batch_size`. If it is not set: the default for CPUs, or the tokens of a step if they are fewer.

        Only `settle` knows the default for the service's device and task.
        """
        return self.max_batch_size or min(DEFAULT_BATCH_SIZE, self.max_batch_tokens or DEFAULT_BATCH_SIZE)

    @property
    def effective_batch_size(self) -> int:
        """Return how many requests one engine runs together: 1 for mode None."""
        return 1 if self.mode == "None" else self.chosen_batch_size

    @property
    def effective_window(self) -> str | None:
        """Return how long a batch waits for more requests; None for modes without a window."""
        return self.window or (None if self.mode is None else DEFAULT_WINDOWS.get(self.mode))

    @property
    def window_seconds(self) -> float:
        """Return how long a batch waits for more requests, in seconds; 0 for modes without a window."""
        return parse_duration_seconds(self.effective_window or "0s")

    @property
    def engine_place_limit(self) -> int:
        """Return how many requests a gateway may have at an engine: a batch, plus an eighth of it (at least one)."""
        return self.effective_batch_size + max(1, self.effective_batch_size // 8)


class KVCache(ApiModel):
    """Memory for attention keys and values, in blocks that requests allocate as they grow."""

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
    """Share in percent of the device memory that remains beside the weights and the largest step; default `85` without
    `blockBudget`. On a CPU, the default is at most 4 GiB, unless one request of the whole context needs more."""
    block_size: int = 16
    """Tokens per block: 8, 16, 32, 64 or 128."""
    dtype: KVCacheDtype = "Auto"
    """Number format of the cache. Auto: the same as `engine.dtype`. FP8 and INT8 hold almost twice the tokens in the
    same memory and round keys and values to 8 bits. Both need a GPU, FP8 one with compute capability 8.9 or newer."""

    @property
    def capacity_tokens(self) -> int | None:
        """Return how many tokens fit into `block_budget` blocks; None if the engine chooses the number."""
        return None if self.block_budget is None else self.block_budget * self.block_size

    @property
    def memory_fraction(self) -> float | None:
        """Return `memory_percent` as a share from 0 to 1; None if not set, so that the engine's default applies."""
        return None if self.memory_percent is None else self.memory_percent / 100
