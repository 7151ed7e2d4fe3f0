"""min_tokens: before it has so many, a row cannot choose a token that would end it."""

import numpy as np
import torch

from conveyor_engine.execution.sampling.processor import Int64, Samples
from conveyor_engine.execution.sampling.row_values import RowValues
from conveyor_engine.execution.transfer import to_device
from conveyor_engine.wire.step import RowSampling


class MinTokens:
    """Keeps each row's stop tokens, padded to the same number by repeating the row's last one."""

    changes_best = True

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._device = device
        self._stop_ids = RowValues(np.zeros((max_num_seqs, 1), dtype=np.int64), device)

    def admit(self, row: int, sampling: RowSampling) -> int:
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
