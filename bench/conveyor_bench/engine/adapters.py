"""`python -m conveyor_bench adapters`: tokens per second of rows that use LoRA adapters, and of rows that use none.

In each round, the same rows run in turns without adapters, all with one adapter, and spread over all adapters, on a
model with random weights. The medians of the rounds' ratios show the cost of adapters. With `--compare peft`, PEFT runs
the same model, adapters and rows in the same rounds. The last line printed is one JSON object.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from conveyor_bench.comparing.shapes import SHAPES
from conveyor_bench.comparing.systems import write_model
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.build import build_runner
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.wire.request import EngineRequest, SamplingParams

Measure = Callable[[Sequence[int], int], tuple[float, float]]
"""(the adapter of each row, a serial number) -> (tokens per second of prompts, of answers)"""


def write_adapters(model: Path, folder: Path, number: int, rank: int) -> list[tuple[str, str]]:
    """Write random adapters of all linear layers but the head, in PEFT's format. Returns their names and folders."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    linears = {name: part for name, part in skeleton.named_modules() if isinstance(part, nn.Linear)}
    del linears["lm_head"]
    sources = []
    for adapter in range(1, number + 1):
        tensors = {}
        for name, linear in linears.items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, linear.in_features) / 100
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(linear.out_features, rank) / 100
        target = folder / f"a{adapter}"
        target.mkdir()
        save_file(tensors, target / "adapter_model.safetensors")
        targets = sorted({name.rpartition(".")[2] for name in linears})
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
        (target / "adapter_config.json").write_text(json.dumps(config | {"target_modules": targets}))
        sources.append((target.name, str(target)))
    return sources


class Engine:
    """This project's engine."""

    def __init__(self, model: Path, sources: Sequence[tuple[str, str]], rows: int, sizes: tuple[int, int], dtype: str):
        """sizes: tokens of a prompt and of an answer."""
        self._prompt_tokens, self._tokens = sizes
        config = EngineConfig(
            model=str(model),
            adapters=tuple(sources),
            device="cpu",
            dtype=dtype,  # type: ignore[arg-type]  # argparse has checked it
            max_model_len=sum(sizes),
            max_num_seqs=rows,
            prefix_caching=False,
            num_threads=torch.get_num_threads(),
        )
        self._core = EngineCore(config, build_runner(config))

    def measure(self, adapters: Sequence[int], serial: int) -> tuple[float, float]:
        core, random = self._core, Random(serial)
        for row, adapter in enumerate(adapters):
            prompt = [random.randrange(256) for _ in range(self._prompt_tokens)]
            params = SamplingParams(max_tokens=self._tokens, temperature=0.0, ignore_eos=True)
            core.add_request(
                EngineRequest(request_id=f"{serial}-{row}", prompt_token_ids=prompt, params=params, adapter=adapter)
            )
        begun, num_tokens, started, first = set[str](), 0, time.perf_counter(), 0.0
        while core.has_unfinished():
            outputs = core.step(time.monotonic())
            if first:
                num_tokens += sum(len(output.new_token_ids) for output in outputs)
            begun |= {output.request_id for output in outputs if output.new_token_ids}
            if not first and len(begun) == len(adapters):
                first = time.perf_counter()
            if failed := next((output for output in outputs if output.has_failed), None):
                raise RuntimeError(f"request {failed.request_id} ended with {failed.finish_reason}: {failed.message}")
        return len(adapters) * self._prompt_tokens / (first - started), num_tokens / (time.perf_counter() - first)


