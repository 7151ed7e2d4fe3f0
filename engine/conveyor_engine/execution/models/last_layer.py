"""Finds out whether a model's last layer may compute only the sampled tokens.

Such a layer still writes the keys and values of all tokens. `tasks.generate` calls this module once, after `fuse`.
Two conditions must hold: the last layer is one of our own, and after that layer the model processes each token by
itself. A tiny step checks the second condition. The step runs twice: once the last layer computes all tokens, and once
only two tokens.
"""

import numpy as np
import torch
from transformers import PreTrainedModel

from conveyor_engine.execution.attention.backend import AttentionMetadata, LastLayer, LayerShape
from conveyor_engine.execution.attention.interface import Paged, PagedStep
from conveyor_engine.execution.attention.torch_paged import TorchPaged
from conveyor_engine.execution.models import checks
from conveyor_engine.execution.models.layers import DecoderLayer
from conveyor_engine.execution.models.trial import same

_NUM_TOKENS, _SAMPLED = 8, (2, 7)


def find_last_layer(model: PreTrainedModel, layers: list[LayerShape]) -> int | None:
    """Return the index of the last layer; None if it has to compute all tokens."""
    last = len(layers) - 1
    if not any(isinstance(m, DecoderLayer) and m.self_attn.spec.layer == last for m in model.modules()):
        return None
    sampled = torch.tensor(_SAMPLED, device=model.device)
    backend = TorchPaged()
    backend.allocate(layers, 1, _NUM_TOKENS, model.dtype, model.device)
    whole = PagedStep(backend, _one_sequence(_NUM_TOKENS, model.device))
    few = PagedStep(backend, whole.metadata, LastLayer(last, sampled, _beginnings(model.device)))
    try:
        with torch.inference_mode():
            return last if same(_logits(model, whole)[sampled], _logits(model, few)) else None
    except checks.TRANSFORMERS_ERRORS as error:
        checks.raise_if_of_device(error)
        return None


def _logits(model: PreTrainedModel, paged: Paged) -> torch.Tensor:
    """Run the tiny step. Returns logits (n, vocabulary) for the n tokens that the last layer computes."""
    positions = torch.arange(_NUM_TOKENS, device=model.device)[None]
    tokens = positions % model.get_input_embeddings().num_embeddings
    logits: torch.Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False, paged=paged).logits
    return logits[0]


def _one_sequence(tokens: int, device: torch.device) -> AttentionMetadata:
    return lay_in_block([0, tokens], [tokens], torch.arange(tokens, device=device))


def _beginnings(device: torch.device) -> AttentionMetadata:
    """Return metadata in which each sampled token is the last token of its own sequence."""
    lengths = [position + 1 for position in _SAMPLED]
    return lay_in_block(list(range(len(lengths) + 1)), lengths, torch.tensor(_SAMPLED, device=device))


def lay_in_block(starts: list[int], lengths: list[int], slots: torch.Tensor) -> AttentionMetadata:
    """Build attention metadata for sequences that all lie in block 0."""
    device, number = slots.device, len(lengths)
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=torch.zeros((number, 1), dtype=torch.int32, device=device),
        slot_mapping=slots,
        num_seqs=number,
        num_decodes=number if len(slots) == number else 0,
        num_tokens=len(slots),
        query_start_loc_host=np.array(starts, dtype=np.int32),
        seq_lens_host=np.array(lengths, dtype=np.int32),
    )
