"""Provides a tiny model on disk with transformers' answers to some prompts, and runs the engine with these prompts."""

import copy
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tests.engine.tiny_models import VOCAB_SIZE, greedy, save_tiny_model

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.graphs.cuda import Capture
from conveyor_engine.execution.placement import open_placement
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner
from conveyor_engine.wire.request import EngineRequest, RequestOutput, SamplingParams

MAX_TOKENS = 20
SHARED_PREFIX = 35


class Reference:
    """A model, six prompts of 3 to 50 tokens, two of which share a prefix, and the greedy answers in fp32."""

    def __init__(self, kind: str, directory: Path, **changes: Any) -> None:
        """changes: of the model's configuration."""
        self.directory = directory
        self.model = save_tiny_model(kind, directory, **changes)
        generator = torch.Generator().manual_seed(1)
        lengths = (3, 17, 50, 33, 40, 41)
        self.prompts = [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]
        self.prompts[5][:SHARED_PREFIX] = self.prompts[4][:SHARED_PREFIX]
        self.answers = [greedy(self.model, prompt, MAX_TOKENS) for prompt in self.prompts]

    @cached_property
    def first_log_probs(self) -> dict[torch.dtype, list[torch.Tensor]]:
        """The log probabilities of the token after each prompt, by the dtype of the model: [vocabulary] in float32."""
        models = {torch.float32: self.model, torch.bfloat16: copy.deepcopy(self.model).bfloat16()}
        with torch.inference_mode():
            return {
                dtype: [
                    model(input_ids=torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
                    for prompt in self.prompts
                ]
                for dtype, model in models.items()
            }

    def make_core(
        self,
        *,
        overlap: bool = False,
        capture: Capture | None = None,
        clock: Callable[[], float] = time.monotonic,
        **changes: Any,
    ) -> EngineCore:
        """Make an engine. With `clock=float`, its receipts have no times, so that outputs can be compared."""
        config = self.make_config(**changes)
        runner = GenerateRunner(config, open_placement(config), capture=capture)
        return EngineCore(config, runner, overlap=overlap, clock=clock)

    def make_config(self, **changes: Any) -> EngineConfig:
        """Make an engine's configuration for this model: fp32, four rows, and a budget that splits longer prompts."""
        values: dict[str, Any] = {
            "model": str(self.directory),
            "device": "cpu",
            "dtype": "float32",
            "max_num_seqs": 4,
            "max_num_batched_tokens": 13,
            "max_model_len": 96,
            "num_kv_blocks": 64,
            "attention_backend": "torch",
            "warmup": False,
            "batching_window_seconds": 0.0 if changes.get("batching_mode") in ("static", "dynamic") else None,
        }
        return EngineConfig(**(values | changes))


def add(core: EngineCore, request_id: str, prompt: list[int], adapter: int = 0, **params: Any) -> None:
    sampling = SamplingParams(**({"max_tokens": MAX_TOKENS, "temperature": 0.0} | params))
    core.add_request(EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=sampling, adapter=adapter))


def run(core: EngineCore) -> dict[str, list[RequestOutput]]:
    """Run steps until no request is left. Returns all outputs by request id, in order."""
    outputs: dict[str, list[RequestOutput]] = {}
    while core.has_unfinished():
        for output in core.step(0.0):
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def answers(core: EngineCore, prompts: list[list[int]]) -> list[list[int]]:
    """Return the engine's greedy answers to all prompts, which are sent at once."""
    for number, prompt in enumerate(prompts):
        add(core, str(number), prompt)
    outputs = run(core)
    return [tokens_of(outputs[str(number)]) for number in range(len(prompts))]
