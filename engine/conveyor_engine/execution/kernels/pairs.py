"""Converts pairs of 8-bit numbers that were read as numbers of 16 bits. For attention over a cache of 8 bits."""

# Triton compiles the kernels from their source and interprets annotations differently, so they have none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import triton
import triton.language as tl
from triton import knobs

_INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # the interpreter has no PTX
# Both convert two pairs, so four bytes: $2 has bytes 0 to 3, $0 becomes bytes 0 and 2, $1 becomes bytes 1 and 3.
_FROM_E4M3 = tl.constexpr("""{
    .reg .b32 bytes;
    .reg .b16 even, odd;
    prmt.b32 bytes, $2, 0, 0x3120;
    mov.b32 {even, odd}, bytes;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
# The bytes (u, 0x64) are the float16 number 1024 + u. With u = the number + 128, 1152 has to be subtracted (0x6480).
_FROM_INT8 = tl.constexpr("""{
    .reg .b32 bytes, offset;
    xor.b32 bytes, $2, 0x80808080;
    mov.b32 offset, 0x64806480;
    prmt.b32 $0, bytes, 0x64646464, 0x4240;
    prmt.b32 $1, bytes, 0x64646464, 0x4341;
    sub.f16x2 $0, $0, offset;
    sub.f16x2 $1, $1, offset;
}""")


@triton.jit
def convert_pairs(pairs, IS_INT8: tl.constexpr, TYPE: tl.constexpr):
    """Convert pairs, int16, to two tensors of the same shape and of TYPE: the first number of each pair, which has the
    lower address, and the second one. The numbers are int8 or e4m3."""
    if _INTERPRETED:
        first, second = pairs & 0xFF, pairs >> 8 & 0xFF
        if IS_INT8:
            first, second = first.to(tl.int8), second.to(tl.int8)
        else:
            first = first.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
            second = second.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        first, second = tl.inline_asm_elementwise(
            _FROM_INT8 if IS_INT8 else _FROM_E4M3, "=&r,=&r,r", [pairs],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return first.to(TYPE), second.to(TYPE)
