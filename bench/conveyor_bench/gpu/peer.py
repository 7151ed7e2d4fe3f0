"""The stage `generate-batch` measures transformers' continuous batching with greedy requests like those of `nano`.

The stage uses the manager of continuous batching, so that it can also count the tokens of unfinished requests. The
stage does not stop the manager, because the manager would finish all requests first. The stage's process ends anyway.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from conveyor_bench.comparing.shapes import SHAPES, model_config
from conveyor_bench.gpu.models import make_model
from conveyor_bench.gpu.results import Results
from conveyor_bench.gpu.sizes import Sizes
from conveyor_bench.gpu.workloads import Lengths, lengths_of, nano_requests
from conveyor_engine.wire.request import EngineRequest

_NO_TOKEN = -1
_POLL_SECONDS = 0.2


def run(results: Results, sizes: Sizes) -> None:
    """Run the stage."""
    requests = nano_requests(sizes, SHAPES[sizes.small]["vocab_size"])
    lengths = lengths_of(requests)
    device, dtype = torch.device(sizes.device), getattr(torch, sizes.dtype)
    model: Any = make_model("", model_config(sizes.small), dtype, device, "sdpa")
    manager = model.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=_NO_TOKEN, pad_token_id=0),
        continuous_batching_config=_configure(device, lengths),
    )
    started = time.monotonic()
    manager.warmup()
    manager.start()
    results.row("start", shape=sizes.small, seconds=time.monotonic() - started)
    num_tokens, seconds = _run(manager, requests, lengths, sizes.peer_seconds)
    results.row(
        "runs",
        shape=sizes.small,
        requests=len(requests),
        output_tokens=num_tokens,
        of_output_tokens=sum(answer for _, answer in lengths),
        seconds=seconds,
        output_tokens_per_second=num_tokens / seconds,
        attention=str(model.config._attn_implementation),
    )


def _configure(device: torch.device, lengths: Lengths) -> ContinuousBatchingConfig:
    """Return the configuration of transformers' continuous batching.

    On a GPU, transformers chooses memory and step size itself. On a CPU, it does not always find the memory's size.
    """
    if device.type == "cuda":
        return ContinuousBatchingConfig(max_requests_per_batch=len(lengths))
    return ContinuousBatchingConfig(
        max_requests_per_batch=len(lengths), num_blocks=2 * len(lengths), max_batch_tokens=64
    )


def _run(manager: Any, requests: Sequence[EngineRequest], lengths: Lengths, bound: float) -> tuple[int, float]:
    """Run all requests to their ends, or until `bound` seconds have passed.

    Returns (tokens, seconds). Raises RuntimeError if a request fails.
    """
    started = time.monotonic()
    for request, (_, answer) in zip(requests, lengths, strict=True):
        manager.add_request(request.prompt_token_ids, max_new_tokens=answer)
    finished: dict[str, int] = {}
    while len(finished) < len(requests) and time.monotonic() - started < bound:
        result = manager.get_result(timeout=_POLL_SECONDS)
        if result is None and not manager.is_running():
            raise RuntimeError("transformers' continuous batching ended before its requests did")
        if result is not None and result.error is not None:
            raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
        if result is not None and result.is_finished():
            finished[result.request_id] = len(result.generated_tokens)
    active = list(manager.batch_processor.scheduler.active_requests.values())
    running = sum(len(state.generated_tokens) for state in active if state.request_id not in finished)
    return sum(finished.values()) + running, time.monotonic() - started
