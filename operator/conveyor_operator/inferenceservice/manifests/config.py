"""Builds the engine's configuration file, and the immutable ConfigMap that contains it. Pure.

The file is YAML with keys in snake_case, and the engine rejects unknown keys. Fields that the spec does not set are
left out, so that the engine's default applies. For runtime VLLM, `vllm` chooses the content of the file.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import yaml

from conveyor_api import names
from conveyor_api.batching import Objectives
from conveyor_api.engine import ReasoningParser, ToolParser
from conveyor_api.quantities import parse_duration_seconds
from conveyor_api.spec import InferenceServiceSpec
from conveyor_api.workload import Workload
from conveyor_operator.inferenceservice.manifests.vllm import build_vllm_config
from conveyor_operator.loop.owner import Object, Owner, build_metadata

_HASH_DIGITS = 8

# The engine's settings, and the fields of the spec from which they are computed.
RESOURCE_FIELDS: Final = {
    "model": "model.uri",
    "adapters_file": "adapters",
    "adapters_folder": "adapters",
    "task": "task",
    "served_model_name": "model.name",
    "device": "engine.device",
    "dtype": "engine.dtype",
    "quantization": "model.quantization",
    "model_class": "engine.modelClass",
    "max_model_len": "engine.maxModelLen",
    "tensor_parallel_size": "engine.tensorParallelSize",
    "batching_mode": "batching.mode",
    "max_num_seqs": "batching.maxBatchSize",
    "batching_window_seconds": "batching.window",
    "max_num_batched_tokens": "batching.maxBatchTokens",
    "length_grouping": "batching.lengthGrouping",
    "batching_eager": "batching.eager",
    "objective_time_to_first_token_seconds": "batching.objectives.timeToFirstToken",
    "objective_inter_token_latency_seconds": "batching.objectives.interTokenLatency",
    "objective_latency_seconds": "batching.objectives.latency",
    "speculation": "speculation.method",
    "draft_model": "speculation.draft.uri",
    "speculation_tokens": "speculation.maxTokens",
    "max_num_queued_requests": "engine.maxQueuedRequests",
    "class_shares": "queue.classes",
    "num_kv_blocks": "kvCache.blockBudget",
    "kv_memory_fraction": "kvCache.memoryPercent",
    "block_size": "kvCache.blockSize",
    "kv_cache_dtype": "kvCache.dtype",
    "workload_input_tokens": "workload.inputTokens",
    "workload_output_tokens": "workload.outputTokens",
    "request_timeout_seconds": "requestTimeout",
    "drain_timeout_seconds": "drain.timeout",
    "sampling_defaults": "engine.samplingDefaults",
    "tool_parser": "engine.toolParser",
    "reasoning_parser": "engine.reasoningParser",
    "media_hosts": "engine.mediaHosts",
}

# The engine's names for parsers. Tool parsers have the same names as in vLLM. `Auto` is left out: the default applies.
_TOOL_PARSERS: Final[dict[ToolParser, str]] = {
    "None": "none",
    "Hermes": "hermes",
    "Qwen3Coder": "qwen3_coder",
    "Llama3Json": "llama3_json",
    "Llama4Pythonic": "llama4_pythonic",
    "Mistral": "mistral",
    "DeepSeekV3": "deepseek_v3",
    "DeepSeekV31": "deepseek_v31",
    "DeepSeekV32": "deepseek_v32",
    "DeepSeekV4": "deepseek_v4",
    "DeepSeekV41": "deepseek_v41",
    "GLM45": "glm45",
    "MiniMaxM2": "minimax_m2",
    "SeedOSS": "seed_oss",
    "Granite": "granite",
    "Jamba": "jamba",
    "InternLM": "internlm",
    "Phi4MiniJson": "phi4_mini_json",
    "LFM2": "lfm2",
    "Harmony": "openai",
    "KimiK2": "kimi_k2",
    "Gemma4": "gemma4",
    "FunctionGemma": "functiongemma",
    "LongCat": "longcat",
    "Olmo3": "olmo3",
    "Command": "cohere_command3",
}

_REASONING_PARSERS: Final[dict[ReasoningParser, str]] = {
    "None": "none",
    "Think": "think",
    "Mistral": "mistral",
    "SeedOSS": "seed_oss",
    "Harmony": "openai_gptoss",
    "Gemma4": "gemma4",
    "Command": "cohere_command3",
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The file's text, and its hash, which is part of the ConfigMap's name."""

    text: str
    hash: str


