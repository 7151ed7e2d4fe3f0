"""Divides a model's layers into groups with a block table each, so that layers with a window keep only its blocks.

All groups use one pool of blocks, as in vLLM's hybrid KV cache manager. So a block has the same number of bytes for
each group. It consists of places, and a place holds one layer of any group, or several smaller ones (`Spot.parts`).

Used by `tasks.generate` after the probe. `scheduling.block_tables` fills the tables.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from conveyor_engine.execution.attention.backend import LayerShape, Spot
from conveyor_engine.wire.kv_tables import ONE_TABLE, KVTables

_MOST_TABLES = 12  # more tables leave fewer places unused, but a step sends more block numbers
_MOST_PARTS = 8
_WORTH = 0.9  # groups are used if a request of the full context then needs at most this share of the memory


@dataclass(frozen=True, slots=True)
class _Kind:
    """The layers with a window, or those without one."""

    layers: list[int]
    parts: int  # how many of them a place holds

    @property
    def num_places(self) -> int:
        """Return the number of places that one block of all layers fills."""
        return -(-len(self.layers) // self.parts)


def group_layers(
    layers: Sequence[LayerShape], max_model_len: int, block_size: int, in_flight: int
) -> tuple[list[LayerShape], KVTables]:
    """Return the layers with their spots, and the tables. Without a gain, all layers share one table.

    in_flight: the largest number of tokens that a request has in all open steps.
    """
    kinds = _find_kinds(layers)
    if kinds is None:
        return list(layers), ONE_TABLE
    window = max(layers[i].window or 0 for i in kinds[1].layers)

    def tables_of(num_places: int) -> KVTables:
        full, windowed = (-(-kind.num_places // num_places) for kind in kinds)
        return KVTables(full=full, windowed=windowed, window=window, in_flight=in_flight)

    def count_places(num_places: int) -> tuple[int, int]:
        tables = tables_of(num_places)
        return num_places * tables.count_kept(max_model_len, block_size), tables.number

    sizes = range(1, max(kind.num_places for kind in kinds) + 1)
    num_places = min((size for size in sizes if tables_of(size).number <= _MOST_TABLES), key=count_places)
    whole = sum(kind.num_places for kind in kinds) * ONE_TABLE.count_kept(max_model_len, block_size)
    if count_places(num_places)[0] > _WORTH * whole:
        return list(layers), ONE_TABLE
    tables = tables_of(num_places)
    return _place(layers, kinds, num_places, tables), tables


def list_parts(layers: Sequence[LayerShape]) -> list[int]:
    """Return the parts of each table's places, which are the factor of its block numbers on the device."""
    parts = {spot.table: spot.parts for layer in layers if (spot := layer.spot) is not None}
    return [parts[table] for table in sorted(parts)] or [1]


def _place(layers: Sequence[LayerShape], kinds: Sequence[_Kind], num_places: int, tables: KVTables) -> list[LayerShape]:
    placed = list(layers)
    for first_table, kind in zip((0, tables.full), kinds, strict=True):
        for number, index in enumerate(kind.layers):
            table, rest = divmod(number, num_places * kind.parts)
            place, part = divmod(rest, kind.parts)
            placed[index] = replace(layers[index], spot=Spot(first_table + table, place, part, kind.parts))
    return placed


def _find_kinds(layers: Sequence[LayerShape]) -> tuple[_Kind, _Kind] | None:
    """Return the layers without and with a window; None if none has one, or if places of equal size are impossible."""
    kept = [index for index, layer in enumerate(layers) if layer.num_kv_heads]
    full, windowed = ([index for index in kept if bool(layers[index].window) == has] for has in (False, True))
    shapes = [{replace(layers[i], num_heads=0, window=None) for i in kind} for kind in (full, windowed)]
    if not windowed or max(map(len, shapes)) > 1:
        return None
    (of_windowed,) = shapes[1]
    (of_full,) = shapes[0] or shapes[1]
    if of_full == of_windowed:
        return _Kind(full, 1), _Kind(windowed, 1)
    if any(shape.head_dim % 2 or shape.value_dim % 16 for shape in (of_full, of_windowed)):
        return None  # the compiled kernels would pad them
    keys, values = (
        [shape.num_kv_heads * dim for shape, dim in zip((of_full, of_windowed), dims, strict=True)]
        for dims in ((of_full.head_dim, of_windowed.head_dim), (of_full.value_dim, of_windowed.value_dim))
    )
    parts = [math.lcm(*keys) // key for key in keys]
    if max(parts) > _MOST_PARTS or parts[0] * values[0] != parts[1] * values[1]:
        return None
    return _Kind(full, parts[0]), _Kind(windowed, parts[1])
