"""Finds each row's best token, or draws one from all tokens, without a temporary tensor as wide as the vocabulary."""

import torch

from conveyor_engine.execution.native import library


def sample(
    logits: torch.Tensor, draws: torch.Tensor, uniforms: torch.Tensor, greedy_below: float, below_one: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's largest logit, float32 (rows,), and the sampled token, int64 (rows,).

    logits: (rows, vocabulary). draws: float32 (rows, 2), each row's temperature and floor. uniforms: float32 (rows, 1).

    If a row's temperature is below `greedy_below`, its token is the first with the largest logit. Otherwise the token
    is drawn: it is the first at which the cumulated weights exceed uniform * below_one * (sum of the weights). A weight
    counts only if its logarithm, relative to the largest weight's, is not below the row's floor. NaN counts as
    infinity. A row whose largest logit is not finite gets any token.
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
