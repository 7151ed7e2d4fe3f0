"""Computes the lists of a step as one padded tensor."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.build import Build
from conveyor_engine.execution.placement import Placement
from conveyor_engine.execution.start import Progress
from conveyor_engine.loop.executor import Executor
from conveyor_engine.model_files import read_object
from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.step import StepPlan, StepResult


class SoftmaxModule(torch.nn.Module):
    """Computes probabilities (rows, N) from numbers (rows, N)."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.tensor(temperature), requires_grad=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return torch.softmax(numbers / self.temperature, dim=-1)


class SoftmaxRunner:
    """One module on one device."""

    extra_warmup_tokens = ()
    graph_sizes = ()

    def __init__(self, config: EngineConfig, placement: Placement, progress: Progress) -> None:
        content = read_object(Path(config.model) / "softmax.json")
        self._device = placement.device
        self._module = SoftmaxModule(content["temperature"]).to(placement.device)
        self.facts = ModelFacts(
            task="softmax",
            max_model_len=content["numbers_max"],
            dtype="float32",
            device=str(placement.device),
            attention_backend="none",
            num_kv_blocks=0,
            block_size=config.block_size,
            max_num_seqs=config.choose_num_seqs(),
            max_num_batched_tokens=config.max_num_batched_tokens or 64,
        )
        progress("event=softmax_loaded")

    def begin(self, plan: StepPlan) -> Callable[[object], Callable[[], StepResult]]:
        brought = {row.row: torch.frombuffer(bytearray(row.payload), dtype=torch.float32) for row in plan.admitted}
        rows = [brought[row].to(self._device) for row in plan.rows]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-torch.inf)
        with torch.inference_mode():
            computed = self._module(padded)

        def read() -> StepResult:
            rows = [row[: len(brought[number])].cpu() for number, row in zip(plan.rows, computed, strict=True)]
            payloads = [row.numpy().tobytes() if row.isfinite().all() else b"" for row in rows]
            return StepResult(plan.number, [], payloads=payloads)

        return lambda _: read

    def free_memory(self) -> None:
        pass


TASK: Final[Build[Executor]] = SoftmaxRunner
