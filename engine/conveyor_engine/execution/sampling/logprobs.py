"""Log probabilities of chosen tokens and of the best ones beside them. Used by `sampler` and `runners.generate`.

Computed on the device with the sample; the host makes the answer's form of them when it reads the step's result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from conveyor_engine.execution.transfer import to_device
from conveyor_engine.wire.request import TokenLogprobs


@dataclass(slots=True)
class Logprobs:
    """Log probabilities of the rows that requested them."""

    columns: dict[int, slice]  # by row: which of the tokens in `top` it asked for
    chosen: torch.Tensor  # int64 (rows that asked,)
    chosen_values: torch.Tensor  # float32, the same shape
    top: torch.Tensor  # int64 (rows that asked, the most of the best that any asked for, then named ones)
    top_values: torch.Tensor  # float32, the same shape
    ranks: torch.Tensor | None = None  # of the chosen tokens, int64 (rows that asked,), where they are told

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors, in the constructor's order."""
        ranks = () if self.ranks is None else (self.ranks,)
        return self.chosen, self.chosen_values, self.top, self.top_values, *ranks

    def by_row(self, num_rows: int) -> list[list[TokenLogprobs] | None]:
        """One entry for each row of logits, None for those that did not ask."""
        rows: list[list[TokenLogprobs] | None] = [None] * num_rows
        for (row, columns), token_id, value, ids, values, *rank in zip(
            self.columns.items(), *(column.tolist() for column in self.tensors()), strict=True
        ):
            rows[row] = [TokenLogprobs.of(token_id, value, ids[columns], values[columns], *rank)]
        return rows


@dataclass(frozen=True, slots=True)
class Asked:
    """What one row asks for: so many of the best tokens, or these."""

    num_top: int
    token_ids: tuple[int, ...] = ()


def compute_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, asked: dict[int, Asked], *, with_ranks: bool = False
) -> Logprobs:
    """logits (rows, vocabulary), tokens int64 (rows,) -> of the rows that are the keys of `asked`."""
    rows = to_device(np.array(list(asked), dtype=np.int64), logits.device)
    chosen = tokens[rows].clamp_min(0)
    values = logits[rows].float().log_softmax(-1)
    num_top = min(logits.shape[1], max(one.num_top for one in asked.values()))
    top, top_values = _join_named(values, *values.topk(num_top, dim=-1), list(asked.values()))
    columns = {
        row: slice(num_top, num_top + len(one.token_ids)) if one.token_ids else slice(one.num_top)
        for row, one in asked.items()
    }
    chosen_values = values.gather(1, chosen[:, None])
    ranks = (values >= chosen_values).sum(-1) if with_ranks else None  # as vLLM counts
    return Logprobs(columns, chosen, chosen_values.squeeze(1), top, top_values, ranks)


def _join_named(
    values: torch.Tensor, top_values: torch.Tensor, top: torch.Tensor, asked: Sequence[Asked]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and values of the best, and behind them of those that rows named, if any did."""
    most = max(len(one.token_ids) for one in asked)
    if not most:
        return top, top_values
    padded = np.array([(*one.token_ids, *(0,) * (most - len(one.token_ids))) for one in asked], dtype=np.int64)
    named = to_device(padded, values.device)
    return torch.cat([top, named], 1), torch.cat([top_values, values.gather(1, named)], 1)
