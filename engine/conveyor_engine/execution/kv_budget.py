"""Computes the number of KV blocks. Called by `start` after the model is loaded. No torch."""

from conveyor_engine.config.engine_config import DEFAULT_MEMORY_FRACTION, EngineConfig
from conveyor_engine.errors import ConfigError
from conveyor_engine.wire.kv_tables import ONE_TABLE, KVTables
from conveyor_protocol.failure_reasons import FailureReason

LARGEST_MEMORY_FRACTION = 0.95  # maximum share of the free memory; allocators and the driver need the rest
CPU_DEFAULT_BYTES = 4 * 2**30  # limit of the default, unless one request needs more; programs share a CPU's memory
CACHE_BLOCKS_MAX = 2**20  # the prefix cache uses the blocks that requests leave; more blocks cost more than they save


def plan_num_blocks(
    config: EngineConfig,
    *,
    max_num_seqs: int,
    max_model_len: int,
    block_bytes: int,
    free_bytes: int,
    is_cpu: bool,
    tables: KVTables = ONE_TABLE,
) -> int:
    """Return the number of blocks of all tables: num_kv_blocks for each table, or as many as fit.

    free_bytes: the memory that the weights and the largest step leave. Raises ConfigError: KVBudgetTooSmall if one
    request of max_model_len tokens does not fit into the blocks, KVBudgetTooLarge if num_kv_blocks do not fit into the
    memory.
    """
    needed = tables.count_needed(max_model_len, config.block_size)
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks * tables.number
        _check_free(config.num_kv_blocks, block_bytes * tables.number, free_bytes)
    else:
        num_blocks = _blocks_of(config, max_model_len, tables, max_num_seqs, block_bytes, free_bytes, is_cpu)
    if num_blocks < needed:
        source = "the free memory" if config.num_kv_blocks is None else "`num_kv_blocks`"
        raise ConfigError(
            f"{source} gives {num_blocks} KV blocks of {config.block_size} tokens, but one request of {max_model_len} "
            f"tokens needs {needed} ({_mib(needed * block_bytes)}); set `max_model_len` to "
            f"{tables.find_longest(num_blocks, config.block_size)} or less, or give the KV cache more room",
            reason=FailureReason.KV_BUDGET_TOO_SMALL,
        )
    return num_blocks


def limit_rows(config: EngineConfig, *, max_num_seqs: int, row_bytes: int, free_bytes: int, is_cpu: bool) -> int:
    """Return how many rows run at once if each has a state of `row_bytes`: `max_num_seqs`, or as many as fit.

    The states may use half of the cache's memory; KV blocks use the other half. free_bytes: the memory that the
    weights leave. Raises ConfigError if `max_num_seqs` is configured and does not fit, or if not even one row fits.
    """
    budget = int(free_bytes * (config.kv_memory_fraction or DEFAULT_MEMORY_FRACTION)) // 2
    is_chosen = config.max_num_seqs is not None or config.batching_mode == "none"
    if is_cpu and config.kv_memory_fraction is None and not is_chosen:
        budget = min(budget, max(CPU_DEFAULT_BYTES, row_bytes))
    fit = budget // row_bytes
    if fit < (max_num_seqs if is_chosen else 1):
        lower = f"lower `max_num_seqs` to {fit} or less, or " if fit else ""
        raise ConfigError(
            f"the model keeps a state of {_mib(row_bytes)} for each request, and the free memory has room for {fit} "
            f"beside the KV cache; {lower}give the cache more room",
            reason=FailureReason.KV_BUDGET_TOO_SMALL,
        )
    return min(max_num_seqs, fit)


def _check_free(num_blocks: int, block_bytes: int, free_bytes: int) -> None:
    most = int(free_bytes * LARGEST_MEMORY_FRACTION) // block_bytes
    if num_blocks > most:
        raise ConfigError(
            f"{num_blocks} KV blocks take {_mib(num_blocks * block_bytes)}, but only {_mib(free_bytes)} are free "
            f"beside the model and its largest step, and the KV cache may use {LARGEST_MEMORY_FRACTION:.0%} of that; "
            f"lower `num_kv_blocks` to {most} or less",
            reason=FailureReason.KV_BUDGET_TOO_LARGE,
        )


def _blocks_of(
    config: EngineConfig,
    max_model_len: int,
    tables: KVTables,
    max_num_seqs: int,
    block_bytes: int,
    free_bytes: int,
    is_cpu: bool,
) -> int:
    """Return the number of blocks that fit into the cache's share of the memory, capped at the useful maximum."""
    budget = int(free_bytes * (config.kv_memory_fraction or DEFAULT_MEMORY_FRACTION))
    needed = tables.count_needed(max_model_len, config.block_size)
    most = needed * max_num_seqs
    if is_cpu and config.kv_memory_fraction is None:
        budget = min(budget, max(CPU_DEFAULT_BYTES, needed * block_bytes))
        if config.workload is not None:
            long_tokens = config.workload.long_tokens
            most = max(needed, max_num_seqs * tables.count_needed(long_tokens, config.block_size))
    elif config.prefix_caching:
        most = max(most, CACHE_BLOCKS_MAX * tables.number)
    return min(most, budget // block_bytes)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
