"""Token mixers that keep a state for each row: convolution, gated delta rule, Mamba-2 and their norm.

Each call computes all sequences of a step, and changes the states where they are. Used by `models.state_mixers`.
"""

import torch

from conveyor_engine.execution.native import library
from conveyor_engine.execution.state_rows import StateRows


def conv(
    rows: StateRows,
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    silu: bool,
    gates: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the causal convolution of x (T, C), perhaps in wider rows, over its sequences: (T, C).

    state: (rows, K, C), the last inputs. weight: float32 (K, C). bias: float32 (C,). gates: laid out like x; the first
    multiplies the input, and the second the result.
    """
    tokens, channels = x.shape
    assert x.dtype == state.dtype
    assert state.is_contiguous()
    assert weight.shape == state.shape[1:]
    y = torch.zeros((tokens, channels), dtype=x.dtype)
    before, after = gates or (None, None)
    call = library.Conv(
        _describe(rows),
        *(x.data_ptr(), _pointer(before), _pointer(after), weight.data_ptr(), _pointer(bias)),
        *(state.data_ptr(), y.data_ptr(), channels, len(weight), x.stride(0), library.DTYPES[x.dtype], silu),
    )
    library.load().cv_run_conv(call)
    return y


def delta_rule(
    rows: StateRows,
    qkv: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor],
    state: torch.Tensor,
    decay: torch.Tensor,
    dt_bias: torch.Tensor,
    num_key_heads: int,
    beta_scale: float,
) -> torch.Tensor:
    """Return the gated delta rule (T, Hv, Dv) of qkv (T, 2 * Hk * Dk + Hv * Dv).

    gates: a and b, both (T, Hv). state: float32 (rows, Hv, Dk, Dv). decay, dt_bias: float32 (Hv,).
    """
    _, heads, key_dim, value_dim = state.shape
    assert qkv.shape[1] == 2 * num_key_heads * key_dim + heads * value_dim
    assert state.is_contiguous()
    a, b = gates
    y = torch.zeros((len(qkv), heads, value_dim), dtype=qkv.dtype)
    call = library.Delta(
        _describe(rows),
        *(qkv.data_ptr(), a.data_ptr(), b.data_ptr(), decay.data_ptr(), dt_bias.data_ptr()),
        *(state.data_ptr(), y.data_ptr(), qkv.stride(0), a.stride(0), b.stride(0)),
        *(num_key_heads, heads, key_dim, value_dim, library.DTYPES[qkv.dtype], beta_scale),
    )
    library.load().cv_run_delta(call)
    return y


def mamba2(
    rows: StateRows,
    xbc: torch.Tensor,
    dt: torch.Tensor,
    state: torch.Tensor,
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    num_groups: int,
    limits: tuple[float, float],
) -> torch.Tensor:
    """Return Mamba-2's (T, H, D) for xbc (T, H * D + 2 * groups * N) and dt (T, H).

    state: float32 (rows, H, D, N). heads: decay, direct and dt_bias of each head, float32 (H,). limits: of time steps.
    """
    _, num_heads, head_dim, size = state.shape
    assert xbc.shape[1] == num_heads * head_dim + 2 * num_groups * size
    assert state.is_contiguous()
    y = torch.zeros((len(xbc), num_heads, head_dim), dtype=xbc.dtype)
    call = library.Ssd(
        _describe(rows),
        *(xbc.data_ptr(), dt.data_ptr(), *(each.data_ptr() for each in heads), state.data_ptr(), y.data_ptr()),
        *(xbc.stride(0), dt.stride(0), num_heads, head_dim, num_groups, size, library.DTYPES[xbc.dtype], *limits),
    )
    library.load().cv_run_ssd(call)
    return y


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, norm_first: bool
) -> torch.Tensor:
    """Return the RMS norm of each group of x (T, groups, size), times silu(gate), like x.

    gate: (T, groups * size). weight: float32 (size,) for all groups, or (groups, size). norm_first: whether the gate
    multiplies the result of the norm, not its input.
    """
    tokens, groups, size = x.shape
    assert x.is_contiguous()
    y = torch.empty_like(x)
    call = library.GatedNorm(
        *(x.data_ptr(), gate.data_ptr(), weight.data_ptr(), y.data_ptr(), tokens, groups, size, gate.stride(0)),
        *(0 if weight.dim() == 1 else size, library.DTYPES[x.dtype], norm_first, eps),
    )
    library.load().cv_run_gated_norm(call)
    return y


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _describe(rows: StateRows) -> library.StateRows:
    tensors = (rows.query_start, rows.rows, rows.is_new)
    assert tuple(each.dtype for each in tensors) == (torch.int32, torch.int64, torch.bool)
    assert all(each.is_contiguous() for each in tensors)
    return library.StateRows(*(each.data_ptr() for each in tensors), len(rows.rows))