class Peft:
    """PEFT on transformers: one batch, in which each row names its adapter."""

    def __init__(self, model: Path, sources: Sequence[tuple[str, str]], sizes: tuple[int, int], dtype: str) -> None:
        from peft import PeftModel

        self._prompt_tokens, self._tokens = sizes
        base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        (first, folder), *others = sources
        self._model = PeftModel.from_pretrained(base, folder, adapter_name=first)
        for name, folder in others:
            self._model.load_adapter(folder, adapter_name=name)
        self._names = ["__base__", *(name for name, _ in sources)]
        self._model.eval()

    def measure(self, adapters: Sequence[int], serial: int) -> tuple[float, float]:
        random = Random(serial)
        prompts = torch.tensor([[random.randrange(256) for _ in range(self._prompt_tokens)] for _ in adapters])
        seconds = []
        for tokens in (1, self._tokens):
            started = time.perf_counter()
            with torch.inference_mode():
                self._model.generate(  # type: ignore[no-untyped-call]
                    input_ids=prompts,
                    attention_mask=torch.ones_like(prompts),
                    adapter_names=[self._names[adapter] for adapter in adapters],
                    min_new_tokens=tokens,
                    max_new_tokens=tokens,
                    do_sample=False,
                )
            seconds.append(time.perf_counter() - started)
        first, whole = seconds
        return prompts.numel() / first, len(adapters) * (self._tokens - 1) / (whole - first)


def run_rounds(
    systems: dict[str, Measure], cases: dict[str, list[int]], rounds: int, report: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Return, for each system, the median rates of the first case, and the other cases' median ratios to it."""
    serials = itertools.count()
    rates: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in systems}
    for number in range(rounds + 1):
        for name, measure in systems.items():
            order = list(cases) if number % 2 else list(reversed(cases))
            found = {case: measure(cases[case], next(serials)) for case in order}
            if number:  # the first round warms up
                rates[name].append(found)
                report(
                    f"event=measured system={name} "
                    + " ".join(f"{case}={found[case][0]:.1f},{found[case][1]:.1f}" for case in cases)
                    + " unit=tokens_per_second_of_prompts_and_answers"
                )
    base, *others = cases
    results: dict[str, dict[str, Any]] = {}
    for name, of_rounds in rates.items():
        result = results[name] = {}
        for index, what in enumerate(("prompt", "answer")):
            result[f"{what}_tokens_per_second"] = round(statistics.median(each[base][index] for each in of_rounds), 1)
            for case in others:
                ratios = [each[case][index] / each[base][index] for each in of_rounds]
                result[f"{what}_{case}_of_{base}"] = round(statistics.median(ratios), 3)
    return results


def main(argv: Sequence[str]) -> int:
    """Entry point of the command `adapters`."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench adapters", description=__doc__)
    parser.add_argument("--model-shape", choices=SHAPES, default="qwen3-0.6b", help="the model's sizes")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of its weights")
    parser.add_argument("--adapters", type=int, default=8, help="number of adapters")
    parser.add_argument("--rank", type=int, default=16, help="of each adapter")
    parser.add_argument("--rows", type=int, default=16, help="requests at once")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5, help="each measures all cases")
    parser.add_argument("--compare", choices=("peft",), help="measure this system too, in turns")
    arguments = parser.parse_args(argv)
    for name, least in (("adapters", 1), ("rank", 1), ("rows", 1), ("prompt_tokens", 1), ("tokens", 2), ("rounds", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    rows, sizes, dtype = arguments.rows, (arguments.prompt_tokens, arguments.tokens), arguments.dtype
    cases = {
        "base": [0] * rows,
        "one": [1] * rows,
        "mixed": [row % (arguments.adapters + 1) for row in range(rows)],
    }
    report = partial(print, flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        folder.mkdir()
        write_model(folder, arguments.model_shape, getattr(torch, dtype))
        sources = write_adapters(folder, Path(name), arguments.adapters, arguments.rank)
        systems: dict[str, Measure] = {"conveyor": Engine(folder, sources, rows, sizes, dtype).measure}
        if arguments.compare:
            systems["peft"] = Peft(folder, sources, sizes, dtype).measure
        results = run_rounds(systems, cases, arguments.rounds, report)
    options = {key: value for key, value in vars(arguments).items() if key != "compare"}
    report(json.dumps(results | options))
    return 0
