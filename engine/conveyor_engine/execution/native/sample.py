"""Each row's best token, or one drawn from all of them, without a tensor as wide as the vocabulary."""

import torch

from conveyor_engine.execution.native import library


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor, greedy_below: float, below_one: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row of logits (rows, vocabulary), float32, and a token of each, int64: (rows,) both.

    The token is the first of the largest. Where the row's temperature is not below `greedy_below`, it is drawn: it is
    where the cumulated weights pass the row's uniform number, times `below_one`, of their sum. Both: float32 (rows, 1).
    NaN counts as infinity. A row without a finite largest has any.
    """
    if not library.supports(logits.dtype):
        logits = logits.float()
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    for per_row in (temperatures, uniforms):
        assert per_row.dtype == torch.float32
        assert per_row.numel() == rows
        assert per_row.is_contiguous()
    best = torch.empty(rows, dtype=torch.float32)
    tokens = torch.empty(rows, dtype=torch.int64)
    call = library.Sample(
        *(logits.data_ptr(), temperatures.data_ptr(), uniforms.data_ptr(), best.data_ptr(), tokens.data_ptr()),
        *(rows, vocab_size, logits.stride(0), library.DTYPES[logits.dtype], greedy_below, below_one),
    )
    library.load().cv_run_sample(call)
    return best, tokens
