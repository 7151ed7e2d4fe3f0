"""What changes the logits of rows before a token is chosen: masks, then the processors in their order.

Used by `sampler`; `processor` says what a processor is. Rows that use none of them pay for none.
"""

from collections.abc import Sequence

import numpy as np
import torch

from conveyor_engine.execution.sampling.processor import ALWAYS, Int64, LogitProcessor, Samples
from conveyor_engine.execution.sampling.row_values import RowValues
from conveyor_engine.execution.transfer import to_device
from conveyor_engine.wire.step import RowMask, RowSampling

GREEDY_BELOW = 1e-5  # vLLM's limit of a temperature: float32 cannot divide by much less
_BITS = 8


def build_processors(max_num_seqs: int, device: torch.device) -> list[LogitProcessor]:
    """In the order in which they act. After them come top_k and top_p, which `Cuts` makes part of the draw."""
    return [
        MinTokens(max_num_seqs, device),
        # Others that can make another token the best go here: bias, penalties.
        Temperature(max_num_seqs, device),
        # Others that work on probabilities go here: min_p.
    ]


class MinTokens:
    """Before it has so many tokens, a row cannot choose one that would end it.

    Keeps each row's stop tokens, padded to the same number by repeating the row's last one.
    """

    changes_best = True

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._device = device
        self._stop_ids = RowValues(np.zeros((max_num_seqs, 1), dtype=np.int64), device)

    def set_row(self, row: int, sampling: RowSampling) -> int:
        stop_ids = sampling.stop_ids
        if not stop_ids:
            return 0
        self._widen(len(stop_ids))
        repeated = self._stop_ids.host.shape[1] - len(stop_ids)
        self._stop_ids[row] = (*stop_ids, *stop_ids[-1:] * repeated)
        return sampling.min_length

    def apply(self, logits: torch.Tensor, samples: Samples, users: Int64) -> None:
        entries = to_device(users, logits.device)
        stop_ids = self._stop_ids[samples.device_rows[entries]]
        logits.index_put_((entries[:, None], stop_ids), logits.new_full((), float("-inf")))

    def _widen(self, width: int) -> None:
        missing = width - self._stop_ids.host.shape[1]
        if missing > 0:
            wider = np.pad(self._stop_ids.host, ((0, 0), (0, missing)), mode="edge")
            self._stop_ids = RowValues(wider, self._device)


class Temperature:
    """Above 1 it flattens a row's distribution, below 1 it sharpens it."""

    changes_best = False

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._temperature = RowValues.full(max_num_seqs, 1, np.float32, device)

    def set_row(self, row: int, sampling: RowSampling) -> int:
        self._temperature[row] = sampling.params.temperature
        return 0 if sampling.params.temperature == 1 else ALWAYS

    def apply(self, logits: torch.Tensor, samples: Samples, users: Int64) -> None:
        logits.div_(self._temperature[samples.device_rows])  # all entries: the others' is 1, and selecting would copy


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
