"""Measures or estimates the memory that the largest step, or the largest image, needs in addition to the weights.

Used by `start` and by runners after the model is loaded.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.models.adapters import AdaptedLinear
from conveyor_engine.execution.models.packed_linear import PackedLinear
from conveyor_protocol.failure_reasons import FailureReason


def measure_step(device: torch.device, size: str, lower: str, run: Callable[[], object]) -> int:
    """Return the bytes that `run`, a step of this size, needs on a GPU.

    size, lower: the step's size and the settings that reduce it, for the error message. Raises ModelError (OutOfMemory)
    if the step does not fit.
    """
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        with torch.inference_mode():
            run()
    except torch.OutOfMemoryError as error:
        raise too_large(size, lower) from error
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return int(peak)


def measure_resident(run: Callable[[], object]) -> int:
    """Return by how many bytes `run` raises the resident memory of this process at its peak. For a CPU."""
    with contextlib.suppress(OSError):  # without this file, what is below an earlier peak is not counted
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins at the present size
    before = _read_status("VmRSS")
    with torch.inference_mode():
        run()
    return max(0, _read_status("VmHWM") - before)


def _read_status(name: str) -> int:
    """Return the bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def estimate_step(model: PreTrainedModel, num_tokens: int, num_logits: int) -> int:
    """Estimate the bytes of a step on a CPU.

    Counts float32 inputs and outputs for two layers of the largest width (the head excluded), the columns of adapters,
    and float32 logits.
    """
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if isinstance(m, PackedLinear | nn.Linear)]
    widest = max((m.in_features + m.out_features for m in linears if m is not head), default=0)
    vocab_size = int(model.get_input_embeddings().num_embeddings)
    columns = max((m.num_reduced for m in model.modules() if isinstance(m, AdaptedLinear)), default=0)
    return 4 * ((2 * widest + 2 * columns) * num_tokens + vocab_size * num_logits)


def too_large(size: str, lower: str) -> ModelError:
    message = f"a step of {size} does not fit beside the weights; lower {lower}"
    return ModelError(message, reason=FailureReason.OUT_OF_MEMORY)
