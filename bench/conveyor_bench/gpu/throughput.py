"""The stages `nano`, `one` and `burst8b`: this engine's tokens per second, and their share of what is possible."""

import dataclasses
import gc
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from conveyor_bench.comparing.shapes import SHAPES
from conveyor_bench.gpu.device import Ceilings, measure_ceilings
from conveyor_bench.gpu.models import timed_core, write_config
from conveyor_bench.gpu.results import Results
from conveyor_bench.gpu.sizes import Batch, Sizes
from conveyor_bench.gpu.workloads import (
    Lengths,
    Run,
    batch_requests,
    least_seconds,
    lengths_of,
    nano_requests,
    run_requests,
)
from conveyor_engine.config.engine_config import EngineConfig, KVCacheDtype
from conveyor_engine.errors import ConfigError
from conveyor_engine.execution.attention.select import KV_DTYPES
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner
from conveyor_engine.wire.request import EngineRequest

_RUNS = 2  # on one engine; the first shows costs that later runs do not have


def run_nano(results: Results, sizes: Sizes) -> None:
    """Run nano-vllm's benchmark for each type of the KV cache. If a type is not possible, its row says why."""
    requests = nano_requests(sizes, SHAPES[sizes.small]["vocab_size"])
    for kv_cache_dtype in sizes.kv_cache_dtypes:
        try:
            _measure(results, sizes, sizes.small, [requests, requests], kv_cache_dtype)
        except ConfigError as error:
            results.row("runs", shape=sizes.small, kv_cache=kv_cache_dtype, error=str(error))
        gc.unfreeze()  # `timed_core` freezes each engine's objects; their cycles hold the engine's memory
        gc.collect()


def run_one(results: Results, sizes: Sizes) -> None:
    """Run one request at a time."""
    for shape in (sizes.small, sizes.large):
        _measure(results, sizes, shape, _rounds(sizes.one, shape))


def run_burst(results: Results, sizes: Sizes) -> None:
    """Run many requests at once with the large shape."""
    _measure(results, sizes, sizes.large, _rounds(sizes.burst, sizes.large))


def _rounds(batch: Batch, shape: str) -> list[list[EngineRequest]]:
    return [batch_requests(batch, SHAPES[shape]["vocab_size"], f"{number}.") for number in range(_RUNS)]


def _measure(
    results: Results,
    sizes: Sizes,
    shape: str,
    rounds: Sequence[list[EngineRequest]],
    kv_cache_dtype: KVCacheDtype = "auto",
) -> None:
    device, dtype = torch.device(sizes.device), getattr(torch, sizes.dtype)
    ceilings = measure_ceilings(device, dtype, sizes.copied_bytes, sizes.product_width)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        config = build_config(write_config(Path(folder), shape), sizes, [lengths_of(requests) for requests in rounds])
        config = dataclasses.replace(config, kv_cache_dtype=kv_cache_dtype)
        core, seconds, log = timed_core(config)
    what = {"shape": shape} if kv_cache_dtype == "auto" else {"shape": shape, "kv_cache": kv_cache_dtype}
    results.row("start", **what, seconds=seconds, backend=core.facts.attention_backend, said="; ".join(log))
    for number, requests in enumerate(rounds):
        run = run_requests(core, requests)
        results.row(
            "runs", **what, run=number + 1, **_figures(core, run, lengths_of(requests), ceilings, kv_cache_dtype)
        )


def build_config(model: Path, sizes: Sizes, rounds: Sequence[Lengths]) -> EngineConfig:
    """Return the defaults, with a place for each request. Prefixes are not cached, so each run computes everything."""
    return EngineConfig(
        model=str(model),
        device=sizes.device,
        dtype=sizes.dtype,
        max_model_len=max(sum(lengths) for requests in rounds for lengths in requests),
        max_num_seqs=max(map(len, rounds)),
        max_num_queued_requests=max(map(len, rounds)),
        prefix_caching=False,
        enforce_eager=sizes.enforce_eager,
    )


def _figures(
    core: EngineCore, run: Run, lengths: Lengths, ceilings: Ceilings, kv_cache_dtype: KVCacheDtype
) -> dict[str, object]:
    assert isinstance(core.executor, GenerateRunner)
    prompts, decodes = least_seconds(core.executor.model, lengths, ceilings, KV_DTYPES[kv_cache_dtype])
    decoding = run.seconds - run.last_first_token
    return {
        "requests": len(lengths),
        "output_tokens": run.output_tokens,
        "seconds": run.seconds,
        "output_tokens_per_second": run.output_tokens / run.seconds,
        "of_limit": (prompts + decodes) / run.seconds,
        "limit_tokens_per_second": run.output_tokens / (prompts + decodes),
        "steps": run.num_steps,
        "ms_per_step": 1000 * run.seconds / run.num_steps,
        "first_token_ms": 1000 * run.first_token,
        "all_first_tokens_ms": 1000 * run.last_first_token,
        "decodes_of_limit": decodes / decoding if len(lengths) == 1 else None,
    }
