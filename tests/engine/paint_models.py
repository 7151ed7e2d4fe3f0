"""Tiny random pipelines in the layout of Stable Diffusion 1 and 2, and the pictures that diffusers makes with them."""

import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from diffusers import AutoPipelineForImage2Image, DiffusionPipeline
from diffusers.utils import logging as diffusers_logging
from PIL import Image

from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.imagegenerate.execution.loading import SCHEDULERS
from conveyor_engine.tasks.imagegenerate.facts import PaintRequest, Size, build_params, read_facts
from conveyor_engine.tasks.imagegenerate.reading import load_tokenizer
from conveyor_engine.wire.request import EngineRequest, FinishReason, RequestOutput
from e2e.demo_model.train_paint import build_parts, build_tokenizer, save_pipeline

SIDE: Final = 32
Pixels = npt.NDArray[np.uint8]


class Brief(NamedTuple):
    """A picture."""

    prompt: str = "a red circle"
    seed: int = 0
    num_steps: int = 4
    guidance: float = 5.0
    size: Size = Size(SIDE, SIDE)
    negative: str | None = None
    previews: tuple[int, ...] = ()
    strength: float = 0.0  # above 0: the edit of `draw(size)`


BRIEFS: Final = (
    Brief(),
    Brief("the blue star", 1, 7),
    Brief("black", 2, 3, 1.0),
    Brief("green square", 3, 5, 7.5, Size(48, 32)),
    Brief("red", 2**62, 2, 3.0, negative="blue star"),
    Brief("the blue star", 5, 9, 0.0, Size(48, 32)),
    Brief("a picture of a black square " * 9, 6, 1),
    Brief("a red circle", 7, 6, strength=0.5),
    Brief("the blue star", 8, 10, 3.0, strength=0.55),
    Brief("green", 9, 3, 0.0, Size(48, 32), strength=1.0),
)


def draw(size: Size) -> Image.Image:
    """A picture to edit, which has all colours and is nowhere alike."""
    places = np.indices((size.height, size.width))
    return Image.fromarray(np.stack([places[0] * 7, places[1] * 5, places.sum(0) * 3], axis=2).astype(np.uint8))


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
    """Open diffusers' pipeline. It must be told which parts are absent."""
    diffusers_logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"diffusers\..*")
    index = json.loads((directory / "model_index.json").read_text())
    absent = {name: None for name in ("text_encoder_3", "tokenizer_3") if index.get(name) == [None, None]}
    pipeline = DiffusionPipeline.from_pretrained(directory, low_cpu_mem_usage=False, **absent)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def paint(pipeline: Any, brief: Brief) -> Pixels:
    """The picture of diffusers' pipeline: (height, width, 3). Flux is guided away from no prompt."""
    more: dict[str, Any] = {} if type(pipeline).__name__ == "FluxPipeline" else {"negative_prompt": brief.negative}
    if not brief.strength or type(pipeline).__name__ in ("StableDiffusion3Pipeline", "FluxPipeline"):
        more |= brief.size._asdict()
    if brief.strength:
        pipeline = AutoPipelineForImage2Image.from_pipe(pipeline)
        pipeline.set_progress_bar_config(disable=True)
        more |= {"image": draw(brief.size), "strength": brief.strength}
    (picture,) = pipeline(
        brief.prompt,
        num_inference_steps=brief.num_steps,
        guidance_scale=brief.guidance,
        generator=torch.Generator().manual_seed(brief.seed),
        **more,
    ).images
    return np.asarray(picture)


@cache
def _tokenizer_of(directory: Path) -> Any:
    return load_tokenizer(directory)


def add(core: EngineCore, directory: Path, name: str, brief: Brief, arrival: float = 0.0) -> None:
    """What a worker makes of a body."""
    tokenizer, facts = _tokenizer_of(directory), read_facts(core.facts)
    negative = [] if brief.negative is None else tokenizer.encode(brief.negative)[0]
    num_skipped = facts.count_skipped(brief.num_steps, brief.strength) if brief.strength else 0
    request = PaintRequest(
        size=brief.size,
        num_inference_steps=brief.num_steps,
        guidance_scale=brief.guidance,
        has_guidance=facts.guides and brief.guidance > 1,
        packed_tokens=tokenizer.encode(brief.prompt)[0],
        packed_negative=negative,
        previews=brief.previews,
        image=draw(brief.size).tobytes() if brief.strength else b"",
        num_skipped=num_skipped,
    )
    core.add_request(
        EngineRequest(
            request_id=name,
            payload=request.encode(),
            params=build_params(brief.seed),
            payload_cost=request.cost,
            num_steps=facts.nums_forwards[brief.num_steps - 1] - num_skipped,
            group=request.group,
            arrival_time=arrival,
        )
    )


def read_picture(payload: bytes, size: Size) -> Pixels:
    return np.frombuffer(payload, dtype=np.uint8).reshape(size.height, size.width, 3)


def read_last(outputs: list[RequestOutput], brief: Brief) -> Pixels:
    assert outputs[-1].finish_reason is FinishReason.STOP, outputs[-1].message
    assert outputs[-1].payload is not None
    return read_picture(outputs[-1].payload, brief.size)


def distance(ours: list[Pixels], theirs: list[Pixels]) -> int:
    """The largest difference of a colour, of 255."""
    return max(int(np.abs(a.astype(int) - b).max()) for a, b in zip(ours, theirs, strict=True))


def change_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))
