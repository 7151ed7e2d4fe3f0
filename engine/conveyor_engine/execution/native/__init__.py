"""The CPU kernels of engine/native, called through ctypes with torch tensors in and out.

Used by `attention.cpu_native` and `models.fuse`. `why_missing()` says whether they can be used; every other function
here needs them. All work on float32 and bfloat16, compute in float32, and run on torch's own threads. Shapes are
asserted, not checked: a wrong one is a bug of the caller.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

_LIBRARY = Path(__file__).with_name("libconveyor.so")
_ABI_VERSION = 1
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}

BLOCK_SIZE = 16  # tokens of one KV block; the layout is built around it
PANEL = 32  # columns of one panel of packed weights
_VALUE_ALIGNMENT = 16

_P, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("q", "out", "k_cache", "v_cache", "query_start", "seq_lens", "block_tables")),
        *((name, _I64) for name in ("q_head_stride", "q_token_stride", "table_stride")),
        *((name, _I64) for name in ("num_seqs", "num_heads", "num_kv_heads", "head_dim", "value_dim")),
        *(("dtype", _I32), ("window", _I32), ("scale", _F32), ("softcap", _F32)),
    )


class _KvWrite(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("k", "v", "k_cache", "v_cache", "slots")),
        *((name, _I64) for name in ("k_head_stride", "k_token_stride", "v_head_stride", "v_token_stride")),
        *((name, _I64) for name in ("tokens", "num_kv_heads", "head_dim", "value_dim")),
        ("dtype", _I32),
    )


class _Linear(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("x", "weight", "bias", "y")),
        *((name, _I64) for name in ("rows", "n", "k", "x_stride", "y_stride")),
        ("dtype", _I32),
    )


class _RmsNorm(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("x", "weight", "y")),
        *((name, _I64) for name in ("outer", "inner", "size", "outer_stride", "inner_stride")),
        *(("dtype", _I32), ("eps", _F32), ("offset", _F32)),
    )


class _Rope(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("x", "cos", "sin", "y")),
        *((name, _I64) for name in ("tokens", "heads", "head_dim", "rotary", "token_stride", "head_stride")),
        ("dtype", _I32),
    )


class _SiluMul(ctypes.Structure):
    _fields_ = (("x", _P), ("y", _P), ("rows", _I64), ("size", _I64), ("x_stride", _I64), ("dtype", _I32))


class NativeMissingError(RuntimeError):
    """The kernels were not compiled, or not for this version of the package; the message says what to do."""


@cache
def _library() -> ctypes.CDLL:
    # torch is imported above, so OpenMP's symbols resolve to the runtime it has loaded.
    try:
        library = ctypes.CDLL(str(_LIBRARY))
    except OSError as error:
        raise NativeMissingError(
            f"Conveyor's CPU kernels cannot be loaded ({error}); reinstall conveyor where a C compiler is found, "
            "with CONVEYOR_REQUIRE_NATIVE=1 to see why compiling fails"
        ) from error
    version = library.cv_abi_version()
    if version != _ABI_VERSION:
        raise NativeMissingError(
            f"{_LIBRARY} has version {version} of the kernels, this package needs {_ABI_VERSION}; reinstall conveyor"
        )
    library.cv_isa.restype = ctypes.c_char_p
    library.cv_pack_linear.argtypes = (_P, _P, _I64, _I64, _I64, _I32)
    library.cv_use_isa.argtypes = (ctypes.c_char_p,)
    for name, structure in (
        ("attention", _Attention),
        ("kv_write", _KvWrite),
        ("linear", _Linear),
        ("rms_norm", _RmsNorm),
        ("rope", _Rope),
        ("silu_mul", _SiluMul),
    ):
        function = getattr(library, f"cv_run_{name}")
        function.argtypes = (ctypes.POINTER(structure),)
        function.restype = None
    return library


def why_missing() -> str | None:
    """None if the kernels can be used, else the reason in a sentence."""
    try:
        _library()
    except NativeMissingError as error:
        return str(error)
    return None


def isa() -> str:
    """The instruction set in use: generic, avx2, avx512 or avx512bf16."""
    name: bytes = _library().cv_isa()
    return name.decode()


def use_isa(name: str) -> bool:
    """Switches to another instruction set; False if this CPU or this build lacks it. For tests and measurements."""
    return bool(_library().cv_use_isa(name.encode()) == 0)


def has_amx_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 tiles (AMX), which oneDNN uses and these kernels do not."""
    return bool(_library().cv_has_amx_bf16())


def supports(dtype: torch.dtype) -> bool:
    """Whether tensors of this type can be given to the kernels."""
    return dtype in _DTYPES


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Weights of one linear layer in the kernels' own layout: panels of 32 outputs, zero padded."""

    data: torch.Tensor
    out_features: int
    in_features: int


