"""Chooses context and batch limits from configuration, model and device. Used by `start` and the runners."""

import torch
from transformers import PretrainedConfig

from conveyor_engine.config.engine_config import DEFAULT_NUM_SEQS, DEFAULT_NUM_SEQS_CUDA, EngineConfig
from conveyor_engine.errors import ConfigError, ModelError
from conveyor_protocol.workload import Workload

# Tokens of one step: enough to saturate the device's matrix units, few enough that decodes do not wait long.
DEFAULT_BATCHED_TOKENS = {"cpu": 1024, "cuda": 8192}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the type's name as the configuration spells it."""
    return str(dtype).removeprefix("torch.")


def find_context(model_config: PretrainedConfig) -> int | None:
    """Return the model's context length in tokens; None if its configuration has none."""
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def choose_max_model_len(config: EngineConfig, limit: int | None) -> int:
    """Return the limit on a request's tokens, prompt and output together. Raises ConfigError.

    limit: the model's context length in tokens; None if unknown.
    """
    if config.max_model_len is None:
        if config.workload is not None:
            return _derive_max_model_len(config, config.workload, limit)
        if limit is None:
            raise ConfigError("the model's config.json does not say how long its context may be; set `max_model_len`")
        return limit
    if limit is not None and config.max_model_len > limit:
        raise ConfigError(
            f"`max_model_len` is {config.max_model_len}, but the model was made for at most {limit} tokens; lower it"
        )
    return config.max_model_len


def _derive_max_model_len(config: EngineConfig, workload: Workload, limit: int | None) -> int:
    if limit is not None and workload.long_tokens > limit:
        raise ConfigError(
            f"`workload_input_tokens` and `workload_output_tokens` have {workload.long_tokens} tokens at P95, but the "
            f"model was made for at most {limit} tokens; lower them"
        )
    capacity = None if config.num_kv_blocks is None else config.num_kv_blocks * config.block_size
    return workload.choose_context(limit, capacity)


def check_speculation(config: EngineConfig, device: torch.device) -> None:
    """Reject `speculation` on devices whose steps are planned before the tokens of earlier ones are known.

    Raises ConfigError.
    """
    if config.speculation is not None and device.type != "cpu":
        raise ConfigError(
            f"`speculation: {config.speculation}` is for CPUs, and this engine runs on {device.type}; remove it"
        )


def check_settings_with_states(config: EngineConfig, name: str, world_size: int) -> None:
    """Reject settings that would change or divide the states which a model's layers keep for rows.

    name: of the model's class. Raises ConfigError, or ModelError for several ranks.
    """
    if world_size > 1:
        raise ModelError(
            f"{name} keeps states for each request, which are not divided among ranks: use `tensor_parallel_size: 1`"
        )
    if config.padding == "real":
        raise ConfigError(
            f"`padding: real` computes dummy tokens, which would change the states that {name} keeps "
            "for each request; use `padding: none`"
        )


def choose_batch_limits(config: EngineConfig, device: torch.device, task: str) -> tuple[int, int]:
    """Return (max_num_seqs, max_num_batched_tokens) for a model of this task. Raises ConfigError."""
    default = DEFAULT_NUM_SEQS_CUDA if (device.type, task) == ("cuda", "generate") else DEFAULT_NUM_SEQS
    max_num_seqs = config.choose_num_seqs(default)
    tokens = config.max_num_batched_tokens
    if tokens is None:
        tokens = max(DEFAULT_BATCHED_TOKENS[device.type], max_num_seqs)
    if tokens < max_num_seqs:
        raise ConfigError(
            f"`max_num_batched_tokens` is {tokens}, less than `max_num_seqs`, which is {max_num_seqs}: "
            "a step must have room for one token of each request"
        )
    return max_num_seqs, tokens
