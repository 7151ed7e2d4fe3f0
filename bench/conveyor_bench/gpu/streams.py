"""The stage `http`: a burst of streams through HTTP, API process and engine process, on a model of random weights.

First, requests of the same sizes run on an engine in this process, without HTTP. Streams over HTTP cannot be faster.

`python -m conveyor_bench.gpu.streams` runs the server of `serve`, with `models` as the program of its engine process.
"""

import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from dataclasses import asdict
from pathlib import Path
from threading import Thread

import torch

from conveyor_bench.comparing.shapes import SHAPES
from conveyor_bench.engine import served
from conveyor_bench.gpu.models import timed_core, write_config
from conveyor_bench.gpu.results import Results
from conveyor_bench.gpu.sizes import ON_A_GPU, REHEARSED, Batch, Sizes
from conveyor_bench.gpu.workloads import batch_requests, run_requests
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.placement import free_cached_memory

_ROUNDS = 2
_LINES_SHOWN = 10


def run(results: Results, sizes: Sizes) -> None:
    """Run the stage."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_config(Path(name), sizes.small)
        served.write_tokenizer(folder, SHAPES[sizes.small]["vocab_size"])
        _measure_alone(results, sizes, name)
        command = [sys.executable, "-m", __name__, name, sizes.device]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            lines: deque[str] = deque(maxlen=_LINES_SHOWN)
            try:
                port = served.wait_ready(server)
                Thread(target=_read, args=(server, lines), daemon=True).start()
                asyncio.run(_measure(results, sizes.streams, port))
            except OSError as error:
                raise RuntimeError(f"{error}; the server said last: {' '.join(lines)}") from error
            finally:
                server.terminate()


def _measure_alone(results: Results, sizes: Sizes, folder: str) -> None:
    core, _, _ = timed_core(_config(folder, sizes))
    for number in range(_ROUNDS):
        requests = batch_requests(sizes.streams, SHAPES[sizes.small]["vocab_size"], f"{number}.")
        run = run_requests(core, requests)
        figures = {"seconds": run.seconds, "tokens_per_second": run.output_tokens / run.seconds}
        results.row("engine alone", run=number + 1, **asdict(sizes.streams), **figures)
    del core
    free_cached_memory(torch.device(sizes.device))


def _read(server: "subprocess.Popen[str]", lines: deque[str]) -> None:
    """Read the server's log until the pipe is closed, so that the pipe never becomes full."""
    with contextlib.suppress(ValueError):
        lines.extend(server.stderr or ())


async def _measure(results: Results, batch: Batch, port: int) -> None:
    prompt = "x" * batch.input_tokens  # a byte is a token
    for number in range(_ROUNDS):
        times = await served.stream_all(port, batch.requests, batch.output_tokens, prompt)
        seconds = max(end for _, _, end in times) - min(sent for sent, _, _ in times)
        firsts = [first - sent for sent, first, _ in times]
        results.row(
            "streams",
            run=number + 1,
            **asdict(batch),
            seconds=seconds,
            tokens_per_second=batch.requests * batch.output_tokens / seconds,
            first_token_ms_p50=1000 * statistics.median(firsts),
            first_token_ms_max=1000 * max(firsts),
        )


def _serve(folder: str, device: str) -> None:
    sizes = ON_A_GPU if device == ON_A_GPU.device else REHEARSED
    served.serve_with(_config(folder, sizes), "conveyor_bench.gpu.models")


def _config(folder: str, sizes: Sizes) -> EngineConfig:
    batch = sizes.streams
    return EngineConfig(
        model=folder,
        host="127.0.0.1",
        port=0,
        device=sizes.device,
        dtype=sizes.dtype,
        max_model_len=batch.input_tokens + batch.output_tokens + 2,
        max_num_seqs=batch.requests,
        max_num_queued_requests=batch.requests,
        prefix_caching=False,
    )


if __name__ == "__main__":
    _serve(*sys.argv[1:])
