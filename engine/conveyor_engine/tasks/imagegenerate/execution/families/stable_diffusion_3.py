"""Stable Diffusion 3 and 3.5: two CLIP encoders, perhaps T5, and a transformer for prompts and pictures together."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from conveyor_engine.errors import ModelError
from conveyor_engine.tasks.imagegenerate.execution.families.family import Inputs, Prompts
from conveyor_engine.tasks.imagegenerate.execution.families.flow import Flow
from conveyor_engine.tasks.imagegenerate.layouts import STABLE_DIFFUSION_3_T5_TOKENS


class StableDiffusion3(Flow):
    """The transformer's position embeddings limit the sides of pictures."""

    @property
    def max_side(self) -> int:
        most = int(self.parts.denoiser.config.pos_embed_max_size)
        return min(super().max_side, most * self.factor * self.patch)

    def read_prompts(self, tokens: Sequence[torch.Tensor]) -> Prompts:
        outputs = [
            encoder(each, output_hidden_states=True)
            for encoder, each in zip(self.parts.text_encoders[:2], tokens, strict=False)
        ]
        clip = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        t5 = self._read_t5(tokens, clip)
        padded = functional.pad(clip, (0, t5.shape[-1] - clip.shape[-1]))
        return Prompts(torch.cat([padded, t5], dim=1), torch.cat([output.text_embeds for output in outputs], dim=-1))

    def _read_t5(self, tokens: Sequence[torch.Tensor], clip: torch.Tensor) -> torch.Tensor:
        """Return T5's hidden states, or zeros if the pipeline has no T5."""
        if len(self.parts.text_encoders) < 3:
            return clip.new_zeros(
                len(clip), STABLE_DIFFUSION_3_T5_TOKENS, self.parts.denoiser.config.joint_attention_dim
            )
        hidden: torch.Tensor = self.parts.text_encoders[2](tokens[2])[0]
        return hidden

    def predict(self, inputs: Inputs) -> torch.Tensor:
        predicted: torch.Tensor = self.parts.denoiser(
            hidden_states=inputs.sample,
            timestep=inputs.timesteps,
            encoder_hidden_states=inputs.prompts.hidden,
            pooled_projections=inputs.prompts.pooled,
            return_dict=False,
        )[0]
        return predicted

    def check_parts(self) -> None:
        super().check_parts()
        if max(self.size) > self.max_side:
            raise ModelError(
                f"the transformer's sample_size makes pictures of {self.size}, but its pos_embed_max_size allows "
                f"{self.max_side} pixels for a side"
            )
