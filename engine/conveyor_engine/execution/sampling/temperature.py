"""temperature: above 1 it flattens a row's distribution, below 1 it sharpens it."""

import numpy as np
import torch

from conveyor_engine.execution.sampling.processor import ALWAYS, Int64, Samples
from conveyor_engine.execution.sampling.row_values import RowValues
from conveyor_engine.wire.step import RowSampling

GREEDY_BELOW = 1e-5  # vLLM's limit: float32 cannot divide by much less


class Temperature:
    """Keeps each row's temperature."""

    changes_best = False

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._temperature = RowValues.full(max_num_seqs, 1, np.float32, device)

    def admit(self, row: int, sampling: RowSampling) -> int:
        self._temperature[row] = sampling.params.temperature
        return 0 if sampling.params.temperature == 1 else ALWAYS

    def apply(self, logits: torch.Tensor, samples: Samples, users: Int64) -> None:
        logits.div_(self._temperature[samples.device_rows])  # all entries: the others' is 1, and selecting would copy
