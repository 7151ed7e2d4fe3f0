"""Stable Diffusion 1 and 2: one text encoder and a UNet."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from conveyor_engine.errors import ModelError
from conveyor_engine.tasks.imagegenerate.execution.families.family import Family, Inputs, Prompts
from conveyor_engine.tasks.imagegenerate.facts import Size


class StableDiffusion(Family):
    """A UNet whose cross-attention reads the text encoder's last hidden states."""

    unsupported: ClassVar[tuple[str, ...]] = (  # settings of a UNet that need further inputs
        "addition_embed_type", "class_embed_type", "encoder_hid_dim_type", "time_cond_proj_dim",
    )  # fmt: skip

    def read_prompts(self, tokens: Sequence[torch.Tensor]) -> Prompts:
        hidden = self.parts.text_encoders[0](tokens[0], attention_mask=None)[0]
        return Prompts(hidden, hidden.new_empty(len(hidden), 0))

    def predict(self, inputs: Inputs) -> torch.Tensor:
        predicted: torch.Tensor = self.parts.denoiser(
            inputs.sample, inputs.timesteps, encoder_hidden_states=inputs.prompts.hidden, return_dict=False
        )[0]
        return predicted

    def copy_scheduler(self, num_inference_steps: int, size: Size) -> Any:
        scheduler = type(self.parts.scheduler).from_config(self.parts.scheduler.config)
        scheduler.set_timesteps(num_inference_steps)
        return scheduler

    def scale_noise(self, scheduler: Any, noise: torch.Tensor) -> torch.Tensor:
        latents: torch.Tensor = noise * scheduler.init_noise_sigma
        return latents

    def scale_input(self, scheduler: Any, latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = scheduler.scale_model_input(latents, timestep)
        return scaled

    def check_parts(self) -> None:
        unet, sample = self.parts.denoiser.config, self.parts.denoiser.config.sample_size
        sides = list(sample) if isinstance(sample, list | tuple) and len(sample) == 2 else [sample]
        if any(type(side) is not int for side in sides):
            raise ModelError(
                f"the UNet has sample_size {str(sample)[:40]}; a number or a height and a width is possible"
            )
        for name in self.unsupported:
            if unet.get(name) is not None:
                raise ModelError(f"the UNet has {name} {unet[name]}, which needs an input other than a prompt")
        super().check_parts()
        width = sum(encoder.config.hidden_size for encoder in self.parts.text_encoders)
        if unet.cross_attention_dim != width:
            raise ModelError(
                f"the UNet needs hidden states of width {unet.cross_attention_dim}, but those of the text encoders "
                f"have width {width}"
            )
