"""Layers with states, with the shapes of real models, on CUDA tensors without numbers, and steps for them.

As in `cuda_layers`: the caller decides what a launch does. Call this in a FakeTensorMode.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tests.engine.execution.kernels.cuda_layers import CUDA, SHAPES, STEPS, Step, make_paged
from torch import nn
from transformers import AutoConfig
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer, compute_mup_vector
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from conveyor_engine.execution.models.mixers import carry_states
from conveyor_engine.execution.models.state_mixers import (
    GatedDeltaNet,
    GroupedGatedDeltaNet,
    Mamba2,
    ShortConv,
    SplitGatedDeltaNet,
    StateMixer,
    find_shapes,
    output_of,
)
from conveyor_engine.execution.states import States

OF_MIXERS = {
    "decodes": STEPS["decodes"],
    "a chunk of a prompt": STEPS["a chunk of a prompt"],
    "both": Step((*((1, 200),) * 8, (500, 900), (20, 20))),
    "other decodes": Step(((1, 200),) * 3),
    "other prompts": Step(((1, 7), (5, 9), (20, 20), (333, 334))),
}


@dataclass(frozen=True)
class Mixer:
    """A layer that keeps a state for each row: transformers' class for it and its configuration, and ours."""

    theirs: type[nn.Module]
    ours: type[StateMixer]
    model_type: str
    sizes: dict[str, Any]

    def make(self, dtype: torch.dtype) -> nn.Module:
        """Make transformers' module, with the states of rows."""
        config = AutoConfig.for_model(self.model_type, **({"num_hidden_layers": 1} | self.sizes))
        with torch.device(CUDA):
            mixer: nn.Module = self.theirs(config, layer_idx=0)
            if isinstance(mixer, FalconH1Mixer):  # as its model does
                mixer.register_buffer("mup_vector", compute_mup_vector(config).to(dtype))
        for part in mixer.modules():
            for name, tensor in part.named_parameters(recurse=False):
                setattr(part, name, nn.Parameter(tensor.to(dtype), requires_grad=False))
        carry_states(mixer)
        return mixer


MIXERS = {
    "LFM2-1.2B": Mixer(Lfm2ShortConv, ShortConv, "lfm2", {"hidden_size": 2048, "layer_types": ["conv"]}),
    "Nemotron-H-8B": Mixer(
        NemotronHMamba2Mixer,
        Mamba2,
        "nemotron_h",
        {
            "hidden_size": 4096,
            "layers_block_type": ["mamba"],
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
        },
    ),
    "Nemotron-H-47B": Mixer(
        NemotronHMamba2Mixer,
        Mamba2,
        "nemotron_h",
        {
            "hidden_size": 8192,
            "layers_block_type": ["mamba"],
            "mamba_num_heads": 256,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 256,
        },
    ),
    "Granite-4.0-H": Mixer(
        GraniteMoeHybridMambaLayer,
        Mamba2,
        "granitemoehybrid",
        {
            "hidden_size": 4096,
            "layer_types": ["mamba"],
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 128,
        },
    ),
    "Qwen3.6-35B": Mixer(
        Qwen3_5GatedDeltaNet,
        GatedDeltaNet,
        "qwen3_5_text",
        {
            "hidden_size": 2048,
            "layer_types": ["linear_attention"],
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "Qwen3-Coder-Next": Mixer(
        Qwen3NextGatedDeltaNet,
        GroupedGatedDeltaNet,
        "qwen3_next",
        {
            "hidden_size": 2048,
            "layer_types": ["linear_attention"],
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "Falcon-H1-7B": Mixer(
        FalconH1Mixer,
        Mamba2,
        "falcon_h1",
        {
            "hidden_size": 3072,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 24,
            "mamba_d_state": 256,
            "ssm_in_multiplier": 1.25,
        },
    ),
    "OLMo-hybrid-7B": Mixer(  # heads of 96 and 192
        OlmoHybridGatedDeltaNet, SplitGatedDeltaNet, "olmo_hybrid", {"num_hidden_layers": 2}
    ),
}
FEW_MIXERS = tuple(name for name in MIXERS if name not in ("Falcon-H1-7B", "OLMo-hybrid-7B"))  # for CI


def prepare_mixer(
    name: str, step: Step, dtype: torch.dtype = torch.bfloat16, *, theirs: bool = False
) -> Callable[[], object]:
    """Return the call of a layer with states; theirs: in transformers' code."""
    mixer = MIXERS[name].make(dtype)
    shapes = find_shapes(mixer)
    paged = make_paged(SHAPES["Llama-3.2-1B"], step)
    paged.token_rows = torch.empty(paged.metadata.num_tokens, dtype=torch.int64, device=CUDA)
    paged.states = States.allocate(shapes, len(step.rows), CUDA)
    hidden = mixer.get_submodule(output_of(mixer)).out_features
    assert isinstance(hidden, int)
    x = torch.empty((1, paged.metadata.num_tokens, hidden), dtype=dtype, device=CUDA)
    return partial(mixer if theirs else MIXERS[name].ours(mixer, shapes), x, paged=paged)
