"""Compares a single HTTP request for a custom model with a direct call of the model. For the workload `custom`.

`serve` runs a program of torch.export in its own process, with `batching_eager`, and the client keeps one connection.
The peer is the same program, loaded by torch and called in this process. Requests and calls alternate in slices, and
both have one thread. First the answers are compared.
"""

import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import torch
from torch.export import Dim, export, load, save

from conveyor_bench.engine.served import wait_ready
from conveyor_bench.workloads.rounds import Limits
from conveyor_protocol.open_inference import JSON_LENGTH_HEADER

SHAPES: Final = {"mlp-1024": (1024, 4), "tiny": (16, 1)}  # width and hidden layers
_SLICE: Final = 50  # requests or calls in a slice
_READY_SECONDS: Final = 120.0


def write_program(folder: Path, shape: str) -> None:
    """Write a program with random weights (seed 0)."""
    width, layers = SHAPES[shape]
    torch.manual_seed(0)
    blocks = [block for _ in range(layers) for block in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    module = torch.nn.Sequential(*blocks, torch.nn.Linear(width, 8)).eval()
    program = export(module, (torch.zeros(2, width),), dynamic_shapes=({0: Dim("batch", max=1024)},))
    save(program, folder / "model.pt2")


def measure_custom(shape: str, limits: Limits, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure the seconds of a request and of a call. Exits if their results differ."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_program(Path(folder), shape)
        call = load(Path(folder) / "model.pt2").module()
        flags = {"device": "cpu", "port": 0, "host": "127.0.0.1", "num-threads": 1, "served-model-name": "bench"}
        flags |= {"batching-mode": "dynamic", "batching-eager": "true"}
        options = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "conveyor_engine", "serve", "--model", folder, *options]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            try:
                with closing(http.client.HTTPConnection("127.0.0.1", wait_ready(server), timeout=60)) as client:
                    _wait_ready(client)
                    told = _measure(client, call, SHAPES[shape][0], limits, say)
                return told | {"workload": {"model_shape": shape}}
            finally:
                server.terminate()


def _wait_ready(client: http.client.HTTPConnection) -> None:
    end = time.monotonic() + _READY_SECONDS
    while time.monotonic() < end:
        client.request("GET", "/v2/health/ready")
        answer = client.getresponse()
        answer.read()
        if answer.status == 200:
            return
        time.sleep(0.1)
    raise SystemExit("the engine did not get ready")


def _measure(
    client: http.client.HTTPConnection, call: Callable[..., Any], width: int, limits: Limits, say: Callable[[str], None]
) -> dict[str, Any]:
    tensor = torch.randn(1, width)
    data = tensor.numpy().tobytes()
    given = {"name": "input", "shape": [1, width], "datatype": "FP32", "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()

    def ask() -> bytes:
        client.request("POST", "/v2/models/bench/infer", head + data, {JSON_LENGTH_HEADER: str(len(head))})
        answer = client.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise SystemExit(f"the engine answered {answer.status}: {body[:300]!r}")
        return body[int(answer.headers[JSON_LENGTH_HEADER]) :]

    def run() -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = call(tensor)
        return found

    found = torch.frombuffer(bytearray(ask()), dtype=torch.float32)
    if not torch.allclose(found, run()[0], atol=1e-4):
        raise SystemExit("the engine's numbers differ from those of the program")
    say("event=outputs_equal dtype=float32: same as the program's own")
    seconds: dict[str, list[float]] = {"engine": [], "direct": []}
    end = time.monotonic() + limits.budget_seconds
    for number in range(limits.rounds):
        for name, work in (("engine", ask), ("direct", run)):
            taken = [_time(work) for _ in range(_SLICE)]
            if number:  # the first round warms up
                seconds[name] += taken
        if time.monotonic() > end:
            break
    told = {name: {"p50": median(taken), "p95": quantiles(taken, n=20)[-1]} for name, taken in seconds.items() if taken}
    added = (told["engine"]["p50"] - told["direct"]["p50"]) * 1000
    say(f"event=measured requests={len(seconds['engine'])} added_p50_ms={added:.3f}")
    return {"seconds": told, "added_p50_milliseconds": round(added, 3), "requests": len(seconds["engine"])}


def _time(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
