"""RMSNorm, rotary embedding and silu(gate) * up, each in one pass over the input."""

import torch

from conveyor_engine.execution.native import library


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """Return x / rms(x) * (offset + weight) over the last dimension of x (..., size). The result is contiguous."""
    size = x.shape[-1]
    assert x.dtype == weight.dtype
    assert weight.shape == (size,)
    assert weight.is_contiguous()
    if x.dim() == 3 and x.stride(2) == 1:  # (T, heads, size), perhaps a slice of merged qkv
        outer, inner, strides = x.shape[0], x.shape[1], (x.stride(0), x.stride(1))
    else:
        x = x.contiguous()
        outer, inner, strides = x.numel() // size, 1, (size, 0)
    y = torch.empty(x.shape, dtype=x.dtype)
    call = library.RmsNorm(
        *(x.data_ptr(), weight.data_ptr(), y.data_ptr(), outer, inner, size, *strides),
        *(library.DTYPES[x.dtype], eps, offset),
    )
    library.load().cv_run_rms_norm(call)
    return y


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x (T, heads, D) by cos, sin (1, T, R), R <= D; the two halves of R are paired. The result is contiguous.

    x may have any strides, except that the last dimension must be contiguous. Computes the same as transformers'
    apply_rotary_pos_emb (RoFormer, Su et al. 2021, in GPT-NeoX's arrangement), but rounds once instead of three times.
    """
    tokens, heads, head_dim = x.shape
    assert x.stride(2) == 1
    assert x.dtype == cos.dtype == sin.dtype
    assert cos.shape == sin.shape == (1, tokens, cos.shape[2])
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    y = torch.empty(x.shape, dtype=x.dtype)
    call = library.Rope(
        *(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr()),
        *(tokens, heads, head_dim, cos.shape[2], x.stride(0), x.stride(1), library.DTYPES[x.dtype]),
    )
    library.load().cv_run_rope(call)
    return y


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, (..., size), for x (..., 2 * size) whose first half is the gate."""
    size = x.shape[-1] // 2
    assert x.is_contiguous()
    y = x.new_empty((*x.shape[:-1], size))
    call = library.SiluMul(x.data_ptr(), y.data_ptr(), x.numel() // (2 * size), size, 2 * size, library.DTYPES[x.dtype])
    library.load().cv_run_silu_mul(call)
    return y
