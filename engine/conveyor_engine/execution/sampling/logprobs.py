"""Computes log probabilities of chosen tokens and of the best tokens. Used by `sampler` and `tasks.generate`.

They are computed on the device together with the sample. The host converts them to the form of the response when it
reads the step's result.
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

    columns: dict[int, slice]  # for each of these n rows: the columns of `top` that it requested
    chosen: torch.Tensor  # int64 (n,)
    chosen_values: torch.Tensor  # float32 (n,)
    top: torch.Tensor  # int64 (n, m): the best tokens, up to the largest `num_top`, then tokens that rows named
    top_values: torch.Tensor  # float32 (n, m)
    ranks: torch.Tensor | None = None  # of the chosen tokens, int64 (n,); None: not computed

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors, in the constructor's order."""
        ranks = () if self.ranks is None else (self.ranks,)
        return self.chosen, self.chosen_values, self.top, self.top_values, *ranks

    def by_row(self, num_rows: int) -> list[list[TokenLogprobs] | None]:
        """Return one entry for each row of logits; None for rows that did not request log probabilities."""
        rows: list[list[TokenLogprobs] | None] = [None] * num_rows
        for (row, columns), token_id, value, ids, values, *rank in zip(
            self.columns.items(), *(column.tolist() for column in self.tensors()), strict=True
        ):
            rows[row] = [TokenLogprobs.of(token_id, value, ids[columns], values[columns], *rank)]
        return rows


@dataclass(frozen=True, slots=True)
class RequestedLogprobs:
    """What one row requests: log probabilities of the `num_top` best tokens, or of the tokens in `token_ids`."""

    num_top: int
    token_ids: tuple[int, ...] = ()


def compute_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, requested: dict[int, RequestedLogprobs], *, with_ranks: bool = False
) -> Logprobs:
    """Compute log probabilities for the rows that are keys of `requested`.

    logits: (rows, vocabulary). tokens: the chosen tokens, int64 (rows,). with_ranks: also compute their ranks.
    """
    rows = to_device(np.array(list(requested), dtype=np.int64), logits.device)
    chosen = tokens[rows].clamp_min(0)
    values = logits[rows].float().log_softmax(-1)
    num_top = min(logits.shape[1], max(one.num_top for one in requested.values()))
    top, top_values = _join_named(values, *values.topk(num_top, dim=-1), list(requested.values()))
    columns = {
        row: slice(num_top, num_top + len(one.token_ids)) if one.token_ids else slice(one.num_top)
        for row, one in requested.items()
    }
    chosen_values = values.gather(1, chosen[:, None])
    ranks = (values >= chosen_values).sum(-1) if with_ranks else None  # as vLLM counts
    return Logprobs(columns, chosen, chosen_values.squeeze(1), top, top_values, ranks)


def _join_named(
    values: torch.Tensor, top_values: torch.Tensor, top: torch.Tensor, requested: Sequence[RequestedLogprobs]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and values: first the best tokens, then the tokens that rows named."""
    most = max(len(one.token_ids) for one in requested)
    if not most:
        return top, top_values
    padded = np.array([(*one.token_ids, *(0,) * (most - len(one.token_ids))) for one in requested], dtype=np.int64)
    named = to_device(padded, values.device)
    return torch.cat([top, named], 1), torch.cat([top_values, values.gather(1, named)], 1)
