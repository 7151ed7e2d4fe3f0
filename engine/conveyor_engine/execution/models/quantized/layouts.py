"""The layouts in which quantized checkpoints store a weight: one row for each, and a function that restores the weight.

A layout takes several stored tensors whose names begin alike. `reading` finds them. Each function gets the tensors by
the end of their names and returns the weight, (rows, columns) or (experts, rows, columns), in float32. It raises
ValueError if the tensors do not fit each other. Scales of activations are not read: activations are not quantized.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from conveyor_engine.execution.models.quantized.numbers import (
    read_exponents,
    read_fp4,
    repeat_up_to,
    spread,
    unpack_nibbles,
    unpack_words,
)
from conveyor_engine.quantization import Declared

Parts = Mapping[str, Tensor]
Setting = TypeVar("Setting")
_FP8: Final = frozenset({"F8_E4M3", "F8_E5M2"})
AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # where AWQ's word has number i
_AWQ_BITS: Final = 4
_WORD_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to store a weight.

    numbers: the end of the name of the tensor with the numbers, which is replaced by `plain` in the weight's own name.
    kinds: the number types of that tensor in safetensors. needed, optional: the ends of the names of the other tensors.
    is_turned: whether transformers' class has rows and columns the other way round.
    """

    restore: Callable[[Parts, Declared], Tensor]
    numbers: str
    kinds: frozenset[str]
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    plain: str = ""
    is_turned: bool = False


def restore_scaled(parts: Parts, declared: Declared) -> Tensor:
    """FP8 or INT8, with a scale for the tensor, for each row, group or block. Symmetric, or with zero points."""
    numbers, scales = parts[""].to(torch.float32), read_scales(parts)
    if (zeros := parts.get("_zero_point")) is not None:
        numbers -= spread(zeros.to(torch.float32), numbers.shape, declared.blocks)
    return numbers.mul_(spread(scales, numbers.shape, declared.blocks))


def read_scales(parts: Parts) -> Tensor:
    """Return the scales of `restore_scaled`, float32."""
    scales = parts["_scale_inv"] if "_scale_inv" in parts else parts["_scale"]
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scales = read_exponents(scales)
    scales = scales.to(torch.float32)
    return scales[:, 0, :, 0] if scales.dim() == 4 else scales  # ModelOpt's blocks: (rows, 1, columns, 1)


def restore_packed(parts: Parts, declared: Declared) -> Tensor:
    """compressed-tensors' `pack-quantized`: whole numbers of 1 to 8 bits, with scales by group of columns."""
    shape = [int(size) for size in parts["_shape"]]
    if list(parts["_packed"].shape[:-1]) != shape[:-1]:
        raise ValueError(f"words of {tuple(parts['_packed'].shape)} do not fit weights of {tuple(shape)}")
    scales = parts["_scale"].to(torch.float32)
    bits = find_bits(parts["_packed"].shape[-1], shape[-1])
    middle = 1 << (bits - 1)  # stored numbers are unsigned
    numbers = unpack_words(parts["_packed"], bits, shape[-1]).to(torch.float32) - middle
    groups = parts.get("_g_idx")
    if groups is not None:
        is_in_order = groups.shape == (shape[-1],) and bool((groups == -1).all())
        groups = None if is_in_order else _check_groups(groups, shape[-1])
    zeros = parts.get("_zero_point")
    if zeros is not None:
        unpacked = unpack_words(zeros.transpose(-2, -1), bits, shape[-2]).transpose(-2, -1)
        numbers -= _by_column(unpacked.to(torch.float32) - middle, shape, groups, declared)
    return numbers.mul_(_by_column(scales, shape, groups, declared))


def _by_column(scales: Tensor, shape: list[int], groups: Tensor | None, declared: Declared) -> Tensor:
    return spread(scales, shape, declared.blocks) if groups is None else scales[..., groups]


def _check_groups(groups: Tensor, columns: int) -> Tensor:
    """Return the group of each column. Raises ValueError."""
    if groups.shape != (columns,):
        raise ValueError(f"groups of {tuple(groups.shape)} do not fit {columns} columns")
    if (least := int(groups.min())) < 0:
        raise ValueError(f"a column's group is {least}")
    return groups.to(torch.int64)


