"""What all families of models have in common: sizes, schedulers, and the pictures that the VAE decodes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from conveyor_engine.errors import ModelError
from conveyor_engine.tasks.imagegenerate.execution.checking import NUMBER_MAX
from conveyor_engine.tasks.imagegenerate.facts import SIDE_MULTIPLE, STEPS_MAX, Size, find_max_side
from conveyor_engine.tasks.imagegenerate.layouts import Layout


@dataclass(frozen=True, slots=True)
class Parts:
    """The loaded parts of a pipeline."""

    text_encoders: tuple[Any, ...]
    denoiser: Any  # a UNet or a transformer
    vae: Any
    scheduler: Any  # a diffusers scheduler, of which each request gets a copy
    empty_tokens: list[bytes]  # of an empty prompt, for each text encoder
    index: dict[str, Any]  # model_index.json


class Prompts(NamedTuple):
    """What the denoiser reads of prompts."""

    hidden: torch.Tensor  # (prompts, tokens, width)
    pooled: torch.Tensor  # (prompts, width); the width is 0 if the denoiser reads hidden states alone


class Inputs(NamedTuple):
    """The input of one forward pass of the denoiser. All rows have pictures of one size."""

    sample: torch.Tensor  # (rows, channels, height, width)
    timesteps: torch.Tensor  # (rows,) float32
    prompts: Prompts  # one for each row
    guidance: torch.Tensor  # (rows,) float32, for models that read it as an input
    size: Size


class Family(ABC):
    """The parts of a pipeline. A subclass knows how its layout uses them."""

    def __init__(self, layout: Layout, parts: Parts) -> None:
        self.layout = layout
        self.parts = parts

    @property
    def factor(self) -> int:
        """The side of a picture in pixels, divided by the side of its latents."""
        return int(2 ** (len(self.parts.vae.config.block_out_channels) - 1))

    @property
    def multiple(self) -> int:
        """The sides of a picture are multiples of this number of pixels."""
        return max(SIDE_MULTIPLE, self.factor)

    @property
    def size(self) -> Size:
        """The model's own size, which is the size of the pictures on which it was trained."""
        sample = self.parts.denoiser.config.sample_size
        height, width = (sample, sample) if isinstance(sample, int) else sample
        return Size(width * self.factor, height * self.factor)

    @property
    def max_side(self) -> int:
        """The limit on a picture's longer side, in pixels."""
        return find_max_side(self.size)

    @property
    def num_channels(self) -> tuple[int, int]:
        """The latents' channels that the denoiser reads, and those that it makes."""
        config = self.parts.denoiser.config
        return config.in_channels, config.out_channels

    @property
    def zeroes_empty(self) -> bool:
        """Whether a picture without the prompt reads zeros, and not the hidden states of an empty prompt."""
        return False

    @abstractmethod
    def read_prompts(self, tokens: Sequence[torch.Tensor]) -> Prompts:
        """Run the text encoders. tokens: for each text encoder, (prompts, tokens)."""

    @abstractmethod
    def predict(self, inputs: Inputs) -> torch.Tensor:
        """Run the denoiser. Return its prediction, in the shape of the sample."""

    @abstractmethod
    def copy_scheduler(self, num_inference_steps: int, size: Size) -> Any:
        """Return a scheduler for one picture, with its timesteps on the host."""

    def scale_noise(self, scheduler: Any, noise: torch.Tensor) -> torch.Tensor:
        """Return the latents with which a picture begins."""
        return noise

    def add_noise(self, scheduler: Any, latents: torch.Tensor, noise: torch.Tensor, num_skipped: int) -> torch.Tensor:
        """Return the latents with which an edit begins. The scheduler then begins behind the skipped timesteps."""
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(num_skipped)
        noised: torch.Tensor = scheduler.add_noise(latents, noise, scheduler.timesteps[num_skipped : num_skipped + 1])
        return noised

    def scale_input(self, scheduler: Any, latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        """Return the latents as the denoiser reads them."""
        return latents

    def count_forwards(self) -> list[int]:
        """Return how many timesteps the scheduler has for each number of inference steps, from 1 on."""
        most = min(STEPS_MAX, int(self.parts.scheduler.config.num_train_timesteps))
        return [len(self.copy_scheduler(number, self.size).timesteps) for number in range(1, most + 1)]

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the VAE's pixels, from -1 to 1: (pictures, 3, height, width)."""
        pixels: torch.Tensor = self.parts.vae.decode(self.unscale(latents), return_dict=False)[0]
        return pixels

    def encode(self, pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return the latents of pictures. pixels: from -1 to 1, (pictures, 3, height, width)."""
        return self.scale(self.parts.vae.encode(pixels).latent_dist.sample(generator))

    def scale(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the VAE's latents in the scale of the denoiser: the inverse of `unscale`."""
        scaled: torch.Tensor = latents * self.parts.vae.config.scaling_factor
        return scaled

    def unscale(self, latents: torch.Tensor) -> torch.Tensor:
        """Return latents in the scale of the VAE."""
        unscaled: torch.Tensor = latents / self.parts.vae.config.scaling_factor
        return unscaled

    def check_scheduler(self) -> None:
        """Raise ModelError if the scheduler cannot be used."""
        config = self.parts.scheduler.config
        for name in ("algorithm_type", "stochastic_sampling"):
            value = config.get(name)
            if value is True or "sde" in str(value):
                raise ModelError(f"the scheduler's {name} is {value}, which adds noise in each step")
        if not 1 <= int(config.num_train_timesteps) <= NUMBER_MAX:
            raise ModelError(f"the scheduler has num_train_timesteps {config.num_train_timesteps}")
        if (betas := config.get("trained_betas")) is not None and len(betas) != config.num_train_timesteps:
            raise ModelError(f"the scheduler has {len(betas)} trained_betas for {config.num_train_timesteps} timesteps")
        self.copy_scheduler(2, Size(self.multiple, self.multiple))

    def check_parts(self) -> None:
        """Raise ModelError if parts do not fit each other, or need an input that requests do not have."""
        vae, (read, made) = self.parts.vae.config, self.num_channels
        channels = vae.latent_channels
        if (read, made) != (channels, channels):
            raise ModelError(
                f"the {self.layout.denoiser[0]} has {read} channels in and {made} out, and the VAE has {channels}: "
                "this engine makes pictures from prompts, and cannot edit pictures"
            )
        if not vae.scaling_factor:
            raise ModelError("the VAE has no scaling_factor")
