"""Defines the four modes as users would set them for a given KV memory. Used by `virtual` and `measured`."""

from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from conveyor_engine.config.engine_config import BatchingMode, EngineConfig, Padding
from conveyor_engine.wire.request import ModelFacts


@dataclass(frozen=True, slots=True)
class Mode:
    """A batching mode, and how its batch limit is chosen."""

    batching: BatchingMode
    padding: Padding | None = None
    reserves: bool = False  # whether the batch limit is the number of longest requests that fit into the KV memory


MODES = {
    "none": Mode("none"),
    "static": Mode("static", "real", reserves=True),
    "dynamic": Mode("dynamic", reserves=True),
    "continuous": Mode("continuous"),
}
CONTINUOUS_RESERVED = Mode("continuous", reserves=True)  # has Static's batch limit, to compare only the policy


@dataclass(frozen=True, slots=True)
class Memory:
    """The limits of a device: tokens in its KV cache, and requests in a batch."""

    kv_tokens: int
    batch_limit: int

    def limit(self, mode: Mode, longest_total_tokens: int) -> int:
        """Return the maximum number of requests in a step."""
        if mode.batching == "none":
            return 1
        reserved = max(1, self.kv_tokens // longest_total_tokens)
        return min(self.batch_limit, reserved) if mode.reserves else self.batch_limit


def build_config(mode: Mode, facts: ModelFacts, num_requests: int, **settings: Any) -> EngineConfig:
    """Return the engine's configuration for this mode. Prefix caching is off, because prompts share no prefix."""
    return EngineConfig(
        batching_mode=mode.batching,
        padding=mode.padding,
        length_grouping="off" if mode.padding == "real" else "auto",  # off: the naive batches of published comparisons
        max_num_seqs=facts.max_num_seqs,
        max_num_queued_requests=num_requests,
        block_size=facts.block_size,
        prefix_caching=False,
        warmup=False,
        **settings,
    )


def limit_facts(facts: ModelFacts, max_num_seqs: int, max_model_len: int) -> ModelFacts:
    """Return the facts with a smaller batch limit and shorter requests."""
    return replace(facts, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