def build_engine_config(owner: Owner, spec: InferenceServiceSpec, has_ipv6: bool = False) -> EngineConfig:
    """Return the configuration file of this service's engines. has_ipv6: whether pods have IPv6 addresses first."""
    is_vllm = spec.runtime == "VLLM"
    fields = build_vllm_config(owner, spec, has_ipv6) if is_vllm else _build_conveyor_config(owner, spec)
    given = {name: value for name, value in fields.items() if value is not None}
    text = yaml.safe_dump(given, sort_keys=False)
    return EngineConfig(text, hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS])


def _build_conveyor_config(owner: Owner, spec: InferenceServiceSpec) -> dict[str, Any]:
    batching, cache, cache_strategy = spec.batching, spec.kv_cache, spec.model.cache.strategy
    draft = spec.draft_model
    return {
        "model": spec.model.source.directory,
        "served_model_name": spec.model.name or owner.name,
        "adapters_file": names.ADAPTER_LIST_PATH if spec.adapters else None,
        # Downloads in a cache stay, because other pods may use them. An emptyDir would be full one day.
        "adapters_folder": names.FETCHED_ADAPTERS_PATH if spec.adapters and cache_strategy != "PVC" else None,
        "task": spec.task.lower() if spec.task else None,
        "device": spec.engine.device.lower(),
        "dtype": spec.engine.dtype.lower(),
        "quantization": spec.model.quantization.lower() if spec.model.quantization else None,
        "model_class": spec.engine.model_class,
        "max_model_len": spec.engine.max_model_len,
        "tensor_parallel_size": spec.tensor_parallel_size if spec.tensor_parallel_size > 1 else None,
        "sampling_defaults": "openai" if spec.engine.sampling_defaults == "OpenAI" else None,  # None: the default
        "tool_parser": _TOOL_PARSERS.get(spec.engine.tool_parser),
        "reasoning_parser": _REASONING_PARSERS.get(spec.engine.reasoning_parser),
        "media_hosts": ",".join(spec.engine.media_hosts) or None,
        "batching_mode": batching.mode.lower() if batching.mode else None,
        "max_num_seqs": _find_batch_size(spec),
        "batching_window_seconds": batching.window_seconds or None,  # 0: a mode without a window
        "max_num_batched_tokens": batching.max_batch_tokens,
        "length_grouping": "off" if batching.length_grouping == "Off" else None,  # None: the default
        "batching_eager": batching.eager or None,
        **_build_objectives(spec.batching.objectives),
        "speculation": spec.speculation and spec.speculation.method.lower(),
        "draft_model": draft and draft.source.directory,
        "speculation_tokens": spec.speculation and spec.speculation.max_tokens,
        "max_num_queued_requests": spec.engine.max_queued_requests,
        "class_shares": {str(each.level): each.max_share for each in spec.queue.classes if each.max_share} or None,
        "num_kv_blocks": cache.block_budget,
        "kv_memory_fraction": cache.memory_fraction,
        "block_size": cache.block_size,
        "kv_cache_dtype": cache.dtype.lower() if cache.dtype != "Auto" else None,  # None: the default
        **_build_workload(spec.workload),
        "request_timeout_seconds": spec.request_timeout_seconds,
        "drain_timeout_seconds": spec.drain.timeout_seconds,
        "port": names.ENGINE_PORT,
    }


def _find_batch_size(spec: InferenceServiceSpec) -> int | None:
    """Return `max_num_seqs`; None if it depends on the task, which the engine reads from the model's files.

    The task in the status is not used: the first pod reports it, and the changed file would restart that pod.
    """
    is_open = spec.task is None and spec.engine.device == "CUDA" and spec.batching.max_batch_size is None
    return None if is_open else spec.settle_batching(spec.task).chosen_batch_size


def _build_objectives(objectives: Objectives | None) -> dict[str, float | None]:
    if objectives is None:
        return {}
    named = {
        "objective_time_to_first_token_seconds": objectives.time_to_first_token,
        "objective_inter_token_latency_seconds": objectives.inter_token_latency,
        "objective_latency_seconds": objectives.latency,
    }
    return {name: None if text is None else parse_duration_seconds(text) for name, text in named.items()}


def _build_workload(workload: Workload | None) -> dict[str, str | None]:
    if workload is None:
        return {}
    named = {"workload_input_tokens": workload.input_tokens, "workload_output_tokens": workload.output_tokens}
    return {name: None if lengths is None else f"{lengths.p50},{lengths.p95}" for name, lengths in named.items()}


def build_config_map(owner: Owner, config: EngineConfig) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": build_metadata(owner, names.config_map_name(owner.name, config.hash)),
        "immutable": True,
        "data": {names.ENGINE_CONFIG_KEY: config.text},
    }
