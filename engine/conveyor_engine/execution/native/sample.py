"""Each row's best token, or one drawn from all of them, without a tensor as wide as the vocabulary."""

import torch

from conveyor_engine.execution.native import library


def sample(
    logits: torch.Tensor, draws: torch.Tensor, uniforms: torch.Tensor, greedy_below: float, below_one: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row of logits (rows, vocabulary), float32, and a token of each, int64: (rows,) both.

    The token is the first of the largest. Where the row's temperature is not below `greedy_below`, it is drawn: it is
    where the cumulated weights pass the row's uniform number, times `below_one`, of their sum. A weight counts if its
    logarithm, relative to the largest's, is not below the row's floor. draws, float32 (rows, 2): temperature and floor;
    uniforms, float32 (rows, 1). NaN counts as infinity. A row without a finite largest has any.
    """
    if not library.supports(logits.dtype):
        logits = logits.float()
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    for per_row, count in ((draws, 2), (uniforms, 1)):
        assert per_row.dtype == torch.float32
        assert per_row.numel() == count * rows
        assert per_row.is_contiguous()
    best = torch.empty(rows, dtype=torch.float32)
    tokens = torch.empty(rows, dtype=torch.int64)
    call = library.Sample(
        *(logits.data_ptr(), draws.data_ptr(), uniforms.data_ptr(), best.data_ptr(), tokens.data_ptr()),
        *(rows, vocab_size, logits.stride(0), library.DTYPES[logits.dtype], greedy_below, below_one),
    )
    library.load().cv_run_sample(call)
    return best, tokens