def restore_awq(parts: Parts, declared: Declared) -> Tensor:
    """AWQ's `gemm`: 4 bits, (columns, rows / 8), in an order of its own within a word."""
    scales = parts["scales"].to(torch.float32)
    numbers, zeros = (unpack_awq(parts[name], scales.shape[-1]) for name in ("qweight", "qzeros"))
    numbers -= spread(zeros, numbers.shape)
    return numbers.mul_(spread(scales, numbers.shape)).t()


def unpack_awq(words: Tensor, rows: int) -> Tensor:
    """Return the numbers of AWQ's words (n, rows / 8), in order, as float32 (n, rows)."""
    numbers = unpack_words(words, _AWQ_BITS, rows).view(len(words), -1, len(AWQ_ORDER))
    return numbers[..., list(AWQ_ORDER)].flatten(-2).to(torch.float32)


def restore_gptq(parts: Parts, declared: Declared) -> Tensor:
    """GPTQ: 2, 3, 4 or 8 bits, packed along the columns; version 1 stores zero points less 1."""
    scales, words = parts["scales"].to(torch.float32), parts["qweight"]
    bits = find_gptq_bits(parts)
    columns = words.shape[0] * _WORD_BITS // bits
    numbers = unpack_words(words.t(), bits, columns).to(torch.float32)
    zeros = unpack_words(parts["qzeros"], bits, scales.shape[-1]).to(torch.float32) + declared.zero_offset
    groups = parts.get("g_idx")
    if groups is None:
        if columns % len(scales):
            raise ValueError(f"{len(scales)} groups do not fit {columns} columns")
        groups = torch.arange(columns) // (columns // len(scales))
    groups = _check_groups(groups, columns)
    return numbers.sub_(zeros[groups].t()).mul_(scales[groups].t())


def find_gptq_bits(parts: Mapping[str, Any]) -> int:
    """Return the bits of GPTQ's numbers: those of its zero points, one for each scale. Raises ValueError."""
    return find_bits(parts["qzeros"].shape[-1], parts["scales"].shape[-1])


def restore_nvfp4(parts: Parts, declared: Declared) -> Tensor:
    """NVFP4: a scale in FP8 for 16 columns, and one for the tensor, which compressed-tensors stores inverted."""
    numbers = read_fp4(parts["_packed"] if "_packed" in parts else parts[""])
    scales = parts["_scale"].to(torch.float32) * spread(read_whole_scale(parts), parts["_scale"].shape)
    return numbers.mul_(spread(scales, numbers.shape))


def read_whole_scale(parts: Parts) -> Tensor:
    """Return the scale that `restore_nvfp4` has for a tensor, float32."""
    if "_scale_2" in parts:
        return parts["_scale_2"].to(torch.float32)
    return 1 / parts["_global_scale"].to(torch.float32)


def restore_mxfp4(parts: Parts, declared: Declared) -> Tensor:
    """MXFP4 of compressed-tensors and Quark: a power of two for 32 columns."""
    numbers = read_fp4(parts["_packed"] if "_packed" in parts else parts[""])
    return numbers.mul_(spread(read_exponents(parts["_scale"]), numbers.shape))


def restore_mxfp4_experts(parts: Parts, declared: Declared) -> Tensor:
    """gpt-oss: blocks (experts, outputs, groups, 16)."""
    numbers = read_fp4(parts["_blocks"])
    return numbers.mul_(read_exponents(parts["_scales"])[..., None]).flatten(-2)


def restore_table(parts: Parts, declared: Declared) -> Tensor:
    """bitsandbytes' NF4 and FP4: a table of 16 numbers, and a scale for each block of the flattened weight."""
    settings = _read_settings(parts)
    scales = parts[".absmax"]
    if (nested := parts.get(".nested_absmax")) is not None:
        table = parts[".nested_quant_map"].to(torch.float32)[scales.to(torch.int64)]
        scales = table * repeat_up_to(nested, _read_setting(settings, "nested_blocksize", int), len(table))
        scales += _read_setting(settings, "nested_offset", float)
    packed = parts[""].flatten().view(torch.uint8)  # `bnb_4bit_quant_storage` names the type in which bytes are stored
    numbers = parts[".quant_map"].to(torch.float32)[unpack_nibbles(packed, high_first=True)]
    shape = torch.Size(_read_setting(settings, "shape", list))
    if not 0 <= len(numbers) - shape.numel() <= 1:  # half a byte may be left
        raise ValueError(f"{len(numbers)} numbers do not fit weights of {tuple(shape)}")
    scales = repeat_up_to(scales.to(torch.float32), _read_setting(settings, "blocksize", int), shape.numel())
    return numbers[: shape.numel()].mul_(scales).reshape(shape)


