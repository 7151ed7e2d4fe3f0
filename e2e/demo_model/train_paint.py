"""Train a small latent diffusion model that paints coloured shapes, in two minutes. Called by `e2e.demo_model`."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image, ImageChops
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from e2e.demo_model.bert import learn, make_readable
from e2e.demo_model.shapes import COLOURS, SHAPES, WHITE, paint_shape

SIDE: Final = 32
PICTURES: Final = 16  # per step
ENCODER_STEPS: Final = 300
STEPS: Final = 500
PICTURES_OF_KIND: Final = 16  # whose latents are learnt
CONTEXT_TOKENS: Final = 16
WITHOUT_PROMPT: Final = 0.1  # share of pictures that are learnt without their prompt, for guidance
KINDS: Final = [(colour, shape) for colour in COLOURS for shape in SHAPES]
SENTENCES: Final = ("{} {}", "a {} {}", "the {} {}")
BEGIN, END = "<|startoftext|>", "<|endoftext|>"


def train(directory: Path, progress: Callable[[str], None]) -> None:
    """Leave a directory in the layout of Stable Diffusion (safetensors, tokenizer, scheduler) in `directory`."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    draw = random.Random(0)
    tokenizer = build_tokenizer()
    vae, text_encoder, unet, scheduler = build_parts(tokenizer)
    _train_vae(vae, draw, progress)
    latents = _encode_pictures(vae, draw)
    _train_unet(unet, scheduler, latents, _read_sentences(text_encoder, tokenizer), draw, progress)
    save_pipeline(directory, tokenizer, vae, text_encoder, unet, scheduler)


def build_parts(
    tokenizer: CLIPTokenizer, width: int = 32
) -> tuple[AutoencoderKL, CLIPTextModel, UNet2DConditionModel, DDIMScheduler]:
    """Untrained parts. `width`: channels of the UNet's first block."""
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 32),
        norm_num_groups=8,
        latent_channels=4,
        sample_size=SIDE,
        scaling_factor=0.5,
    )
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    unet = UNet2DConditionModel(
        sample_size=SIDE // 4,
        in_channels=4,
        out_channels=4,
        block_out_channels=(width, 2 * width),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=4,
        cross_attention_dim=64,
    )
    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    text_encoder = CLIPTextModel(config)
    with torch.no_grad():  # what a word is counts more than where it stands
        text_encoder.get_input_embeddings().weight.mul_(5)
    return vae, text_encoder, unet, scheduler


