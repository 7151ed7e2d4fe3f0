"""`python -m conveyor_bench batches`: the time that length grouping and `eager` save.

Grouping: one engine in mode Static, with padding, runs a backlog of prompts with mixed lengths, in turns with
`length_grouping` auto and off. Eager: an idle engine in mode Dynamic gets one request at a time, with and without
`batching_eager`. There is a model for each of the tasks `embed`, `rerank` and `classify`. The time goes from the
engine's queue to the result, without HTTP. Models have random weights. The last line is one JSON object.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, BertConfig

from conveyor_bench.comparing.shapes import SHAPES
from conveyor_bench.comparing.systems import write_model
from conveyor_bench.engine.waits import write_encoder
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.build import build_runner
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.tasks.embed.facts import PoolingParams
from conveyor_engine.wire.request import EngineRequest, SamplingParams

_MEDIAN_TOKENS, _SPREAD, _LONGEST = 64, 1.0, 512  # tokens of prompts: log-normal, cut at the longest
_OUTPUT_TOKENS = 16
_ROWS = 16
_TEXT_TOKENS = 32
_LABELS = {"rerank": 1, "classify": 8}


def draw_prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Return random prompts. They are the same each time."""
    random = Random(0)
    lengths = [min(_LONGEST, max(1, round(random.lognormvariate(0, _SPREAD) * _MEDIAN_TOKENS))) for _ in range(count)]
    return [[random.randrange(vocabulary) for _ in range(length)] for length in lengths]


def measure_grouping(count: int, rounds: int, shape: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure the seconds of the backlog and the padding's share of all tokens, with grouping and without.

    Returns medians over the rounds.
    """
    prompts = draw_prompts(count, SHAPES[shape]["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape, torch.bfloat16)
        config = EngineConfig(
            model=folder, device="cpu", max_model_len=_LONGEST + _OUTPUT_TOKENS, batching_mode="static",
            max_num_seqs=_ROWS, max_num_queued_requests=count, num_threads=torch.get_num_threads(),
            num_kv_blocks=_ROWS * (_LONGEST + _OUTPUT_TOKENS) // 16,
        )  # fmt: skip
        core = EngineCore(config, build_runner(config))
    seconds: dict[str, list[float]] = {"auto": [], "off": []}
    padding: dict[str, float] = {}
    for number in range(rounds):
        for grouping in ("auto", "off"):
            core.scheduler = Scheduler(replace(config, length_grouping=grouping), core.facts)
            taken, padding[grouping] = _run_backlog(core, prompts)
            seconds[grouping].append(taken)
            say(
                f"event=measured round={number} grouping={grouping} seconds={taken:.2f} padding={padding[grouping]:.3f}"
            )
    ratios = [off / auto for auto, off in zip(seconds["auto"], seconds["off"], strict=True)]
    return {
        "requests": count,
        "seconds": {name: round(statistics.median(each), 2) for name, each in seconds.items()},
        "padding_share": {name: round(share, 3) for name, share in padding.items()},
        "throughput_ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
    }


def _run_backlog(core: EngineCore, prompts: list[list[int]]) -> tuple[float, float]:
    """Run the backlog. Returns its seconds and the padding's share of all tokens."""
    params = SamplingParams(max_tokens=_OUTPUT_TOKENS, ignore_eos=True, temperature=0.0)
    for number, prompt in enumerate(prompts):
        core.add_request(EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params))
    core.drain()  # so that the last batch does not wait for its window
    started, num_tokens = time.monotonic(), 0
    while core.has_unfinished():
        core.step(time.monotonic())
        num_tokens += core.stats().step_num_tokens
    return time.monotonic() - started, core.stats().padding_tokens / num_tokens


def write_classifier(folder: Path, labels: int) -> None:
    """Write a BERT classifier with random weights (seed 0)."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=SHAPES["tiny"]["vocab_size"], hidden_size=128, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_labels=labels,
    )  # fmt: skip
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


def measure_eager(count: int, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Measure the median milliseconds of a request to an idle engine, by task, with the default window and eager."""
    results: dict[str, dict[str, float]] = {}
    for task in ("embed", *_LABELS):
        with tempfile.TemporaryDirectory() as folder:
            if task == "embed":
                write_encoder(Path(folder))
            else:
                write_classifier(Path(folder), _LABELS[task])
            config = EngineConfig(
                model=folder, task=task, device="cpu", dtype="float32", batching_mode="dynamic",
                num_threads=torch.get_num_threads(),
            )  # fmt: skip
            core = EngineCore(config, build_runner(config))
        times: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * count):
            eager = bool(number % 2)
            core.scheduler = Scheduler(replace(config, batching_eager=eager), core.facts)
            times[eager].append(_run_alone(core, PoolingParams().encode() if task == "embed" else b""))
        p50 = {
            name: round(1000 * statistics.median(times[eager]), 2)
            for name, eager in (("window", False), ("eager", True))
        }
        results[task] = p50 | {"ratio": round(p50["window"] / p50["eager"], 2)}
        say(f"event=measured task={task} " + " ".join(f"{key}={value}" for key, value in results[task].items()))
    return results


def _run_alone(core: EngineCore, payload: bytes) -> float:
    """Return the seconds until the result of one request. Sleeps as the engine process does."""
    started = time.monotonic()
    core.add_request(
        EngineRequest(request_id="one", prompt_token_ids=[7] * _TEXT_TOKENS, payload=payload, arrival_time=started)
    )
    while core.has_unfinished():
        wakeup = core.next_wakeup(time.monotonic())
        assert wakeup is not None
        time.sleep(max(0.0, wakeup - time.monotonic()))
        core.step(time.monotonic())
    return time.monotonic() - started


def main(argv: Sequence[str]) -> int:
    """Entry point of the command `batches`."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench batches", description=__doc__)
    parser.add_argument("--requests", type=int, default=192, help="prompts of the backlog")
    parser.add_argument("--rounds", type=int, default=5, help="with grouping and without it, in turns")
    parser.add_argument("--model-shape", choices=SHAPES, default="modes", help="of the model that generates")
    parser.add_argument("--alone", type=int, default=200, help="requests to an idle engine, of each task and policy")
    arguments = parser.parse_args(argv)
    for name in ("requests", "rounds", "alone"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1")
    say = partial(print, flush=True)
    grouping = measure_grouping(arguments.requests, arguments.rounds, arguments.model_shape, say)
    say(json.dumps({"grouping": grouping, "eager": measure_eager(arguments.alone, say)}))
    return 0
