"""The client whose stream an attack may delay: `python -m conveyor_bench.hostile.engine.victim URL`."""

import itertools
import json
import sys
import threading
import time

import httpx

from conveyor_bench.hostile.engine.attacks import COMPLETION


def read_stream(url: str, num_tokens: int) -> list[float]:
    """Return the milliseconds between the events of a stream."""
    body = {"prompt": "hello", "max_tokens": num_tokens, "stream": True, "ignore_eos": True, "seed": 1}
    times = []
    with httpx.stream("POST", url + COMPLETION, json=body, timeout=300) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
    return [1e3 * (b - a) for a, b in itertools.pairwise(times)]


def watch_streams(url: str) -> None:
    """Read streams until the standard input is closed, and then print all gaps.

    Prints a line after the first stream.
    """
    gaps: list[float] = []
    ended = threading.Event()

    def end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=end, daemon=True).start()
    read_stream(url, 2)
    print("streaming", flush=True)
    while not ended.is_set():
        gaps += read_stream(url, 200)
    print(json.dumps(gaps))


if __name__ == "__main__":
    watch_streams(sys.argv[1])
