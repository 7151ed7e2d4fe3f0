"""Workload image: processed pictures through an image classifier, beside the model's own forward of the same batches.

The engine begins with the payloads that workers make, and ends with logits. The peer is the forward of transformers'
class on prepared batches, with the same weights and threads. The difference is the engine's own work.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    AutoModelForImageClassification,
    ConvNextImageProcessorPil,
    PretrainedConfig,
    ResNetConfig,
    ViTConfig,
    ViTImageProcessorPil,
)

from conveyor_bench.comparing.slices import STOLEN_AT_MOST, estimate
from conveyor_bench.comparing.turns import processor_ticks, stolen_share
from conveyor_bench.workloads.rounds import Limits
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.build import build_runner
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.wire.images import PictureShape, encode_pixels
from conveyor_engine.wire.request import EngineRequest

IMAGES, BATCH, SIDE = 64, 32, 224
_SMALL: Final[dict[str, int]] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 64
}  # fmt: skip
SHAPES: Final[dict[str, Callable[[], PretrainedConfig]]] = {  # by --model-shape
    "vit-base": lambda: ViTConfig(image_size=SIDE),
    "resnet-50": ResNetConfig,
    "tiny": lambda: ViTConfig(**_SMALL),
}
Pixels = npt.NDArray[np.float32]


def measure_images(shape: str, dtype: str, limits: Limits, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure the images per second of engine and forward, and their ratio. Exits if the logits differ."""
    with TemporaryDirectory() as folder:
        side = write_model(Path(folder), shape)
        report(f"event=model_written shape={shape}")
        for number_type in ("float32", dtype):
            core, forward = open_engine(folder, number_type), open_forward(folder, number_type)
            if number_type == "float32":
                images = draw_images(BATCH, side, seed=1)
                if np.abs(classify(core, images) - forward(images)).max() > 1e-4:
                    raise SystemExit("float32 logits differ from transformers': one of them is wrong here")
                report(f"event=logits_equal dtype=float32 model={shape} images={BATCH}: same as transformers'")
    images = draw_images(IMAGES, side, seed=0)
    batches = [images[start : start + BATCH] for start in range(0, IMAGES, BATCH)]
    classify(core, images)
    forward(batches[0])
    seconds: dict[str, list[float]] = {"engine": [], "forward": []}
    begun, ratios, dropped = time.monotonic(), list[float](), 0
    while len(ratios) + dropped < limits.rounds and time.monotonic() - begun < limits.budget_seconds:
        found = estimate(ratios)
        if found is not None and found.settled:
            break
        before, taken = processor_ticks(), {}
        for name in list(seconds)[:: -1 if len(ratios) % 2 else 1]:
            started = time.perf_counter()
            if name == "engine":
                classify(core, images)
            else:
                for batch in batches:
                    forward(batch)
            taken[name] = time.perf_counter() - started
        if stolen_share(before, processor_ticks()) > STOLEN_AT_MOST:
            dropped += 1
            continue
        for name, each in taken.items():
            seconds[name].append(each)
        ratios.append(taken["forward"] / taken["engine"])
        report(f"event=measured round={len(ratios)} " + " ".join(f"{name}={each:.3f}" for name, each in taken.items()))
    found = estimate(ratios)
    return {
        "same_float32_logits_as_transformers": True,
        "images_per_second": {name: round(IMAGES / median(each), 1) for name, each in seconds.items() if each},
        "forward_fraction": round(median(ratios), 3) if ratios else None,
        "spread": round(found.spread, 3) if found else None,
        "rounds": len(ratios),
        "dropped": dropped,
        "workload": {"model_shape": shape, "dtype": dtype, "images": IMAGES, "batch": BATCH, "side": side},
    }


def write_model(folder: Path, shape: str) -> int:
    """Write a model of random weights (seed 0) and its image processor. Returns the side of a processed picture."""
    torch.manual_seed(0)
    config = SHAPES[shape]()
    side = int(getattr(config, "image_size", SIDE))
    AutoModelForImageClassification.from_config(config).save_pretrained(folder)
    if config.model_type == "vit":
        ViTImageProcessorPil(size={"height": side, "width": side}).save_pretrained(folder)
    else:
        ConvNextImageProcessorPil(size={"shortest_edge": side}).save_pretrained(folder)
    return side


def draw_images(number: int, side: int, seed: int) -> Pixels:
    """Draw random images: (number, 3, side, side)."""
    return np.random.default_rng(seed).standard_normal((number, 3, side, side), dtype=np.float32)


def open_engine(folder: str, dtype: str) -> EngineCore:
    """Open this engine with its defaults and batches of BATCH."""
    config = EngineConfig(
        model=folder,
        device="cpu",
        dtype=dtype,  # type: ignore[arg-type]  # argparse has checked it
        batching_mode="dynamic",
        max_num_seqs=BATCH,
        num_threads=torch.get_num_threads(),
    )
    return EngineCore(config, build_runner(config))


def open_forward(folder: str, dtype: str) -> Callable[[Pixels], Pixels]:
    """Return the forward of transformers' class, as its users call it for a batch."""
    model = AutoModelForImageClassification.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def forward(pixels: Pixels) -> Pixels:
        logits: Pixels = model(pixel_values=torch.from_numpy(pixels).to(model.dtype)).logits.float().numpy()
        return logits

    return forward


def classify(core: EngineCore, images: Sequence[Pixels] | Pixels) -> Pixels:
    """Return the logits of each image. All requests arrive at once."""
    for number, pixels in enumerate(images):
        shape = PictureShape(*pixels.shape)
        payload = encode_pixels(shape, pixels.tobytes())
        core.add_request(EngineRequest(request_id=str(number), payload=payload, payload_cost=shape.num_pixels))
    found: dict[str, bytes] = {}
    while core.has_unfinished():
        found |= {output.request_id: output.payload or b"" for output in core.step(time.monotonic())}
    return np.stack([np.frombuffer(found[str(number)], np.float32) for number in range(len(images))])
