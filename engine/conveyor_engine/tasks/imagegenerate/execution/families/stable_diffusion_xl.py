"""Stable Diffusion XL: two text encoders, and a UNet that also reads a pooled embedding and the picture's size."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.transfer import to_device
from conveyor_engine.tasks.imagegenerate.execution.families.family import Inputs, Parts, Prompts
from conveyor_engine.tasks.imagegenerate.execution.families.stable_diffusion import StableDiffusion
from conveyor_engine.tasks.imagegenerate.facts import Size
from conveyor_engine.tasks.imagegenerate.layouts import Layout

_TIME_IDS = 6  # original height and width, top and left of the crop, target height and width


class StableDiffusionXL(StableDiffusion):
    """Pictures are made as if they were not cropped, and as if their original size was the requested one."""

    unsupported: ClassVar[tuple[str, ...]] = ("class_embed_type", "encoder_hid_dim_type", "time_cond_proj_dim")

    def __init__(self, layout: Layout, parts: Parts) -> None:
        super().__init__(layout, parts)
        if parts.vae.dtype == torch.float16 and parts.vae.config.force_upcast:
            parts.vae.to(torch.float32)  # in float16 its numbers overflow

    @property
    def zeroes_empty(self) -> bool:
        return bool(self.parts.index.get("force_zeros_for_empty_prompt", True))

    def read_prompts(self, tokens: Sequence[torch.Tensor]) -> Prompts:
        outputs = [
            encoder(each, output_hidden_states=True)
            for encoder, each in zip(self.parts.text_encoders, tokens, strict=True)
        ]
        hidden = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        return Prompts(hidden, outputs[-1].text_embeds)

    def predict(self, inputs: Inputs) -> torch.Tensor:
        hidden, pooled = inputs.prompts
        width, height = inputs.size
        ids = to_device(np.array([height, width, 0, 0, height, width], dtype=np.float32), hidden.device)
        predicted: torch.Tensor = self.parts.denoiser(
            inputs.sample,
            inputs.timesteps,
            encoder_hidden_states=hidden,
            added_cond_kwargs={"text_embeds": pooled, "time_ids": ids.to(hidden.dtype).expand(len(hidden), -1)},
            return_dict=False,
        )[0]
        return predicted

    def copy_scheduler(self, num_inference_steps: int, size: Size) -> Any:
        scheduler = super().copy_scheduler(num_inference_steps, size)
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(0)
        return scheduler

    def scale(self, latents: torch.Tensor) -> torch.Tensor:
        if (moments := self._find_moments(latents)) is None:
            return super().scale(latents)
        mean, std = moments
        scaled: torch.Tensor = (latents - mean) * self.parts.vae.config.scaling_factor / std
        return scaled

    def unscale(self, latents: torch.Tensor) -> torch.Tensor:
        if (moments := self._find_moments(latents)) is None:
            return super().unscale(latents)
        mean, std = moments
        unscaled: torch.Tensor = latents * std / self.parts.vae.config.scaling_factor + mean
        return unscaled

    def _find_moments(self, latents: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the mean and the deviation of latents that the VAE's settings have; None if they have none."""
        numbers = [self.parts.vae.config.get(f"latents_{name}") for name in ("mean", "std")]
        if None in numbers:
            return None
        return [
            to_device(np.array(each, dtype=np.float32), latents.device).to(latents.dtype).view(1, -1, 1, 1)
            for each in numbers
        ]

    def check_parts(self) -> None:
        super().check_parts()
        unet, pooled = self.parts.denoiser.config, self.parts.text_encoders[-1].config.projection_dim
        if unet.addition_embed_type != "text_time":
            raise ModelError(f"the UNet has addition_embed_type {unet.addition_embed_type}; text_time is possible")
        width = pooled + _TIME_IDS * (unet.addition_time_embed_dim or 0)
        if unet.projection_class_embeddings_input_dim != width:
            raise ModelError(
                f"the UNet needs {unet.projection_class_embeddings_input_dim} numbers beside the prompt, but the "
                f"pooled prompt and the size have {width}"
            )
