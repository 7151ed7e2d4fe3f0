"""Runs plans of a causal model that ranks: the score is the logit of a token, or the difference of two tokens' logits.

Qwen3-Reranker answers "yes" or "no". Only the rows of these tokens are kept of the model's last layer, so transformers'
own code computes them, with the scaling of logits that some families have. See `runners.packed`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ModelError
from conveyor_engine.execution.models.head import split_head
from conveyor_engine.execution.models.kinds import TOKEN_SCORER
from conveyor_engine.execution.models.packed_linear import PackedLinear
from conveyor_engine.execution.placement import Placement
from conveyor_engine.execution.runners.packed import PackedRunner, check_settings
from conveyor_engine.execution.start import Progress, RunnerStart
from conveyor_engine.execution.transfer import to_device
from conveyor_engine.tasks.rerank.execution.files import read_scorer
from conveyor_engine.wire.step import AdmittedRow


class TokenScorer(PackedRunner):
    """One causal model that ranks, on one device."""

    def __init__(self, config: EngineConfig, placement: Placement, progress: Progress) -> None:
        """Load the model. Raises ConfigError or ModelError."""
        check_settings(config)
        start = RunnerStart(config, placement, progress, TOKEN_SCORER)
        scorer = read_scorer(Path(config.model), start.model_config)
        model = start.load()
        _keep_rows(model, scorer.token_ids)
        encoder, self._head, _ = split_head(model, per_token=True)
        super().__init__(start, encoder, scorer.max_seq_length, scorer.facts.encode())
        progress(f"event=scored_tokens ids={'-'.join(map(str, scorer.token_ids))} activation={scorer.facts.activation}")
        progress(f"event=largest_step_fits mib={self.find_step_bytes(start) / 2**20:.0f}")

    def _compute(self, prompts: Sequence[AdmittedRow]) -> list[torch.Tensor]:
        """Compute the score of each prompt's last token: float32 (prompts, 1)."""
        hidden, starts = self._encode([prompt.token_ids for prompt in prompts])
        last = to_device(np.array(starts[1:]) - 1, self.device)
        logits = self._head(hidden[last][:, None])[:, 0]
        return [logits if logits.shape[1] == 1 else logits[:, :1] - logits[:, 1:]]

    def _finish(self, computed: Sequence[npt.NDArray[Any]], prompts: Sequence[AdmittedRow]) -> Iterator[bytes]:
        for logit in computed[0]:
            yield logit.tobytes() if np.isfinite(logit).all() else b""


def _keep_rows(model: PreTrainedModel, token_ids: Sequence[int]) -> None:
    """Replace the model's last layer by its rows for these tokens. Raises ModelError if it has no such layer."""
    whole = model.get_output_embeddings()
    if not isinstance(whole, nn.Linear | PackedLinear):
        raise ModelError(f"{type(model).__name__} has no linear layer that computes its logits")
    rows = nn.Linear(whole.in_features, len(token_ids), bias=whole.bias is not None, device="meta")
    whole_parts = {"weight": whole.weight} | ({} if whole.bias is None else {"bias": whole.bias})
    kept = {name: tensor[list(token_ids)].clone() for name, tensor in whole_parts.items()}
    rows.load_state_dict(kept, assign=True)
    model.set_output_embeddings(rows.requires_grad_(False))
