"""The systems that the command `engine` measures: this engine and its peer, with models of random weights."""

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from conveyor_bench.comparing.held import in_steps
from conveyor_bench.comparing.shapes import model_config
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.placement import open_placement
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner
from conveyor_engine.wire.request import EngineRequest, FinishReason, RequestOutput, SamplingParams

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Greedy requests of one size that arrive together and do not stop early."""

    requests: int
    input_tokens: int
    output_tokens: int


Run = Generator[int, None, Prompts]  # yields after each step how many tokens every request has; returns all tokens


class System(Protocol):
    """A system that continues prompts."""

    def start(self, prompts: Prompts, output_tokens: int) -> Run:
        """Return a run, which works only while the caller requests its next step."""


def generate(system: System, prompts: Prompts, output_tokens: int) -> Prompts:
    """Run the system to the end and return the tokens."""
    run = system.start(prompts, output_tokens)
    while True:
        try:
            next(run)
        except StopIteration as stop:
            outputs: Prompts = stop.value
            return outputs


class Conveyor:
    """This engine, used through EngineCore, with continuous batching and the defaults except for sizes."""

    def __init__(
        self, model: Path, dtype: str, workload: Workload, report: Callable[[str], None], *, overlap: bool = False,
        **settings: Any
    ) -> None:  # fmt: skip
        """settings: other fields of EngineConfig."""
        config = EngineConfig(
            model=str(model),
            device="cpu",
            dtype=dtype,  # type: ignore[arg-type]  # argparse has checked it
            max_model_len=workload.input_tokens + workload.output_tokens,
            max_num_seqs=workload.requests,
            num_threads=torch.get_num_threads(),
            **settings,
        )
        self.runner = GenerateRunner(config, open_placement(config), report)
        self.core = EngineCore(config, self.runner, report, overlap=overlap)
        self._serial = 0

    def start(self, prompts: Prompts, output_tokens: int) -> Run:
        tokens: dict[str, list[int]] = {self.add(prompt, output_tokens): [] for prompt in prompts}
        for outputs in self.steps():
            for output in outputs:
                tokens[output.request_id] += output.new_token_ids
            yield min(map(len, tokens.values()))
        return list(tokens.values())

    def add(self, prompt: list[int], output_tokens: int) -> str:
        """Add a greedy request that does not stop early. Returns its id."""
        self._serial += 1
        self.core.add_request(_request(str(self._serial), prompt, output_tokens))
        return str(self._serial)

    def steps(self) -> Iterator[list[RequestOutput]]:
        """Yield the outputs of each step until all requests have ended. Raises RuntimeError if a request fails."""
        while self.core.has_unfinished():
            outputs = self.core.step(time.monotonic())
            for output in outputs:
                if output.finish_reason not in (None, FinishReason.LENGTH):
                    raise RuntimeError(
                        f"request {output.request_id} ended with {output.finish_reason}: {output.message}"
                    )
            yield outputs


def _request(request_id: str, prompt: list[int], max_tokens: int) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=params, arrival_time=time.monotonic())


class HfStatic:
    """transformers' `generate` on one batch, padded on the left to the longest prompt."""

    def __init__(self, model: Path, dtype: str) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self.model.generation_config.eos_token_id = None

    def start(self, prompts: Prompts, output_tokens: int) -> Run:
        """Return a run with one step for each forward, which gives each request its next token."""
        return in_steps(self.model, lambda: self.generate(prompts, output_tokens))

    def generate(self, prompts: Prompts, output_tokens: int) -> Prompts:
        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = self.model.generate(
                padded, attention_mask=mask, max_new_tokens=output_tokens, do_sample=False, pad_token_id=0
            )
        new: Prompts = out[:, longest:].tolist()
        return new


def write_model(folder: Path, shape: str, dtype: torch.dtype, vocab_size: int | None = None) -> None:
    """Write a model of this shape with random weights (seed 0) to a directory that transformers can load.

    vocab_size: replaces that of the shape.
    """
    torch.manual_seed(0)
    config = model_config(shape)
    config.vocab_size = vocab_size or config.vocab_size
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
