"""Runs encoders whose classes compute attention in their own way, such as MPNet and DeBERTa with relative positions.

Called by `runners.packed`. Such a model keeps all of transformers' code. Sequences of one length are a batch, so that
none has padding, and results are those of each sequence alone.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from conveyor_engine.execution.transfer import to_device

_SCORES_MAX: Final = 1 << 21  # of one head in one batch: 8 sequences of 512 tokens


def find_first_position(model: PreTrainedModel) -> int:
    """Return the position of a sequence's first token: as in RoBERTa, or 0."""
    padding = getattr(getattr(model, "embeddings", None), "padding_idx", None)
    return padding + 1 if isinstance(padding, int) else 0


def encode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    token_types: npt.NDArray[np.int64] | None,
    starts: Sequence[int],
) -> torch.Tensor:
    """Return the hidden states (T, H) of all prompts. starts: where each prompt begins, followed by T."""
    hidden: torch.Tensor | None = None
    for rows in _group(prompts):
        length = len(prompts[rows[0]])
        where = np.array([np.arange(starts[row], starts[row] + length) for row in rows])
        given = {"input_ids": np.array([prompts[row] for row in rows], dtype=np.int64)}
        if token_types is not None:
            given["token_type_ids"] = token_types[where]
        inputs = {name: to_device(values, model.device) for name, values in given.items()}
        computed: torch.Tensor = model(**inputs).last_hidden_state
        if hidden is None:
            hidden = computed.new_empty((starts[-1], computed.shape[-1]))
        hidden[to_device(where.flatten(), model.device)] = computed.flatten(0, 1)
    assert hidden is not None
    return hidden


def _group(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return groups of prompts of one length, none with more attention scores than the limit."""
    by_length: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(row)
    groups = []
    for length, rows in by_length.items():
        most = max(1, _SCORES_MAX // length**2)
        groups += [rows[first : first + most] for first in range(0, len(rows), most)]
    return groups
