"""Makes engines with tiny models that embed, and prompts with transformers' vectors."""

from pathlib import Path
from random import Random
from typing import Any

import torch
from tests.engine.encoders import CONTEXT_TOKENS, FILES, VOCAB_SIZE, embed, save_encoder, write_sentence_files

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.build import build_runner
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.embed.facts import PoolingParams
from conveyor_engine.wire.request import EngineRequest, FinishReason, RequestOutput

LENGTHS = (1, 9, CONTEXT_TOKENS, 3, 3, 30, 17, 2, 25, 40)
_random = Random(0)
PROMPTS = [[_random.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


class Encoder:
    """A tiny model with its files, and transformers' vectors of all prompts."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.mode, self.normalizes = FILES[kind]
        self.directory = directory
        self.model = save_encoder(kind, directory)
        write_sentence_files(directory, self.mode, normalizes=self.normalizes)
        self.vectors = [embed(self.model, prompt, self.mode, normalizes=self.normalizes) for prompt in PROMPTS]

    def make_core(self, *, overlap: bool = False, **changes: Any) -> EngineCore:
        return make_core(self.directory, overlap=overlap, **changes)


def make_core(directory: Path, *, overlap: bool = False, **changes: Any) -> EngineCore:
    """Make an engine in float32 with four rows. The longest prompt exceeds the budget of a step."""
    values: dict[str, Any] = {
        "model": str(directory),
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 50,
        "warmup": False,
        "batching_window_seconds": 0.0 if changes.get("batching_mode") in ("static", "dynamic") else None,
    }
    config = EngineConfig(**(values | changes))
    return EngineCore(config, build_runner(config), overlap=overlap)


def add(core: EngineCore, name: str, prompt: list[int], arrival: float = 0.0, **params: Any) -> None:
    core.add_request(
        EngineRequest(
            request_id=name, prompt_token_ids=prompt, payload=PoolingParams(**params).encode(), arrival_time=arrival
        )
    )


def run(core: EngineCore) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    while core.has_unfinished():
        for output in core.step(0.0):
            assert outputs.setdefault(output.request_id, output) is output, "one output each"
    return outputs


def answers(core: EngineCore, prompts: list[list[int]]) -> list[torch.Tensor]:
    for number, prompt in enumerate(prompts):
        add(core, str(number), prompt)
    outputs = run(core)
    return [vector_of(outputs[str(number)]) for number in range(len(prompts))]


def vector_of(output: RequestOutput) -> torch.Tensor:
    assert output.finish_reason is FinishReason.STOP
    assert output.payload is not None
    return torch.frombuffer(bytearray(output.payload), dtype=torch.float32)


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Return the largest difference of any component."""
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
