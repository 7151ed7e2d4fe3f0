"""Runs a tiny forward to check that a model calls our attention, and to find the shape of the heads in each layer.

Called by the runners after loading. `trial` and `native_layers` use `run_forward` for their own forwards.
"""

import torch
from transformers import PreTrainedModel

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.attention.backend import NO_ATTENTION, LayerShape
from conveyor_engine.execution.attention.interface import Paged, Probe
from conveyor_engine.execution.models import checks
from conveyor_engine.execution.models.quantized.deferred import stand_ins
from conveyor_engine.execution.states import Shapes

_FEED_FORWARD = frozenset({"mlp", "moe"})  # types of layers without a token mixer, in models that have such layers


def probe_layers(model: PreTrainedModel, device: torch.device) -> tuple[list[LayerShape], Shapes]:
    """Return the shapes of layers 0..n-1, and of the states that layers keep for a row. Raises as `run_probe` does."""
    probe = run_probe(model, Probe(), device)
    num_layers = model.config.get_text_config().num_hidden_layers
    return [probe.shapes.get(layer, NO_ATTENTION) for layer in range(num_layers)], probe.states.shapes


def run_probe(model: PreTrainedModel, probe: Probe, device: torch.device) -> Probe:
    """Run the probe and return it.

    Raises ModelError unless each layer calls our attention exactly once. In a model with states, a layer may keep a
    state instead, or be a feed-forward layer.
    """
    name = type(model).__name__
    run_forward(model, torch.arange(2, device=device), probe)
    config = model.config.get_text_config()
    num_layers = config.num_hidden_layers
    others = {key.layer for key in probe.states.shapes}
    if others:
        types = getattr(config, "layer_types", None) or ()
        others |= {layer for layer, kind in enumerate(types) if kind in _FEED_FORWARD}
    wanted = set(range(num_layers))
    is_complete = probe.calls.keys() | others == wanted and set(probe.calls.values()) == {1}
    if not is_complete:
        raise ModelError(
            f"{name} has {num_layers} layers, but called paged attention in layers {sorted(probe.calls)}, "
            f"{sum(probe.calls.values())} times in all: this engine cannot run it"
        )
    return probe


@stand_ins()
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
