"""The stage `curve` measures a decode step by its number of rows, for several models and types of the KV cache."""

import dataclasses
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Gemma3TextConfig, LlamaConfig, PretrainedConfig, Qwen3_5TextConfig, Qwen3MoeConfig

from conveyor_bench.comparing.shapes import SHAPES, model_config
from conveyor_bench.gpu.models import timed_core
from conveyor_bench.gpu.results import Results
from conveyor_bench.gpu.sizes import Batch, Sizes
from conveyor_bench.gpu.throughput import build_config
from conveyor_bench.gpu.workloads import batch_requests
from conveyor_engine.config.engine_config import KVCacheDtype
from conveyor_engine.errors import ConfigError, ModelError
from conveyor_engine.loop.core import EngineCore

_STEPS = 30
_NO_ENDS = {"eos_token_id": None, "bos_token_id": None}
_TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
}
_LLAMA = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
_GEMMA = {
    "num_hidden_layers": 34,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
}
_EXPERTS = {
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_TINY_EXPERTS = _TINY | {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
_TINY_STATES = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# By the names in `Sizes.curve_models`.
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama-3.1-8b": lambda: LlamaConfig(**_LLAMA, **_NO_ENDS),
    "gemma-3-4b": lambda: Gemma3TextConfig(**_GEMMA, sliding_window=1024, **_NO_ENDS),
    "qwen3-30b-a3b": lambda: Qwen3MoeConfig(**_EXPERTS, norm_topk_prob=True, **_NO_ENDS),
    "qwen3.5-9b": lambda: Qwen3_5TextConfig(**_NO_ENDS),  # transformers' defaults are this model's sizes
    "tiny-gemma": lambda: Gemma3TextConfig(**_TINY, sliding_window=16, **_NO_ENDS),
    "tiny-experts": lambda: Qwen3MoeConfig(**_TINY_EXPERTS, **_NO_ENDS),
    "tiny-states": lambda: Qwen3_5TextConfig(**_TINY, **_TINY_STATES, **_NO_ENDS),
}


def run(results: Results, sizes: Sizes) -> None:
    """Run the stage. A model that does not start has a row that says why."""
    for name, kv_cache in sizes.curve_models:
        try:
            _measure(results, sizes, name, kv_cache)
        except (ConfigError, ModelError, torch.OutOfMemoryError) as error:
            results.row("start", model=name, kv_cache=kv_cache, error=str(error)[:600])
        gc.unfreeze()  # `timed_core` freezes each engine's objects; their cycles hold the engine's memory
        gc.collect()
        if sizes.device == "cuda":
            torch.cuda.empty_cache()


def _measure(results: Results, sizes: Sizes, name: str, kv_cache: KVCacheDtype) -> None:
    most, prompt = sizes.curve_rows[-1], sizes.curve_prompt
    answer = prompt + 10 * _STEPS  # so that no request ends while others start
    with tempfile.TemporaryDirectory() as folder:
        (model_config(name) if name in SHAPES else CONFIGS[name]()).save_pretrained(folder)
        config = build_config(Path(folder), sizes, [[(prompt, answer)] * most])
        core, seconds, log = timed_core(dataclasses.replace(config, kv_cache_dtype=kv_cache))
    results.row("start", model=name, kv_cache=kv_cache, seconds=seconds, said="; ".join(log))
    for rows in sizes.curve_rows:
        ms, slowest = _time_steps(core, Batch(rows, prompt, answer))
        tokens_per_second = 1000 * rows / ms
        figures = {"ms": ms, "slowest_ms": slowest, "tokens_per_second": tokens_per_second}
        results.row("steps", model=name, kv_cache=kv_cache, rows=rows, **figures)


def _time_steps(core: EngineCore, batch: Batch) -> tuple[float, float]:
    """Return the milliseconds of a step of decodes, at the median and the slowest one."""
    requests = batch_requests(batch, core.facts.vocab_size, f"{batch.requests}.")
    for request in requests:
        core.add_request(request)
    while core.stats().step_num_tokens != batch.requests:
        core.step(time.monotonic())
    seconds = []
    for _ in range(_STEPS):
        started = time.monotonic()
        core.step(started)
        seconds.append(time.monotonic() - started)
    for request in requests:
        core.abort(request.request_id)
    while core.has_unfinished():
        core.step(time.monotonic())
    return 1000 * statistics.median(seconds), 1000 * max(seconds)
