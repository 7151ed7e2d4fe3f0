"""Chooses device, threads, context and batch limits from configuration, model and machine. Used by both runners."""

import os

import torch
from transformers import PretrainedConfig

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ConfigError
from conveyor_engine.execution import machine

# Tokens of one step: enough to saturate the device's matrix units, few enough that decodes do not wait long.
DEFAULT_BATCHED_TOKENS = {"cpu": 1024, "cuda": 8192}


def dtype_name(dtype: torch.dtype) -> str:
    """The type's name in the configuration's spelling."""
    return str(dtype).removeprefix("torch.")


def open_device(config: EngineConfig) -> torch.device:
    """The device that the configuration asks for. On a CPU, sets torch's number of threads too."""
    device = machine.choose_device(config.device)
    if device.type == "cpu":
        _set_num_threads(config.num_threads)
    return device


def _set_num_threads(num_threads: int | None) -> None:
    """Threads as configured, else as OMP_NUM_THREADS says, else one for each CPU of the container's limit."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(machine.num_cpus())


def find_context(model_config: PretrainedConfig) -> int | None:
    """The model's context length in tokens; None if its configuration does not say it."""
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def choose_max_model_len(config: EngineConfig, limit: int | None) -> int:
    """Tokens of the longest request. `limit`: the model's context length, None if unknown. Raises ConfigError."""
    if config.max_model_len is None:
        if limit is None:
            raise ConfigError("the model's config.json does not say how long its context may be; set `max_model_len`")
        return limit
    if limit is not None and config.max_model_len > limit:
        raise ConfigError(
            f"`max_model_len` is {config.max_model_len}, but the model was made for at most {limit} tokens; lower it"
        )
    return config.max_model_len


def choose_batch_limits(config: EngineConfig, device: torch.device) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens). Raises ConfigError."""
    max_num_seqs = 1 if config.batching_mode == "none" else config.max_num_seqs
    tokens = config.max_num_batched_tokens
    if tokens is None:
        tokens = max(DEFAULT_BATCHED_TOKENS[device.type], max_num_seqs)
    if tokens < max_num_seqs:
        raise ConfigError(
            f"`max_num_batched_tokens` is {tokens}, less than `max_num_seqs`, which is {max_num_seqs}: "
            "a step must have room for one token of each request"
        )
    return max_num_seqs, tokens


def free_cached_memory(device: torch.device) -> None:
    """Returns torch's cached memory to the device. Raises if the device is broken."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
