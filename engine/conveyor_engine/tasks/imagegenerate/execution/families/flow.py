"""What the families of flow models have in common: a transformer that reads patches, and one scheduler."""

from typing import Any

import torch

from conveyor_engine.errors import ModelError
from conveyor_engine.tasks.imagegenerate.execution.families.family import Family
from conveyor_engine.tasks.imagegenerate.facts import SIDE_MULTIPLE, Size


class Flow(Family):
    """Latents are a mix of picture and noise, and the transformer predicts the way from one to the other."""

    @property
    def patch(self) -> int:
        """The side of the patches of latents that the transformer reads."""
        return int(self.parts.denoiser.config.patch_size)

    @property
    def multiple(self) -> int:
        return max(SIDE_MULTIPLE, self.factor * self.patch)

    def copy_scheduler(self, num_inference_steps: int, size: Size) -> Any:
        scheduler = type(self.parts.scheduler).from_config(self.parts.scheduler.config)
        shift = self._find_shift(size) if scheduler.config.use_dynamic_shifting else None
        scheduler.set_timesteps(num_inference_steps, sigmas=self.choose_sigmas(num_inference_steps), mu=shift)
        return scheduler

    def choose_sigmas(self, num_inference_steps: int) -> list[float] | None:
        """Return the noise in each step before it is shifted; None: the scheduler's own."""
        return None

    def _find_shift(self, size: Size) -> float:
        """Return how far timesteps are shifted towards noise, which grows with the number of patches."""
        config, side = self.parts.scheduler.config, self.factor * self.patch
        patches = (size.width // side) * (size.height // side)
        slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
        return float(config.base_shift + slope * (patches - config.base_image_seq_len))

    def check_parts(self) -> None:
        super().check_parts()
        if self.parts.vae.config.shift_factor is None:
            raise ModelError("the VAE has no shift_factor")

    def add_noise(self, scheduler: Any, latents: torch.Tensor, noise: torch.Tensor, num_skipped: int) -> torch.Tensor:
        scheduler.set_begin_index(num_skipped)
        noised: torch.Tensor = scheduler.scale_noise(latents, scheduler.timesteps[num_skipped : num_skipped + 1], noise)
        return noised

    def scale(self, latents: torch.Tensor) -> torch.Tensor:
        return super().scale(latents - self.parts.vae.config.shift_factor)

    def unscale(self, latents: torch.Tensor) -> torch.Tensor:
        unscaled: torch.Tensor = super().unscale(latents) + self.parts.vae.config.shift_factor
        return unscaled