def find_table_shape(parts: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of a weight of `restore_table`. Raises ValueError."""
    return tuple(map(int, _read_setting(_read_settings(parts), "shape", list)))


def _read_settings(parts: Mapping[str, Any]) -> Any:
    return json.loads(bytes(next(parts[name] for name in parts if ".quant_state." in name)[...].tolist()))


def _read_setting(settings: Any, name: str, kind: type[Setting]) -> Setting:
    """Return an entry of a table's state. Raises ValueError."""
    value = settings.get(name) if isinstance(settings, dict) else None
    if type(value) is not kind:
        raise ValueError(f"the state of the table has no {name} of type {kind.__name__}")
    return value


def restore_int8_rows(parts: Parts, declared: Declared) -> Tensor:
    """bitsandbytes' LLM.int8: the largest number of each row, which 127 stands for."""
    return parts["weight"].to(torch.float32).mul_(parts["SCB"].to(torch.float32)[:, None] / 127)


def find_bits(words: int, columns: int) -> int:
    """Return how many bits a number has. Raises ValueError."""
    for bits in (4, 8, 2, 3, 5, 6, 7, 1):
        if -(-columns * bits // _WORD_BITS) == words:
            return bits
    raise ValueError(f"{words} words do not fit {columns} columns")


_BYTES: Final = frozenset({"U8"})
_STORAGE: Final = _BYTES | {"I8", "BF16", "F16", "F32"}  # of bitsandbytes' bytes
_WORDS: Final = frozenset({"I32"})
_SCALED: Final = Layout(restore_scaled, "", _FP8 | {"I8"}, ("_scale",), ("_zero_point",))
_INVERSE: Final = Layout(restore_scaled, "", _FP8, ("_scale_inv",))
_PACKED: Final = Layout(restore_packed, "_packed", _WORDS, ("_scale", "_shape"), ("_zero_point", "_g_idx"))
_NVFP4: Final = Layout(restore_nvfp4, "", _BYTES, ("_scale", "_scale_2"))
_NVFP4_PACKED: Final = Layout(restore_nvfp4, "_packed", _BYTES, ("_scale", "_global_scale"))
_MXFP4_PACKED: Final = Layout(restore_mxfp4, "_packed", _BYTES, ("_scale",))
_MXFP4: Final = Layout(restore_mxfp4, "", _BYTES, ("_scale",))
_MXFP4_EXPERTS: Final = Layout(restore_mxfp4_experts, "_blocks", _BYTES, ("_scales",), is_turned=True)
_AWQ: Final = Layout(restore_awq, "qweight", _WORDS, ("qzeros", "scales"), plain="weight")
_GPTQ: Final = Layout(restore_gptq, "qweight", _WORDS, ("qzeros", "scales"), ("g_idx",), plain="weight")
_INT8_ROWS: Final = Layout(restore_int8_rows, "weight", frozenset({"I8"}), ("SCB",), ("weight_format",), "weight")
_TABLES: Final = tuple(
    Layout(
        restore_table,
        "",
        _STORAGE,
        (".absmax", ".quant_map", f".quant_state.bitsandbytes__{kind}"),
        (".nested_absmax", ".nested_quant_map"),
    )
    for kind in ("nf4", "fp4")
)

# By the method's name in transformers. Of a method's layouts, the first whose tensors are all there is used.
LAYOUTS: Final[Mapping[str, tuple[Layout, ...]]] = {
    "fp8": (_INVERSE, _SCALED),
    "fbgemm_fp8": (_SCALED,),
    "modelopt": (_NVFP4, _INVERSE, _SCALED),
    "compressed-tensors": (_PACKED, _NVFP4_PACKED, _MXFP4_PACKED, _INVERSE, _SCALED),
    "quark": (_NVFP4, _MXFP4, _SCALED),
    "awq": (_AWQ, _INVERSE, _SCALED),  # AutoRound has layers in FP8 beside those in 4 bits
    "gptq": (_GPTQ, _INVERSE, _SCALED),
    "mxfp4": (_MXFP4_EXPERTS,),
    "bitsandbytes": (*_TABLES, _INT8_ROWS),
}
