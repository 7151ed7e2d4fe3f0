"""Chooses the size of the tile that one program of the paged attention kernel computes.

`paged_attention` calls it for each launch. It must not know the kernel's code.
"""

from dataclasses import dataclass, replace

import triton

from conveyor_engine.execution.kernels.part import capability, has_warp_groups

MIN_ROWS = 16  # the smallest M of the tensor cores' products; the interpreter accepts less
_MOST_ROWS_FLOAT32 = 64  # float32 is multiplied without tensor cores, so the operands stay in registers


@dataclass(frozen=True, slots=True)
class TileShape:
    """The size of a tile that a program computes, and Triton's launch options for it."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# By (decode, maximum bytes of a head); wider heads leave less room in registers and shared memory. With three stages,
# two tiles of keys and values are loaded while a third is multiplied. These shapes fit into the 99 KiB of shared memory
# that a block has on compute capability 8.6, 8.9 and 12.0. ADR 104 has the measurements.
_TILES = (
    (True, 256, TileShape(rows=16, keys=64, num_warps=4, num_stages=3)),
    (True, 512, TileShape(rows=16, keys=32, num_warps=4, num_stages=3)),
    (True, 1024, TileShape(rows=16, keys=16, num_warps=4, num_stages=3)),
    (False, 256, TileShape(rows=128, keys=32, num_warps=8, num_stages=3)),
    (False, 512, TileShape(rows=64, keys=16, num_warps=8, num_stages=3)),
    (False, 1024, TileShape(rows=16, keys=16, num_warps=4, num_stages=3)),
)
_OF_A_WARP_GROUP = TileShape(rows=64, keys=64, num_warps=4, num_stages=3)
# Compute capability 9.0 has the shared memory for it. It reads keys and values half as often as 64 rows (ADR 200).
_WIDE_ON_HOPPER = TileShape(rows=128, keys=32, num_warps=8, num_stages=3)
# Over 8 bits, for the same maximum bytes of a head of 16 bits. ADR 107 has the figures.
_DECODES_OF_8_BITS = (
    (256, TileShape(rows=16, keys=128, num_warps=4, num_stages=3)),
    (512, TileShape(rows=16, keys=64, num_warps=4, num_stages=3)),
)
_PROMPTS_OF_8_BITS = TileShape(rows=64, keys=32, num_warps=8, num_stages=3)
_PROMPTS_OF_8_BITS_OF_WARP_GROUPS = TileShape(rows=128, keys=64, num_warps=8, num_stages=3)


def choose_tile(decode: bool, head_dim: int, item_bytes: int, group: int, *, of_8_bits: bool = False) -> TileShape:
    """Return the tile for heads of this size. It is tall enough for one token of a whole group of query heads.

    Raises ValueError if the heads are too wide.
    """
    head_bytes = head_dim * item_bytes
    tile = _find_tile(decode, head_bytes, item_bytes, group, of_8_bits)
    if tile is None:
        raise ValueError(f"heads of {head_bytes} bytes are wider than this kernel's widest tile")
    rows = tile.rows if item_bytes < 4 else min(tile.rows, _MOST_ROWS_FLOAT32)
    return replace(tile, rows=max(rows, MIN_ROWS, triton.next_power_of_2(group)))


def _find_tile(decode: bool, head_bytes: int, item_bytes: int, group: int, of_8_bits: bool) -> TileShape | None:
    tiles = [tile for for_decode, limit, tile in _TILES if for_decode == decode and head_bytes <= limit]
    if item_bytes == 2 and decode and of_8_bits:
        tiles = [tile for limit, tile in _DECODES_OF_8_BITS if head_bytes <= limit] + tiles
    elif item_bytes == 2 and not decode and head_bytes <= 256:
        if of_8_bits:
            return _PROMPTS_OF_8_BITS_OF_WARP_GROUPS if has_warp_groups() else _PROMPTS_OF_8_BITS
        if group <= _OF_A_WARP_GROUP.rows and has_warp_groups():
            return _OF_A_WARP_GROUP
    elif item_bytes == 2 and not decode and 256 < head_bytes <= 512 and not of_8_bits and capability() == 90:
        return _WIDE_ON_HOPPER
    return tiles[0] if tiles else None
