"""Masks: which tokens some rows may be given in this step. Used by `sampler`, before all processors."""

from collections.abc import Sequence

import numpy as np
import torch

from conveyor_engine.execution.sampling.processor import Samples
from conveyor_engine.execution.transfer import to_device
from conveyor_engine.wire.step import RowMask

_BITS = 8


def mask_rows(logits: torch.Tensor, samples: Samples, masks: Sequence[RowMask]) -> torch.Tensor:
    """A copy of logits (entries, vocabulary) in which tokens that the masks do not allow have minus infinity.

    The bits travel to the device as they are; a row's masks may be longer than the vocabulary.
    """
    entry_of = {row: entry for entry, row in enumerate(samples.rows.tolist())}
    entries = to_device(np.array([entry_of[mask.row] for mask in masks], dtype=np.int64), logits.device)
    packed = np.array([np.frombuffer(mask.allowed, dtype=np.uint8) for mask in masks])
    shifts = torch.arange(_BITS, dtype=torch.uint8, device=logits.device)
    bits = (to_device(packed, logits.device)[..., None] >> shifts) & 1
    forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    return logits.index_put((entries,), logits[entries].masked_fill(forbidden, float("-inf")))