def pack_linear(weight: torch.Tensor) -> PackedWeight:
    """Packs weight (out, in), rows contiguous; the plain tensor is not kept."""
    out_features, in_features = weight.shape
    assert weight.stride(1) == 1
    columns = in_features if weight.dtype == torch.float32 else in_features + in_features % 2
    data = torch.empty((-(-out_features // PANEL), columns, PANEL), dtype=weight.dtype)
    _library().cv_pack_linear(
        weight.data_ptr(), data.data_ptr(), out_features, in_features, weight.stride(0), _DTYPES[weight.dtype]
    )
    return PackedWeight(data, out_features, in_features)


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., in) -> (..., out), as torch.nn.functional.linear; accumulated in float32."""
    rows = x.reshape(-1, weight.in_features)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    assert x.dtype == weight.data.dtype
    assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    y = x.new_empty((*x.shape[:-1], weight.out_features))
    call = _Linear(
        *(rows.data_ptr(), weight.data.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()),
        *(rows.shape[0], weight.out_features, weight.in_features, rows.stride(0), weight.out_features),
        _DTYPES[x.dtype],
    )
    _library().cv_run_linear(call)
    return y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """x / rms(x) * (offset + weight) over the last dimension of x (..., size); the result is contiguous."""
    size = x.shape[-1]
    assert x.dtype == weight.dtype
    assert weight.shape == (size,)
    assert weight.is_contiguous()
    if x.dim() == 4 and x.stride(3) == 1 and x.shape[0] == 1:  # (1, T, heads, size), perhaps a slice of merged qkv
        outer, inner, strides = x.shape[1], x.shape[2], (x.stride(1), x.stride(2))
    else:
        x = x.contiguous()
        outer, inner, strides = x.numel() // size, 1, (size, 0)
    y = torch.empty(x.shape, dtype=x.dtype)
    call = _RmsNorm(
        *(x.data_ptr(), weight.data_ptr(), y.data_ptr(), outer, inner, size, *strides),
        *(_DTYPES[x.dtype], eps, offset),
    )
    _library().cv_run_rms_norm(call)
    return y


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates x (1, heads, T, D), any strides but the last, by cos, sin (1, T, R), R <= D, halves of R paired.

    -> (1, heads, T, D), laid out token by token. As transformers' apply_rotary_pos_emb (RoFormer, Su et al. 2021,
    in GPT-NeoX's arrangement), rounded once instead of three times.
    """
    _, heads, tokens, head_dim = x.shape
    assert x.shape[0] == 1
    assert x.stride(3) == 1
    assert x.dtype == cos.dtype == sin.dtype
    assert cos.shape == sin.shape == (1, tokens, cos.shape[2])
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    y = torch.empty((1, tokens, heads, head_dim), dtype=x.dtype)
    call = _Rope(
        *(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr()),
        *(tokens, heads, head_dim, cos.shape[2], x.stride(2), x.stride(1), _DTYPES[x.dtype]),
    )
    _library().cv_run_rope(call)
    return y.transpose(1, 2)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x (..., 2 * size), gate first -> (..., size)."""
    size = x.shape[-1] // 2
    assert x.is_contiguous()
    y = x.new_empty((*x.shape[:-1], size))
    call = _SiluMul(x.data_ptr(), y.data_ptr(), x.numel() // (2 * size), size, 2 * size, _DTYPES[x.dtype])
    _library().cv_run_silu_mul(call)
    return y


def kv_values_per_block(num_kv_heads: int, head_dim: int, value_dim: int) -> int:
    """Numbers that one block of one layer's keys and values holds, padding included."""
    return num_kv_heads * BLOCK_SIZE * (head_dim + head_dim % 2 + _padded(value_dim))


def _padded(value_dim: int) -> int:
    return -(-value_dim // _VALUE_ALIGNMENT) * _VALUE_ALIGNMENT


def kv_cache(
    num_blocks: int, num_kv_heads: int, head_dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeroed caches of one layer: K with 16 tokens side by side (bfloat16 in pairs), V in rows."""
    even = head_dim + head_dim % 2
    shape = (even, BLOCK_SIZE) if dtype == torch.float32 else (even // 2, BLOCK_SIZE, 2)
    keys = torch.zeros((num_blocks, num_kv_heads, *shape), dtype=dtype)
    return keys, torch.zeros((num_blocks, num_kv_heads, BLOCK_SIZE, _padded(value_dim)), dtype=dtype)


def kv_write(
    key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Writes key (T, Hkv, D) and value (T, Hkv, Dv) to slots (T,) int64 = block * 16 + offset; negative = skip."""
    tokens, num_kv_heads, head_dim = key.shape
    assert key.stride(2) == 1 == value.stride(2)
    assert key.dtype == value.dtype == caches[0].dtype
    assert slots.dtype == torch.int64
    assert slots.is_contiguous()
    assert slots.shape == (tokens,)
    call = _KvWrite(
        *(key.data_ptr(), value.data_ptr(), caches[0].data_ptr(), caches[1].data_ptr(), slots.data_ptr()),
        *(key.stride(1), key.stride(0), value.stride(1), value.stride(0)),
        *(tokens, num_kv_heads, head_dim, value.shape[2], _DTYPES[key.dtype]),
    )
    _library().cv_run_kv_write(call)


def paged_attention(
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    value_dim: int,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of query (T, H, D) over the caches of `kv_cache` -> (T, H, value_dim).

    query_start (B + 1,), seq_lens (B,), block_tables (B, W) are int32; tokens past query_start[-1] are padding and
    get zeros. Each key and value is read once per KV head and 48 rows of queries.
    """
    tokens, num_heads, head_dim = query.shape
    assert query.stride(2) == 1
    assert query.dtype == caches[0].dtype
    assert query_start.dtype == seq_lens.dtype == block_tables.dtype == torch.int32
    assert query_start.is_contiguous()
    assert seq_lens.is_contiguous()
    assert block_tables.stride(1) == 1
    num_seqs = seq_lens.shape[0]
    out = torch.empty((tokens, num_heads, value_dim), dtype=query.dtype)
    out[int(query_start[num_seqs]) :] = 0
    call = _Attention(
        *(query.data_ptr(), out.data_ptr(), caches[0].data_ptr(), caches[1].data_ptr()),
        *(query_start.data_ptr(), seq_lens.data_ptr(), block_tables.data_ptr()),
        *(query.stride(1), query.stride(0), block_tables.stride(0)),
        *(num_seqs, num_heads, caches[0].shape[1], head_dim, value_dim),
        *(_DTYPES[query.dtype], sliding_window or 0, scaling, softcap or 0.0),
    )
    _library().cv_run_attention(call)
    return out
