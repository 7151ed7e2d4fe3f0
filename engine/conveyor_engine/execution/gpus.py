"""Which requests a GPU holds of a model, by the engine's own plan. Used by `preview` and docs/gpu_models.py."""

from typing import Final, NamedTuple

from conveyor_engine.config.engine_config import DEFAULT_NUM_SEQS_CUDA, EngineConfig
from conveyor_engine.errors import ConfigError
from conveyor_engine.execution.kv_budget import plan_num_blocks
from conveyor_engine.wire.kv_tables import ONE_TABLE, KVTables

STEP_BYTES: Final = 2 * 2**30  # assumed: CUDA's context and the largest step; the engine measures them at its start


class Gpu(NamedTuple):
    name: str
    mib: int  # as `nvidia-smi` shows it


GPUS: Final = (
    Gpu("L4, A10G (24 GB)", 23_028),
    Gpu("A100 (40 GB)", 40_960),
    Gpu("L40S (48 GB)", 46_068),
    Gpu("A100, H100 (80 GB)", 81_559),
    Gpu("H200 (141 GB)", 143_771),
)


def count_requests(
    gpu: Gpu, weight_bytes: int, block_bytes: int, num_tokens: int, row_bytes: int = 0, tables: KVTables = ONE_TABLE
) -> int:
    """Return how many requests of `num_tokens` tokens run at once; 0 if not even one fits.

    block_bytes: of the KV cache; 0: the model has none. row_bytes: of the states of a request.
    """
    config = EngineConfig(model="-")
    free_bytes = gpu.mib * 2**20 - weight_bytes - STEP_BYTES
    if not block_bytes:
        return DEFAULT_NUM_SEQS_CUDA if free_bytes > 0 else 0
    rows = DEFAULT_NUM_SEQS_CUDA
    if row_bytes:
        rows = min(rows, max(0, free_bytes) // 2 // row_bytes)
        free_bytes -= rows * row_bytes
    try:
        blocks = plan_num_blocks(
            config,
            max_num_seqs=DEFAULT_NUM_SEQS_CUDA,
            max_model_len=num_tokens,
            block_bytes=block_bytes,
            free_bytes=max(0, free_bytes),
            is_cpu=False,
            tables=tables,
        )
    except ConfigError:
        return 0
    return min(rows, tables.count_tokens(blocks, config.block_size, num_tokens) // num_tokens)
