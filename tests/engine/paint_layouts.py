"""Tiny random pipelines in the layouts that came after Stable Diffusion 1 and 2."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from e2e.demo_model.train_paint import CONTEXT_TOKENS, build_parts, build_tokenizer

_WIDTH: Final = 32  # of the further text encoders


def _build_projected(tokenizer: Any, projection: int) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=_WIDTH,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        projection_dim=projection,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    encoder = CLIPTextModelWithProjection(config)
    with torch.no_grad():
        encoder.get_input_embeddings().weight.mul_(5)
    return encoder


def build_xl() -> Any:
    """Build a pipeline of Stable Diffusion XL."""
    tokenizer = build_tokenizer()
    vae, text_encoder, _, scheduler = build_parts(tokenizer, width=8)
    unet = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=(2, 4),
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
        cross_attention_dim=64 + _WIDTH,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 24,
    )
    return StableDiffusionXLPipeline(
        vae=vae,
        text_encoder=text_encoder,
        text_encoder_2=_build_projected(tokenizer, projection=24),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=unet,
        scheduler=EulerDiscreteScheduler.from_config(scheduler.config),
        add_watermarker=False,
    )


PIPELINES: Final[dict[str, Callable[[], Any]]] = {"xl": build_xl}


def save_layout(directory: Path, layout: str) -> None:
    """Save a random pipeline. Weights are scaled so that prompts, timesteps and sizes show in pictures."""
    torch.manual_seed(0)
    pipeline = PIPELINES[layout]()
    denoiser = getattr(pipeline, "unet", None) or pipeline.transformer
    with torch.no_grad():
        for module in (denoiser, pipeline.vae.decoder):
            for parameter in module.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(1.5)
    pipeline.save_pretrained(directory)
