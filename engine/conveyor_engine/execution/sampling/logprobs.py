"""Log probabilities of chosen tokens and of the best ones beside them. Used by `sampler` and `runners.generate`.

Computed on the device with the sample; the host makes the answer's form of them when it reads the step's result.
"""

from dataclasses import dataclass

import torch

from conveyor_engine.wire.request import TokenLogprobs


@dataclass(slots=True)
class Logprobs:
    """Of the rows that asked for them."""

    num_top: dict[int, int]  # by row: how many of the best tokens it asked for
    chosen: torch.Tensor  # int64 (rows that asked,)
    chosen_values: torch.Tensor  # float32, the same shape
    top: torch.Tensor  # int64 (rows that asked, the most that any asked for)
    top_values: torch.Tensor  # float32, the same shape

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors, in the constructor's order."""
        return self.chosen, self.chosen_values, self.top, self.top_values

    def by_row(self, num_rows: int) -> list[list[TokenLogprobs] | None]:
        """One entry for each row of logits, None for those that did not ask."""
        rows: list[list[TokenLogprobs] | None] = [None] * num_rows
        for (row, count), token_id, value, ids, values in zip(
            self.num_top.items(), *(column.tolist() for column in self.tensors()), strict=True
        ):
            rows[row] = [TokenLogprobs.of(token_id, value, ids[:count], values[:count])]
        return rows


def compute_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, num_top: dict[int, int]
) -> Logprobs:
    """logits (rows, vocabulary), tokens int64 (rows,) -> of `rows`, int64, the keys of `num_top`."""
    chosen = tokens[rows].clamp_min(0)
    values = logits[rows].float().log_softmax(-1)
    top = values.topk(min(logits.shape[1], max(num_top.values())), dim=-1)
    return Logprobs(num_top, chosen, values.gather(1, chosen[:, None]).squeeze(1), top.indices, top.values)
