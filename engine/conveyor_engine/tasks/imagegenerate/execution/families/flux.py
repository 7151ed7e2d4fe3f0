"""Flux: a pooled prompt from CLIP, hidden states from T5, and a transformer that reads guidance as an input."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from conveyor_engine.execution.transfer import to_device
from conveyor_engine.tasks.imagegenerate.execution.families.family import Inputs, Prompts
from conveyor_engine.tasks.imagegenerate.execution.families.flow import Flow
from conveyor_engine.tasks.imagegenerate.facts import Size

_SAMPLE = 128  # diffusers' pipeline assumes latents of this side, because the transformer's settings have no size


class Flux(Flow):
    """The transformer reads patches of 2 x 2 latents, with their positions."""

    @property
    def patch(self) -> int:
        return 2

    @property
    def size(self) -> Size:
        return Size(_SAMPLE * self.factor, _SAMPLE * self.factor)

    @property
    def num_channels(self) -> tuple[int, int]:
        config = self.parts.denoiser.config
        return config.in_channels // self.patch**2, (config.out_channels or config.in_channels) // self.patch**2

    def choose_sigmas(self, num_inference_steps: int) -> list[float] | None:
        if self.parts.scheduler.config.get("use_flow_sigmas"):
            return None
        sigmas: list[float] = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps).tolist()
        return sigmas

    def read_prompts(self, tokens: Sequence[torch.Tensor]) -> Prompts:
        clip, t5 = self.parts.text_encoders
        return Prompts(t5(tokens[1])[0], clip(tokens[0]).pooler_output)

    def predict(self, inputs: Inputs) -> torch.Tensor:
        rows, channels, height, width = inputs.sample.shape
        down, across, side = height // self.patch, width // self.patch, self.patch
        patches = inputs.sample.view(rows, channels, down, side, across, side).permute(0, 2, 4, 1, 3, 5)
        hidden, pooled = inputs.prompts
        predicted: torch.Tensor = self.parts.denoiser(
            hidden_states=patches.reshape(rows, down * across, channels * side**2),
            timestep=inputs.timesteps / 1000,
            guidance=inputs.guidance if self.parts.denoiser.config.guidance_embeds else None,
            pooled_projections=pooled,
            encoder_hidden_states=hidden,
            txt_ids=hidden.new_zeros(hidden.shape[1], 3),
            img_ids=to_device(_number_patches(down, across), hidden.device).to(hidden.dtype),
            return_dict=False,
        )[0]
        return (
            predicted.view(rows, down, across, channels, side, side)
            .permute(0, 3, 1, 4, 2, 5)
            .reshape(inputs.sample.shape)
        )


def _number_patches(down: int, across: int) -> npt.NDArray[np.float32]:
    """Return the position of each patch: (patches, 3), with zero, row and column."""
    places = np.stack(np.meshgrid(0, np.arange(down), np.arange(across), indexing="ij"), axis=-1)
    return places.reshape(-1, 3).astype(np.float32)
