"""Runs plans of a model with a classification head, which turns the hidden states of each prompt into logits.

For the tasks rerank and classify. See `runners.packed`.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PretrainedConfig

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.models.classifier_files import describe_classifier, describe_cross_encoder
from conveyor_engine.execution.models.head import split_head
from conveyor_engine.execution.models.kinds import CROSS_ENCODER, TOKEN_CLASSIFIER, ModelKind, find_kind
from conveyor_engine.execution.placement import Placement
from conveyor_engine.execution.runners.packed import PackedRunner, average, check_settings
from conveyor_engine.execution.start import Progress, RunnerStart
from conveyor_engine.execution.transfer import to_device
from conveyor_engine.wire.classification import ClassifierFacts
from conveyor_engine.wire.step import AdmittedRow


class ClassifyRunner(PackedRunner):
    """One classifier of sequences or of tokens."""

    def __init__(self, config: EngineConfig, placement: Placement, progress: Progress, kind: ModelKind) -> None:
        """Load the model. Raises ConfigError or ModelError."""
        check_settings(config)
        start = RunnerStart(config, placement, progress, kind)
        described = _describe(kind, Path(config.model), start.model_config)
        self._reads_types, self._per_token = described.num_token_types > 1, described.classifies_tokens
        encoder, self._head, self._place = split_head(start.load(), per_token=self._per_token)
        super().__init__(start, encoder, None, described.encode())
        facts = f"labels={len(described.labels)} activation={described.activation} token={self._place}"
        progress(f"event=head_chosen {facts}")
        progress(f"event=largest_step_fits mib={self.find_step_bytes(start) / 2**20:.0f}")

    def _compute(self, prompts: Sequence[AdmittedRow]) -> list[torch.Tensor]:
        """Compute logits (prompts, labels), or what `find_best` returns (tokens, 3) if the model classifies tokens."""
        hidden, starts = self._encode([prompt.token_ids for prompt in prompts], self._join_types(prompts))
        if self._per_token:
            return [find_best(self._head(hidden[None])[0])]
        if self._place == "mean":
            return [self._head(average(hidden, starts).to(hidden.dtype)[:, None])]
        read = np.array(starts[:-1]) if self._place == "first" else np.array(starts[1:]) - 1
        return [self._head(hidden[to_device(read, self.device)][:, None])]

    def _join_types(self, prompts: Sequence[AdmittedRow]) -> npt.NDArray[np.int64] | None:
        """Return the token types of all prompts, or None for a model with one type."""
        if not self._reads_types:
            return None
        types = [prompt.payload or bytes(len(prompt.token_ids)) for prompt in prompts]
        return np.frombuffer(b"".join(types), dtype=np.uint8).astype(np.int64)

    def _finish(self, computed: Sequence[npt.NDArray[Any]], prompts: Sequence[AdmittedRow]) -> Iterator[bytes]:
        ends = accumulate((len(prompt.token_ids) if self._per_token else 1 for prompt in prompts), initial=0)
        for begin, end in pairwise(ends):
            logits = computed[0][begin:end]
            yield logits.tobytes() if np.isfinite(logits).all() else b""


def find_best(logits: torch.Tensor) -> torch.Tensor:
    """Find the most likely label of each token. Returns (tokens, 3): label, its logit and its probability.

    logits: (tokens, labels).
    """
    best, labels = logits.max(dim=-1)
    return torch.stack((labels.float(), best, (best - logits.logsumexp(dim=-1)).exp()), dim=-1)


def build_cross_encoder(config: EngineConfig, placement: Placement, progress: Progress) -> ClassifyRunner:
    """Build the runner of a model that ranks."""
    return ClassifyRunner(config, placement, progress, CROSS_ENCODER)


def build_classifier(config: EngineConfig, placement: Placement, progress: Progress) -> ClassifyRunner:
    """Build the runner of a model that classifies texts or their tokens, as the class in its config.json says."""
    kind = find_kind("classify", Path(config.model))
    assert kind is not None, "the task has kinds"
    return ClassifyRunner(config, placement, progress, kind)


def _describe(kind: ModelKind, directory: Path, config: PretrainedConfig) -> ClassifierFacts:
    if kind is CROSS_ENCODER:
        return describe_cross_encoder(directory, config)
    return describe_classifier(directory, config, classifies_tokens=kind is TOKEN_CLASSIFIER)
