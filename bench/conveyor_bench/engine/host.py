"""`python -m conveyor_bench host`: what a step costs the host, with a model whose forward does nothing.

The command measures the milliseconds of each part of a step while all rows decode, in one process. Then it measures the
tokens per second that clients get from the same executor through engine process, socket, API process and HTTP
(`served`). It needs no GPU: a GPU would wait for the host in these times. The last line printed is one JSON object.
"""

import argparse
import json
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import torch

from conveyor_bench.engine.idle import TOKEN, IdleExecutor
from conveyor_bench.engine.served import measure_served
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.loop.executor import compute
from conveyor_engine.wire.frames import encode_frame
from conveyor_engine.wire.messages import StepOutputs
from conveyor_engine.wire.request import EngineRequest, SamplingParams

PARTS = ("schedule", "build", "update", "send")
_PROMPT_TOKENS = 64
_WARM_STEPS = 20


def build_config(model: str, rows: int, steps: int) -> EngineConfig:
    """Return a configuration with room for all rows at once, from their prompts to the last step."""
    return EngineConfig(
        model=model,
        device="cpu",
        max_model_len=_PROMPT_TOKENS + _WARM_STEPS + steps + 2,
        max_num_seqs=rows,
        max_num_batched_tokens=max(8192, rows * _PROMPT_TOKENS),
        max_num_queued_requests=rows,
        warmup=False,
    )


def measure_parts(rows: int, steps: int) -> dict[str, float]:
    """Return the milliseconds of each part of a step, as medians over `steps` steps in which all rows decode."""
    config = build_config("none", rows, steps)
    executor = IdleExecutor(config)
    core = EngineCore(config, executor)
    for number in range(rows):
        prompt = [(number * 31 + position) % 256 for position in range(_PROMPT_TOKENS)]
        params = SamplingParams(max_tokens=_WARM_STEPS + steps + 2, temperature=0.0, ignore_eos=True)
        core.add_request(EngineRequest(request_id=f"r{number}", prompt_token_ids=prompt, params=params))
    with _peer() as connection:
        times = [_time_step(core, connection, rows) for _ in range(_WARM_STEPS + steps)][_WARM_STEPS:]
    return {
        part: statistics.median(column) * 1000 for part, column in zip(PARTS, zip(*times, strict=True), strict=True)
    }


def _time_step(core: EngineCore, connection: socket.socket, rows: int) -> tuple[float, ...]:
    """Return the seconds of each part of a step. Calls the parts of `core.step` and the loop's `send` one by one."""
    marks = [time.perf_counter()]
    plan = core.scheduler.schedule(marks[0])
    marks.append(time.perf_counter())
    assert plan is not None
    result = compute(core.executor, plan)
    marks.append(time.perf_counter())
    core.scheduler.update(result)
    outputs = core.scheduler.take_outputs()
    marks.append(time.perf_counter())
    connection.sendall(encode_frame(StepOutputs(outputs, core.stats(), rows)))
    marks.append(time.perf_counter())
    assert [output.new_token_ids for output in outputs] == [[TOKEN]] * rows
    return tuple(end - begin for begin, end in pairwise(marks))


@contextmanager
def _peer() -> Iterator[socket.socket]:
    """Yield a socket whose other end is read."""
    ours, theirs = socket.socketpair()

    def read() -> None:
        while theirs.recv(1 << 20):
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield ours
    finally:
        ours.close()
        reader.join()
        theirs.close()


def main(argv: Sequence[str]) -> int:
    """Entry point of the command `host`."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench host", description=__doc__)
    parser.add_argument("--rows", type=int, default=256, help="requests that decode at once")
    parser.add_argument("--steps", type=int, default=300, help="steps whose parts are measured")
    parser.add_argument("--streamed-tokens", type=int, default=200, help="tokens that each client streams over HTTP")
    arguments = parser.parse_args(argv)
    for name in ("rows", "steps", "streamed_tokens"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    report = partial(print, flush=True)
    torch.set_num_threads(1)
    parts = measure_parts(arguments.rows, arguments.steps)
    total = sum(parts.values())
    for part, milliseconds in [*parts.items(), ("sum", total)]:
        report(f"event=measured part={part} milliseconds_per_step={milliseconds:.3f}")
    served = measure_served(arguments.rows, arguments.streamed_tokens)
    report(f"event=measured part=served streamed_tokens_per_second={served:.0f}")
    result = {
        "host_milliseconds_per_step": round(total, 3),
        "parts": {part: round(milliseconds, 3) for part, milliseconds in parts.items()},
        "streamed_tokens_per_second": round(served),
        "rows": arguments.rows,
        "steps": arguments.steps,
    }
    report(json.dumps(result))
    return 0
