"""`python -m conveyor_bench waits`: how long a request waits behind another client's request with many inputs.

One case embeds a text behind a request with thousands of inputs. The other generates text behind a request with many
choices. Each case has a tiny model of random weights. The command measures the seconds until the vector or the first
token, and how many engine requests ended in that time. It also measures the seconds with an idle engine. The last line
printed is one JSON object.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random

import torch
from transformers import AutoModel, BertConfig

from conveyor_bench.comparing.shapes import SHAPES
from conveyor_bench.comparing.systems import write_model
from conveyor_engine.config.engine_config import BatchingMode, EngineConfig
from conveyor_engine.execution.build import build_runner
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.embed.facts import PoolingParams
from conveyor_engine.wire.messages import Add
from conveyor_engine.wire.request import EngineRequest, SamplingParams

_VOCABULARY = SHAPES["tiny"]["vocab_size"]
_PROMPT_TOKENS = 32
_OUTPUT_TOKENS = 32
_STEPS_BEFORE = 2
EMBEDDING_MODES: tuple[BatchingMode, ...] = ("continuous", "dynamic")


def write_encoder(folder: Path) -> None:
    """Write a BERT with random weights (seed 0)."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    AutoModel.from_config(config).save_pretrained(folder)


def open_core(folder: Path, mode: BatchingMode, num_requests: int) -> EngineCore:
    """Return an engine for the model in the folder, with a queue of this size."""
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        max_model_len=_PROMPT_TOKENS + _OUTPUT_TOKENS,
        batching_mode=mode,
        max_num_queued_requests=num_requests,
        num_threads=torch.get_num_threads(),
    )
    return EngineCore(config, build_runner(config))


def ask(
    name: str, num_prompts: int, num_choices: int, params: SamplingParams | None = None, payload: bytes = b""
) -> Add:
    """Return the engine requests of one HTTP request."""
    random = Random(name)
    prompts = [[random.randrange(_VOCABULARY) for _ in range(_PROMPT_TOKENS)] for _ in range(num_prompts)]
    return Add.of(
        [
            EngineRequest(
                request_id=f"{name}-{prompt}-{choice}", prompt_token_ids=token_ids, params=params, payload=payload
            )
            for prompt, token_ids in enumerate(prompts)
            for choice in range(num_choices)
        ]
    )


def measure_wait(core: EngineCore, many: Add, one: Add) -> dict[str, float]:
    """Measure `one` alone, and when it arrives after some steps of `many`. All requests run to their ends."""
    alone, _ = _wait_for(core, one)
    _finish(core)
    _send(core, many)
    for _ in range(_STEPS_BEFORE):
        core.step(time.monotonic())
    seconds, num_before = _wait_for(core, one)
    _finish(core)
    return {"alone_seconds": round(alone, 3), "wait_seconds": round(seconds, 3), "ended_before": num_before}


def _send(core: EngineCore, add: Add) -> list[str]:
    """Add the requests as the engine process does."""
    requests = add.requests(time.monotonic())
    for request in requests:
        core.add_request(request)
    return [request.request_id for request in requests]


def _wait_for(core: EngineCore, add: Add) -> tuple[float, int]:
    """Return the seconds until the first output of the request, and how many requests ended before it."""
    started = time.monotonic()
    (name,) = _send(core, add)
    num_ended = 0
    for request_id, has_ended in _ends(core):
        if request_id == name:
            break
        num_ended += has_ended
    return time.monotonic() - started, num_ended


def _ends(core: EngineCore) -> Iterator[tuple[str, bool]]:
    while core.has_unfinished():
        for output in core.step(time.monotonic()):
            yield output.request_id, output.finish_reason is not None


def _finish(core: EngineCore) -> None:
    for _ in _ends(core):
        pass


def measure_waits(inputs: int, choices: int, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Measure all cases. Returns the results by the kind of the long request and the batching mode."""
    results: dict[str, dict[str, float]] = {}

    def measure(what: str, folder: Path, mode: BatchingMode, many: Add, one: Add) -> None:
        num_requests = sum(len(prompt.choices) for prompt in many.prompts)
        results[f"{what} {mode}"] = figures = measure_wait(open_core(folder, mode, num_requests), many, one)
        say(f"event=measured behind={what} mode={mode} " + " ".join(f"{key}={value}" for key, value in figures.items()))

    with tempfile.TemporaryDirectory() as folder:
        write_encoder(Path(folder))
        for mode in EMBEDDING_MODES:
            many, one = (
                ask(name, n, 1, payload=PoolingParams().encode()) for name, n in (("many", inputs), ("one", 1))
            )
            measure("inputs", Path(folder), mode, many, one)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), "tiny", torch.float32)
        sampling = SamplingParams(max_tokens=_OUTPUT_TOKENS, ignore_eos=True)
        measure("choices", Path(folder), "continuous", ask("many", 1, choices, sampling), ask("one", 1, 1, sampling))
    return results


def main(argv: Sequence[str]) -> int:
    """Entry point of the command `waits`."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench waits", description=__doc__)
    parser.add_argument("--inputs", type=int, default=4000, help="texts of the request to embed")
    parser.add_argument("--choices", type=int, default=128, help="`n` of the request to generate")
    arguments = parser.parse_args(argv)
    for name in ("inputs", "choices"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1")
    say = partial(print, flush=True)
    say(json.dumps(measure_waits(arguments.inputs, arguments.choices, say)))
    return 0
