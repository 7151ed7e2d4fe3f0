"""Tiny random pipelines in the layouts that came after Stable Diffusion 1 and 2."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from diffusers import (
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel, T5Tokenizer

from e2e.demo_model.train_paint import CONTEXT_TOKENS, build_parts, build_tokenizer

_WIDTH: Final = 32  # of the CLIP encoders with a projection
_T5_WIDTH: Final = 96


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


def build_3() -> Any:
    """Build a pipeline of Stable Diffusion 3.5."""
    tokenizer = build_tokenizer()
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=_T5_WIDTH,
        caption_projection_dim=16,
        pooled_projection_dim=24 + 20,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    t5_tokenizer, t5 = _build_t5()
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_build_shifted_vae(tokenizer),
        text_encoder=_build_projected(tokenizer, projection=24),
        tokenizer=tokenizer,
        text_encoder_2=_build_projected(tokenizer, projection=20),
        tokenizer_2=tokenizer,
        text_encoder_3=t5,
        tokenizer_3=t5_tokenizer,
    )


def build_flux() -> Any:
    """Build a pipeline of Flux."""
    tokenizer = build_tokenizer()
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_T5_WIDTH,
        pooled_projection_dim=64,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    t5_tokenizer, t5 = _build_t5()
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15),
        vae=_build_shifted_vae(tokenizer),
        text_encoder=build_parts(tokenizer)[1],
        tokenizer=tokenizer,
        text_encoder_2=t5,
        tokenizer_2=t5_tokenizer,
        transformer=transformer,
    )


def _build_shifted_vae(tokenizer: Any) -> Any:
    vae = build_parts(tokenizer)[0]
    vae.register_to_config(shift_factor=0.25)
    return vae


def _build_t5() -> tuple[T5Tokenizer, T5EncoderModel]:
    letters = [*"abcdefghijklmnopqrstuvwxyz", "\u2581", "\u2581red", "\u2581blue"]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((letter, -len(letter)) for letter in letters)]
    tokenizer = T5Tokenizer(vocab=vocabulary, extra_ids=0)
    config = T5Config(
        vocab_size=len(vocabulary),
        d_model=_T5_WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    return tokenizer, T5EncoderModel(config)


PIPELINES: Final[dict[str, Callable[[], Any]]] = {"xl": build_xl, "3": build_3, "flux": build_flux}


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
