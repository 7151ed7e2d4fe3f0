"""Runs plans of an embedding model, which turns the hidden states of each prompt into one vector.

See `runners.packed`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from transformers import PretrainedConfig

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.models.kinds import TEXT_ENCODER
from conveyor_engine.execution.placement import Placement
from conveyor_engine.execution.runners.packed import PackedRunner, check_settings
from conveyor_engine.execution.start import Progress, RunnerStart
from conveyor_engine.tasks.embed.execution.dense import read_dense
from conveyor_engine.tasks.embed.execution.files import Instructions, read_instructions, read_pooling
from conveyor_engine.tasks.embed.execution.pooling import finish, pool
from conveyor_engine.tasks.embed.facts import EmbeddingFacts, PoolingMode, PoolingParams
from conveyor_engine.wire.step import AdmittedRow


class PoolRunner(PackedRunner):
    """One embedding model on one device."""

    def __init__(self, config: EngineConfig, placement: Placement, progress: Progress) -> None:
        """Load the model. Raises ConfigError or ModelError."""
        check_settings(config)
        start = RunnerStart(config, placement, progress, TEXT_ENCODER)
        self._pooling = read_pooling(Path(config.model))
        instructions = read_instructions(Path(config.model))
        super().__init__(start, start.load(), self._pooling.max_seq_length, of_task=b"")
        self._mode: PoolingMode = self._pooling.mode or ("last" if self.is_causal else "mean")
        hidden_size = int(start.model_config.hidden_size)
        self._dense, size = read_dense(Path(config.model), self._pooling.dense, hidden_size, self.device)
        embedding = _describe(start.model_config, size, instructions, self._mode)
        self.facts = msgspec.structs.replace(self.facts, of_task=embedding.encode())
        progress(f"event=pooling_chosen mode={self._mode} normalizes={str(self._pooling.normalizes).lower()}")
        progress(f"event=largest_step_fits mib={self.find_step_bytes(start) / 2**20:.0f}")

    def _compute(self, prompts: Sequence[AdmittedRow]) -> torch.Tensor:
        return self._pool([prompt.token_ids for prompt in prompts])

    def _pool(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Compute one vector for each prompt, float32 (prompts, size)."""
        vectors: torch.Tensor = self._dense(pool(*self._encode(prompts), self._mode))
        return vectors

    def _finish(self, computed: npt.NDArray[np.float32], prompts: Sequence[AdmittedRow]) -> Iterator[bytes]:
        for vector, prompt in zip(computed, prompts, strict=True):
            yield finish(vector, PoolingParams.read(prompt.payload), normalizes=self._pooling.normalizes)


def _describe(
    model_config: PretrainedConfig, size: int, instructions: Instructions, mode: PoolingMode
) -> EmbeddingFacts:
    """Return facts from the fields of config.json that vLLM reads: `is_matryoshka` and `matryoshka_dimensions`."""
    named = getattr(model_config, "matryoshka_dimensions", None)
    named = named if isinstance(named, list | tuple) else ()
    named = tuple(sorted({d for d in named if type(d) is int and 1 <= d <= size}))
    return EmbeddingFacts(
        size=size,
        pooling=mode,
        is_matryoshka=bool(named) or getattr(model_config, "is_matryoshka", False) is True,
        matryoshka_dimensions=named,
        instructions=dict(instructions.texts),
        default_instruction=instructions.default,
    )
