"""Loads the compiled library, declares its functions to ctypes, and allocates memory. Used by the package's modules.

`why_missing()` returns why the library cannot be used. Without the library, every function that runs a kernel raises
NativeMissingError.
"""

import ctypes
import math
import mmap
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

_LIBRARY = Path(__file__).with_name("libconveyor.so")
_ABI_VERSION = 19
_HUGE_PAGE = 2 * 2**20
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
SCALE_DTYPES = DTYPES | {torch.float16: 2, torch.int8: 3}

_P, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Attention(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("q", "out", "k_cache", "v_cache", "query_start", "seq_lens", "block_tables")),
        *(("sinks", _P), ("ends", _P)),
        *((name, _I64) for name in ("q_head_stride", "q_token_stride", "table_stride")),
        *((name, _I64) for name in ("num_seqs", "num_heads", "num_kv_heads", "head_dim", "value_dim")),
        *(("dtype", _I32), ("causal", _I32), ("window", _I32), ("scale", _F32), ("softcap", _F32)),
    )


class Heads(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("qkv", "q_weight", "k_weight", "cos", "sin")),
        *((name, _I64) for name in ("tokens", "heads", "kv_heads", "head_dim", "rotary")),
        *(("dtype", _I32), ("eps", _F32), ("offset", _F32)),
    )


class KvWrite(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("k", "v", "k_cache", "v_cache", "slots")),
        *((name, _I64) for name in ("k_head_stride", "k_token_stride", "v_head_stride", "v_token_stride")),
        *((name, _I64) for name in ("tokens", "num_kv_heads", "head_dim", "value_dim")),
        ("dtype", _I32),
    )


class Linear(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("x", "weight", "bias", "residual", "y")),
        *((name, _I64) for name in ("rows", "n", "k", "packed_k", "x_stride", "y_stride", "group")),
        *((name, _I32) for name in ("dtype", "bits", "scale_dtype", "has_zeros", "has_minima")),
        ("added", _P),
    )


class Linears(ctypes.Structure):
    _fields_ = (("first", Linear), *((name, _I64) for name in ("count", "x_step", "weight_step", "y_step")))


class Adapters(ctypes.Structure):
    _fields_ = (("down", Linear), ("ups", ctypes.POINTER(Linear)), ("outputs", _P), ("slices", _I64))


class Columns(ctypes.Structure):
    _fields_ = (("own", _P), ("shares", _P), ("num_shares", _I64), ("panels", _I64))


class Adapt(ctypes.Structure):
    _fields_ = (
        *(("product", ctypes.POINTER(Linear)), ("adapters", ctypes.POINTER(Adapters))),
        ("columns", ctypes.POINTER(Columns)),
    )


class RmsNorm(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("x", "weight", "y")),
        *((name, _I64) for name in ("outer", "inner", "size", "outer_stride", "inner_stride")),
        *(("dtype", _I32), ("eps", _F32), ("offset", _F32)),
    )


class Rope(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("x", "cos", "sin", "y")),
        *((name, _I64) for name in ("tokens", "heads", "head_dim", "rotary", "token_stride", "head_stride")),
        ("dtype", _I32),
    )


class Sample(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("logits", "draws", "uniforms", "best", "tokens")),
        *((name, _I64) for name in ("rows", "vocab_size", "row_stride")),
        *(("dtype", _I32), ("greedy_below", _F32), ("below_one", _F32)),
    )


class SiluMul(ctypes.Structure):
    _fields_ = (("x", _P), ("y", _P), ("rows", _I64), ("size", _I64), ("x_stride", _I64), ("dtype", _I32))


class Experts(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("x", "chosen", "shares", "y")),
        *((name, _I64) for name in ("tokens", "experts", "per_token", "gate_up_bytes", "down_bytes")),
        *(("gate_up", Linear), ("down", Linear)),
    )


class StateRows(ctypes.Structure):
    _fields_ = (*((name, _P) for name in ("query_start", "rows", "fresh")), ("num_seqs", _I64))


class Conv(ctypes.Structure):
    _fields_ = (
        ("rows", StateRows),
        *((name, _P) for name in ("x", "before", "after", "weight", "bias", "state", "y")),
        *((name, _I64) for name in ("channels", "taps", "x_stride")),
        *(("dtype", _I32), ("silu", _I32)),
    )


