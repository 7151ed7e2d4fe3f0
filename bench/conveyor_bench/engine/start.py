"""`python -m conveyor_bench start`: the time until the engine is ready, and the speed of a few streams after that.

Starts `serve` with a model several times, one after the other, on a given number of processors. Clients run on the
other processors, if there are any. The times in the log give the parts of a start. The last line printed is one JSON
object.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from conveyor_bench.engine.served import MODEL, stream_all

# The event in the log that ends each part.
_PARTS = {
    "api_process": "engine_process_started",
    "imports": "model_loading",
    "model": "kv_cache_allocated",
    "warm_up": "engine_ready",
}
_PROMPT = "Hello"


def measure_start(model: str, processors: set[int], streams: int, tokens: int) -> dict[str, float]:
    """Return the seconds of a start and of its parts, and the tokens per second of all streams together.

    Raises RuntimeError if the server ends before it is ready.
    """
    command = [sys.executable, "-m", "conveyor_engine", "serve", "--model", model, "--served-model-name", MODEL]
    command += ["--device", "cpu", "--host", "127.0.0.1", "--port", "0"]
    with tempfile.NamedTemporaryFile() as log:
        began = time.time()
        with subprocess.Popen(command, stderr=log, preexec_fn=lambda: os.sched_setaffinity(0, processors)) as server:
            try:
                port = _wait_listening(server, Path(log.name))
                times = asyncio.run(stream_all(port, streams, tokens, _PROMPT))
            finally:
                server.terminate()
        parts = _seconds_of_parts(Path(log.name).read_text(), began)
    seconds = max(end for _, _, end in times) - min(first for _, first, _ in times)
    return {**parts, "streamed_tokens_per_second": streams * tokens / seconds}


def _wait_listening(server: "subprocess.Popen[bytes]", log: Path) -> int:
    while server.poll() is None:
        if match := re.search(r"event=listening .*port=(\d+)", log.read_text()):
            return int(match[1])
        time.sleep(0.02)
    raise RuntimeError("the server did not start: " + log.read_text())


def _seconds_of_parts(log: str, began: float) -> dict[str, float]:
    parts, since = {}, began
    for part, event in _PARTS.items():
        line = re.search(rf"time=(\S+) .*event={event}\b", log)
        assert line is not None, log
        end = datetime.fromisoformat(line[1]).timestamp()
        parts[part], since = end - since, end
    return {**parts, "all": since - began}


def main(argv: Sequence[str]) -> int:
    """Entry point of the command `start`."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench start", description=__doc__)
    parser.add_argument("--model", required=True, help="a model's directory")
    parser.add_argument("--processors", type=int, default=1, help="how many the engine may use; the clients use others")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4, help="requests at once, after each start")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    arguments = parser.parse_args(argv)
    for name in ("processors", "starts", "streams", "tokens"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1")
    report = partial(print, flush=True)
    all_ = sorted(os.sched_getaffinity(0))
    if arguments.processors > len(all_):
        parser.error(f"--processors must be at most {len(all_)} here")
    ours = set(all_[: arguments.processors])
    os.sched_setaffinity(0, set(all_) - ours or ours)
    results = []
    try:
        for number in range(1, arguments.starts + 1):
            results.append(measure_start(arguments.model, ours, arguments.streams, arguments.tokens))
            report(
                f"event=measured start={number} " + " ".join(f"{key}={value:.2f}" for key, value in results[-1].items())
            )
    finally:
        os.sched_setaffinity(0, set(all_))
    report(json.dumps({key: _spread([each[key] for each in results]) for key in results[0]}))
    return 0


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {name: round(of(values), 3) for name, of in (("median", statistics.median), ("least", min), ("most", max))}
