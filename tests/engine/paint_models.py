"""Tiny random pipelines in the layout of Stable Diffusion, and the pictures that diffusers makes with them."""

import json
import warnings
from array import array
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from diffusers import StableDiffusionPipeline
from diffusers.utils import logging as diffusers_logging

from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.imagegenerate.execution.pipeline import SCHEDULERS
from conveyor_engine.tasks.imagegenerate.facts import PaintRequest, Size, read_facts
from conveyor_engine.tasks.imagegenerate.reading import load_tokenizer
from conveyor_engine.wire.request import EngineRequest
from e2e.demo_model.train_paint import build_parts, build_tokenizer, save_pipeline

SIDE: Final = 32
Pixels = npt.NDArray[np.uint8]


class Wish(NamedTuple):
    """A picture."""

    prompt: str = "a red circle"
    seed: int = 0
    num_steps: int = 4
    guidance: float = 5.0
    size: Size = Size(SIDE, SIDE)
    negative: str = ""
    previews: tuple[int, ...] = ()


WISHES: Final = (
    Wish(),
    Wish("the blue star", 1, 7),
    Wish("black", 2, 3, 1.0),
    Wish("green square", 3, 5, 7.5, Size(48, 32)),
    Wish("red", 2**62, 2, 3.0, negative="blue star"),
    Wish("the blue star", 5, 9, 0.0, Size(48, 32)),
    Wish("a picture of a black square " * 9, 6, 1),
)


def save_paint_model(directory: Path, scheduler: str = "DDIMScheduler", **settings: Any) -> None:
    """Weights are random; the UNet's are scaled so that prompts and timesteps show in pictures."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    vae, text_encoder, unet, made = build_parts(tokenizer, width=8)
    with torch.no_grad():
        for module in (unet, vae.decoder):
            for parameter in module.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(1.5)
    chosen = SCHEDULERS[scheduler].from_config(made.config, **settings)
    save_pipeline(directory, tokenizer, vae, text_encoder, unet, chosen)


def open_pipeline(directory: Path) -> Any:
    diffusers_logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"diffusers\..*")
    pipeline = StableDiffusionPipeline.from_pretrained(directory, low_cpu_mem_usage=False)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def paint(pipeline: Any, wish: Wish) -> Pixels:
    """The picture of diffusers' pipeline: (height, width, 3)."""
    (picture,) = pipeline(
        wish.prompt,
        width=wish.size.width,
        height=wish.size.height,
        num_inference_steps=wish.num_steps,
        guidance_scale=wish.guidance,
        negative_prompt=wish.negative,
        generator=torch.Generator().manual_seed(wish.seed),
    ).images
    return np.asarray(picture)


@cache
def _tokenizer_of(directory: Path) -> Any:
    return load_tokenizer(directory)


def add(core: EngineCore, directory: Path, name: str, wish: Wish, arrival: float = 0.0) -> None:
    """What a worker makes of a body."""
    tokenizer = _tokenizer_of(directory)
    negative = tokenizer.encode(wish.negative)[0] if wish.guidance > 1 else []
    request = PaintRequest(
        size=wish.size,
        num_inference_steps=wish.num_steps,
        guidance_scale=wish.guidance,
        seed=wish.seed,
        packed_tokens=array("I", tokenizer.encode(wish.prompt)[0]).tobytes(),
        packed_negative=array("I", negative).tobytes(),
        previews=wish.previews,
    )
    core.add_request(
        EngineRequest(
            request_id=name,
            payload=request.encode(),
            payload_cost=request.cost,
            num_steps=read_facts(core.facts).nums_forwards[wish.num_steps - 1],
            group=request.group,
            arrival_time=arrival,
        )
    )


def read_picture(payload: bytes, size: Size) -> Pixels:
    return np.frombuffer(payload, dtype=np.uint8).reshape(size.height, size.width, 3)


def change_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))
