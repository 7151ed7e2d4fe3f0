"""The CPU kernels of engine/native, called through ctypes. Arguments and results are torch tensors.

Used by `attention`, `models` and `sampling`. `why_missing()` returns why the kernels cannot be used; all other
functions here need the kernels. The kernels support float32 and bfloat16, compute in float32, and run on torch's own
threads. Shapes are asserted, because a wrong shape is a bug in the caller.
"""

from conveyor_engine.execution.native.adapters import AdapterWeights, Columns, add_adapters
from conveyor_engine.execution.native.elementwise import rms_norm, rope, silu_mul
from conveyor_engine.execution.native.layer import (
    Heads,
    Layer,
    LayerAdapters,
    LayerParts,
    Layers,
    Norm,
    Product,
    take_layer_seconds,
)
from conveyor_engine.execution.native.library import (
    NativeMissingError,
    isa,
    supports,
    use_isa,
    why_missing,
)
from conveyor_engine.execution.native.packed import (
    PANEL,
    SUPER,
    Packed,
    PackedIntegers,
    PackedWeight,
    linear,
    pack_linear,
    unpack_integers,
    unpack_linear,
)
from conveyor_engine.execution.native.paged import (
    BLOCK_SIZE,
    CacheStep,
    kv_cache,
    kv_read,
    kv_scratch,
    kv_values_per_block,
    kv_write,
    paged_attention,
)
from conveyor_engine.execution.native.per_head import PackedHeads
from conveyor_engine.execution.native.sample import sample

__all__ = [
    "BLOCK_SIZE",
    "PANEL",
    "SUPER",
    "AdapterWeights",
    "CacheStep",
    "Columns",
    "Heads",
    "Layer",
    "LayerAdapters",
    "LayerParts",
    "Layers",
    "NativeMissingError",
    "Norm",
    "Packed",
    "PackedHeads",
    "PackedIntegers",
    "PackedWeight",
    "Product",
    "add_adapters",
    "isa",
    "kv_cache",
    "kv_read",
    "kv_scratch",
    "kv_values_per_block",
    "kv_write",
    "linear",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rope",
    "sample",
    "silu_mul",
    "supports",
    "take_layer_seconds",
    "unpack_integers",
    "unpack_linear",
    "use_isa",
    "why_missing",
]