def build_tokenizer() -> CLIPTokenizer:
    """CLIP's own kind: pairs of letters are merged, and a word's last letter is marked."""
    words = sorted({word for each in SENTENCES for word in each.replace("{}", "").split()} | {*SHAPES, *COLOURS})
    tokenizer = Tokenizer(models.BPE(unk_token=END, end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    letters = list("abcdefghijklmnopqrstuvwxyz")
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=letters, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator([*words, *letters], trainer)
    learnt = tokenizer.get_vocab()
    vocabulary = {token: number for number, token in enumerate(sorted(learnt, key=learnt.__getitem__))}
    vocabulary |= {BEGIN: len(vocabulary), END: len(vocabulary) + 1}
    merges = [tuple(pair) for pair in _read_merges(tokenizer)]
    return CLIPTokenizer(vocab=vocabulary, merges=merges, pad_token=END, model_max_length=CONTEXT_TOKENS)


def _read_merges(tokenizer: Tokenizer) -> list[list[str]]:
    import json

    merges: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    return merges


def save_pipeline(
    directory: Path,
    tokenizer: CLIPTokenizer,
    vae: AutoencoderKL,
    text_encoder: CLIPTextModel,
    unet: UNet2DConditionModel,
    scheduler: object,
) -> None:
    """Leave the directory that pods, which are another user, can read."""
    pipeline = StableDiffusionPipeline(
        vae=vae.eval(),
        text_encoder=text_encoder.eval(),
        tokenizer=tokenizer,
        unet=unet.eval(),
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(directory)
    make_readable(directory)


def _draw_pictures(draw: random.Random, kinds: list[tuple[str, str]]) -> torch.Tensor:
    """The shapes in the middle, of nearly one size -> (pictures, 3, side, side) from -1 to 1."""
    pictures = []
    for colour, shape in kinds:
        whole = paint_shape(shape, COLOURS[colour], WHITE, draw)
        left, top, right, bottom = ImageChops.difference(whole, Image.new("RGB", whole.size, WHITE)).getbbox()
        margin = draw.randrange(4, 9)
        cut = whole.crop((left - margin, top - margin, right + margin, bottom + margin))
        beside = Image.new("RGB", cut.size, WHITE)
        beside.paste(whole.crop((left, top, right, bottom)), (margin, margin))
        pictures.append(np.asarray(beside.resize((SIDE, SIDE))))
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1


def _train_vae(vae: AutoencoderKL, draw: random.Random, progress: Callable[[str], None]) -> None:
    """Learn to draw pictures from their latents, whose spread is about 1 after scaling."""

    def find_loss() -> torch.Tensor:
        pixels = _draw_pictures(draw, draw.choices(KINDS, k=PICTURES))
        latents = vae.encode(pixels).latent_dist
        return functional.mse_loss(vae.decode(latents.sample()).sample, pixels) + 1e-4 * latents.kl().mean() / 256

    learn([vae.train()], ENCODER_STEPS, find_loss, progress)
    with torch.no_grad():
        spread = vae.encode(_draw_pictures(draw, KINDS * 4)).latent_dist.mean.std()
    vae.register_to_config(scaling_factor=float(1 / spread))


def _encode_pictures(vae: AutoencoderKL, draw: random.Random) -> torch.Tensor:
    """Latents of some pictures of each kind -> (kinds, pictures, channels, height, width)."""
    with torch.no_grad():
        encoded = vae.eval().encode(_draw_pictures(draw, [kind for kind in KINDS for _ in range(PICTURES_OF_KIND)]))
    latents = encoded.latent_dist.mean * vae.config.scaling_factor
    return latents.view(len(KINDS), PICTURES_OF_KIND, *latents.shape[1:])


def _read_sentences(text_encoder: CLIPTextModel, tokenizer: CLIPTokenizer) -> torch.Tensor:
    """The hidden states of each kind's sentences, and last those of no prompt -> (kinds + 1, sentences, tokens, width).

    The text encoder is not trained: with random weights, different words have states far apart.
    """
    texts = [sentence.format(*kind) for kind in KINDS for sentence in SENTENCES] + [""] * len(SENTENCES)
    tokens = tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt")
    with torch.no_grad():
        hidden = text_encoder.eval()(tokens["input_ids"]).last_hidden_state
    return hidden.view(len(KINDS) + 1, len(SENTENCES), *hidden.shape[1:])


def _train_unet(
    unet: UNet2DConditionModel,
    scheduler: DDIMScheduler,
    latents: torch.Tensor,
    sentences: torch.Tensor,
    draw: random.Random,
    progress: Callable[[str], None],
) -> None:
    """Learn the noise in latents, with the prompt beside them.

    Most steps are early ones, which choose colour and shape: later ones see them in the latents.
    """

    def find_loss() -> torch.Tensor:
        kinds = draw.sample(range(len(KINDS)), PICTURES)
        known = torch.stack([latents[kind, draw.randrange(PICTURES_OF_KIND)] for kind in kinds])
        prompts = [len(KINDS) if draw.random() < WITHOUT_PROMPT else kind for kind in kinds]
        hidden = torch.stack([sentences[each, draw.randrange(len(SENTENCES))] for each in prompts])
        noise, steps = torch.randn_like(known), (1000 * torch.rand(PICTURES) ** (1 / 3)).long()
        made = unet(scheduler.add_noise(known, noise, steps), steps, encoder_hidden_states=hidden).sample
        return functional.mse_loss(made, noise)

    learn([unet.train()], STEPS, find_loss, progress)