class Delta(ctypes.Structure):
    _fields_ = (
        ("rows", StateRows),
        *((name, _P) for name in ("qkv", "a", "b", "decay", "dt_bias", "state", "y")),
        *((name, _I64) for name in ("qkv_stride", "a_stride", "b_stride")),
        *((name, _I64) for name in ("key_heads", "value_heads", "key_dim", "value_dim")),
        *(("dtype", _I32), ("beta_scale", _F32)),
    )


class Ssd(ctypes.Structure):
    _fields_ = (
        ("rows", StateRows),
        *((name, _P) for name in ("xbc", "dt", "decay", "direct", "dt_bias", "state", "y")),
        *((name, _I64) for name in ("xbc_stride", "dt_stride", "heads", "head_dim", "groups", "size")),
        *(("dtype", _I32), ("step_min", _F32), ("step_max", _F32)),
    )


class GatedNorm(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("x", "gate", "weight", "y")),
        *((name, _I64) for name in ("tokens", "groups", "size", "gate_stride", "weight_stride")),
        *(("dtype", _I32), ("norm_first", _I32), ("eps", _F32)),
    )


class BeforeAttention(ctypes.Structure):
    _fields_ = (
        *(("norm", RmsNorm), ("qkv", Linear), ("heads", Heads)),
        *(("qkv_adapters", ctypes.POINTER(Adapters)), ("columns", ctypes.POINTER(Columns))),
    )


class AfterAttention(ctypes.Structure):
    _fields_ = (
        *(("out", Linear), ("norm", RmsNorm), ("gate_up", Linear), ("activation", SiluMul), ("down", Linear)),
        *((f"{name}_adapters", ctypes.POINTER(Adapters)) for name in ("out", "gate_up", "down")),
        ("columns", ctypes.POINTER(Columns)),
    )


class Step(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("slots", "query_start", "seq_lens", "block_tables")),
        *((name, _I64) for name in ("tokens", "num_seqs", "table_stride")),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        *(("before", BeforeAttention), ("write", KvWrite), ("attention", Attention), ("after", AfterAttention)),
        *(("step", ctypes.POINTER(Step)), ("table", _I64), ("x", _P), ("y", _P)),
    )


class Layers(ctypes.Structure):
    _fields_ = (
        *(("layers", ctypes.POINTER(ctypes.POINTER(Layer))), ("steps", ctypes.POINTER(Step))),
        ("columns", ctypes.POINTER(Columns)),
        *((name, _P) for name in ("x", "cos", "sin", "y")),
        *((name, _I64) for name in ("count", "rotary")),
    )


class NativeMissingError(RuntimeError):
    """The kernels were not compiled, or were compiled for another version. The message says what to do."""


@cache
def load() -> ctypes.CDLL:
    # OpenMP's symbols must resolve to the runtime that torch has loaded. torch's builds for arm64 do not export them.
    for runtime in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
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
        ("attention", Attention),
        ("kv_write", KvWrite),
        ("linear", Linear),
        ("linears", Linears),
        ("adapt", Adapt),
        ("rms_norm", RmsNorm),
        ("rope", Rope),
        ("sample", Sample),
        ("silu_mul", SiluMul),
        ("experts", Experts),
        ("conv", Conv),
        ("delta", Delta),
        ("ssd", Ssd),
        ("gated_norm", GatedNorm),
        ("before_attention", BeforeAttention),
        ("after_attention", AfterAttention),
        ("layers", Layers),
    ):
        function = getattr(library, f"cv_run_{name}")
        function.argtypes = (ctypes.POINTER(structure),)
        function.restype = None
    return library


def why_missing() -> str | None:
    """Return why the kernels cannot be used, as a sentence, or None if they can."""
    try:
        load()
    except NativeMissingError as error:
        return str(error)
    return None


def isa() -> str:
    """Return the instruction set in use: generic, avx2, avxvnni, avx512, avx512vnni, avx512bf16 or amx."""
    name: bytes = load().cv_isa()
    return name.decode()


def use_isa(name: str) -> bool:
    """Switch to another instruction set. Return False if this CPU or build lacks it. For tests and measurements."""
    return bool(load().cv_use_isa(name.encode()) == 0)


def supports(dtype: torch.dtype) -> bool:
    """Return whether the kernels support tensors of this type."""
    return dtype in DTYPES


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros for weights or KV caches, in huge pages if it fills one and the system grants them.

    Huge pages need fewer page look-ups, and processors prefetch only within a page. The memory is newly mapped, because
    memory that torch has used before would stay in small pages.
    """
    count = math.prod(shape)
    if count * dtype.itemsize < _HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(*shape).zero_()  # maps pages before the first step
