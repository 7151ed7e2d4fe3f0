"""Runs the steps of a custom model. Items are joined to batches, and each item gets its outputs or its own error."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import torch

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.config.kinds import MAX_TOKENS
from conveyor_engine.errors import ConfigError, ModelError, StartError, is_out_of_memory, one_line
from conveyor_engine.execution.limits import dtype_name
from conveyor_engine.execution.models.checks import raise_if_of_device
from conveyor_engine.execution.placement import Placement
from conveyor_engine.execution.runners.base import Runner
from conveyor_engine.execution.start import Progress
from conveyor_engine.tasks.custom.execution.batches import Batches, Item
from conveyor_engine.tasks.custom.execution.exported import ExportedProgram
from conveyor_engine.tasks.custom.execution.python import PythonProgram
from conveyor_engine.tasks.custom.facts import CustomFacts, encode_failure, encode_outputs
from conveyor_engine.tasks.custom.model import Batch, Batching
from conveyor_engine.tasks.custom.scheduling import build_item, count_elements
from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.step import StepPlan, StepResult
from conveyor_engine.wire.tensors import Signature, decode_tensors

_SENTENCE_CHARACTERS: Final = 300
_log = logging.getLogger(__name__)


class CustomProgram(Protocol):
    """A loaded model."""

    signature: Signature
    batching: Batching
    made_types: dict[str, torch.dtype]  # types of the inputs that the engine creates
    max_batch: int  # the most items that a batch may have; if packed, the largest sum of their lengths

    @property
    def dtype(self) -> torch.dtype: ...

    def run(self, batch: Batch) -> Batch:
        """Compute all outputs of a batch. Raises whatever the model raises."""
        ...


class CustomRunner(Runner):
    """One model on one device, ready to run after construction, which has already run the largest batch."""

    def __init__(self, config: EngineConfig, placement: Placement, progress: Progress) -> None:
        """Load the model and run its largest batch. Raises ConfigError or ModelError."""
        self.device = placement.device
        progress(f"event=model_loading path={config.model} device={self.device} task=custom")
        self._program = _load(config, self.device)
        dtype = dtype_name(self._program.dtype)
        if config.dtype not in ("auto", dtype):
            raise ConfigError(f"`dtype: {config.dtype}` is set, and the model computes in {dtype}; use `dtype: auto`")
        signature, batching = self._program.signature, self._program.batching
        self._batches = Batches(signature, batching, self._program.made_types, self.device)
        self.facts = _describe(config, self._program, self.device)
        for spec in (*signature.inputs, *signature.outputs):
            kind = "input" if spec in signature.inputs else "output"
            shape = "x".join(map(str, ("batch", *spec.shape)))
            progress(f"event=tensor_found kind={kind} name={spec.name} datatype={spec.datatype} shape={shape}")
        self._try_largest()
        progress(f"event=model_loaded ragged={batching.ragged} item_elements={self.facts.max_model_len}")

    def begin(self, plan: StepPlan) -> Callable[[object], Callable[[], StepResult]]:
        """Compute the items of the plan. Raises the device's errors."""
        brought = {row.row: row.payload for row in plan.admitted}
        items = [decode_tensors(brought[row]) for row in plan.rows]
        payloads = [b""] * len(items)
        with torch.inference_mode():
            for group in self._batches.group(items):
                for index, payload in zip(group, self._compute([items[index] for index in group]), strict=True):
                    payloads[index] = payload
        return lambda _: lambda: StepResult(plan.number, [], payloads=payloads)

    def _compute(self, items: list[Item]) -> list[bytes]:
        """Compute the payload of each item.

        If the model raises an error, each half of the items is tried again, so that only the items that cause the error
        fail.
        """
        try:
            return self._run(items)
        except Exception as error:  # a model may raise anything, and the other items continue
            raise_if_of_device(error)
            if len(items) == 1:
                _log.exception("event=item_failed")
                return [encode_failure(f"the model cannot compute this item: {describe(error)}")]
        middle = len(items) // 2
        return self._compute(items[:middle]) + self._compute(items[middle:])

    def _run(self, items: list[Item]) -> list[bytes]:
        computed = self._program.run(self._batches.join(items))
        return list(map(encode_outputs, self._batches.split(computed, items)))

    def _try_largest(self) -> None:
        """Run the largest batch. Raises ModelError if the model cannot compute it."""
        facts, signature = self.facts, self._program.signature
        item = build_item(signature, max(1, facts.max_num_batched_tokens // facts.max_num_seqs))
        try:
            with torch.inference_mode():
                self._run([item] * facts.max_num_seqs)
        except Exception as error:
            raise_if_of_device(error)
            raise ModelError(
                f"the model cannot compute its largest batch, {facts.max_num_seqs} items of zeros: {describe(error)}"
            ) from error


def describe(error: Exception) -> str:
    """Return the error on one line, with at most `_SENTENCE_CHARACTERS` characters."""
    return one_line(f"{type(error).__name__}: {error}")[:_SENTENCE_CHARACTERS]


def _load(config: EngineConfig, device: torch.device) -> CustomProgram:
    directory, longest = Path(config.model), config.max_model_len
    try:
        if config.model_class is not None:
            return PythonProgram(config.model_class, directory, device, longest)
        return ExportedProgram(directory, device, longest)
    except StartError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"the model in {config.model} cannot be loaded: {describe(error)}") from error


def _describe(config: EngineConfig, program: CustomProgram, device: torch.device) -> ModelFacts:
    signature, packs = program.signature, program.batching.ragged == "pack"
    longest = max((most for _, most in signature.lengths.values()), default=1)
    largest = max(1, count_elements(signature, longest))
    if largest > MAX_TOKENS:
        raise ConfigError(
            f"the largest item has {largest} elements, more than {MAX_TOKENS}; lower `max_model_len`, the limit of "
            "lengths that vary"
        )
    max_num_seqs = config.choose_num_seqs()
    needed = max_num_seqs * longest if packs else max_num_seqs
    if needed > program.max_batch:
        what = f"{max_num_seqs} items of length {longest}" if packs else f"{max_num_seqs} items"
        raise ConfigError(
            f"the model takes batches of at most {program.max_batch}, and `max_num_seqs` allows {what}; lower it, or "
            "export the program with a larger torch.export.Dim(..., max=...)"
        )
    return ModelFacts(
        task="custom",
        max_model_len=largest,
        dtype=dtype_name(program.dtype),
        device=str(device),
        attention_backend="none",
        num_kv_blocks=0,
        block_size=config.block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or min(MAX_TOKENS, max_num_seqs * largest),
        of_task=CustomFacts(signature, packs=program.batching.ragged != "pad").encode(),
    )
