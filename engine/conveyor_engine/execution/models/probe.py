"""Runs a tiny forward to check that a model calls our attention, and to find the shape of the heads in each layer.

Called by the runners after loading. `trial` and `native_layers` use `run_forward` for their own forwards.
"""

import torch
from transformers import PreTrainedModel

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.attention.backend import LayerShape
from conveyor_engine.execution.attention.interface import Paged, Probe
from conveyor_engine.execution.models import checks


def probe_layers(model: PreTrainedModel, device: torch.device) -> list[LayerShape]:
    """Return the shapes of layers 0..n-1. Raises ModelError unless each layer calls our attention exactly once."""
    probe = run_probe(model, Probe(), device)
    return [probe.shapes[layer] for layer in sorted(probe.shapes)]


def run_probe(model: PreTrainedModel, probe: Probe, device: torch.device) -> Probe:
    """Run the probe and return it. Raises ModelError unless each layer calls our attention exactly once."""
    name = type(model).__name__
    run_forward(model, torch.arange(2, device=device), probe)
    num_layers = model.config.get_text_config().num_hidden_layers
    expected = dict.fromkeys(range(num_layers), 1)
    if probe.calls != expected or not expected:
        raise ModelError(
            f"{name} has {num_layers} layers, but called paged attention in layers {sorted(probe.calls)}, "
            f"{sum(probe.calls.values())} times in all: this engine cannot run it"
        )
    return probe


def run_forward(model: PreTrainedModel, positions: torch.Tensor, paged: Paged) -> None:
    """Run one token at each of these positions (T,) through the model. Raises ModelError if the model fails."""
    try:
        with torch.inference_mode():
            model(
                input_ids=torch.zeros_like(positions)[None],
                position_ids=positions[None],
                use_cache=False,
                paged=paged,
                **({} if model.get_output_embeddings() is None else {"logits_to_keep": positions.new_zeros(1)}),
            )
    except checks.TRANSFORMERS_ERRORS as error:
        checks.raise_if_of_device(error)
        what = f"a forward of {len(positions)} tokens through {type(model).__name__}"
        raise ModelError(f"{what} failed: {checks.on_one_line(error)}") from error
