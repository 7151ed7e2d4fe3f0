"""How many KV blocks the engine may have. Called by `model_runner` after the model is loaded. Torch-free arithmetic."""

from conveyor_engine.config import EngineConfig
from conveyor_engine.errors import ConfigError

DEFAULT_MEMORY_FRACTION = 0.85
CPU_DEFAULT_BYTES = 4 * 2**30  # a CPU's memory is shared with others: take no more unless told to


def plan_num_blocks(
    config: EngineConfig, *, max_num_seqs: int, max_model_len: int, block_bytes: int, free_bytes: int, is_cpu: bool
) -> int:
    """Number of blocks, from num_kv_blocks or from the free memory.

    Raises ConfigError: KVBudgetTooSmall if one request of max_model_len tokens would not fit,
    KVBudgetTooLarge if the memory is not there.
    """
    needed = -(-max_model_len // config.block_size)
    useful = needed * max_num_seqs  # more could never be used
    if config.num_kv_blocks is not None:
        num_blocks, source = config.num_kv_blocks, "num_kv_blocks"
        if num_blocks * block_bytes > free_bytes:
            raise ConfigError(
                f"{num_blocks} KV blocks take {_mib(num_blocks * block_bytes)}, but only {_mib(free_bytes)} are free "
                f"after loading the model; lower num_kv_blocks to {free_bytes // block_bytes} or less",
                reason="KVBudgetTooLarge",
            )
    else:
        budget = int(free_bytes * (config.kv_memory_fraction or DEFAULT_MEMORY_FRACTION))
        if is_cpu and config.kv_memory_fraction is None:
            budget = min(budget, max(CPU_DEFAULT_BYTES, needed * block_bytes))
        num_blocks, source = min(useful, budget // block_bytes), "the free memory"
    if num_blocks < needed:
        raise ConfigError(
            f"{source} gives {num_blocks} KV blocks of {config.block_size} tokens, but one request of max_model_len "
            f"{max_model_len} needs {needed} ({_mib(needed * block_bytes)}); set max_model_len to "
            f"{num_blocks * config.block_size} or less, or give the KV cache more room",
            reason="KVBudgetTooSmall",
        )
    return num_blocks


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
