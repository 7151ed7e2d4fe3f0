"""Train a small ResNet that tells shapes apart, in half a minute. Called by `e2e.demo_model`."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from transformers import ConvNextImageProcessorPil, ResNetConfig, ResNetForImageClassification

from e2e.demo_model.bert import learn, make_readable
from e2e.demo_model.shapes import SHAPES, SIDE, draw_shape

IMAGES = 48  # per step
STEPS = 500


def train(directory: Path, progress: Callable[[str], None]) -> None:
    """Leave a model directory (safetensors, image processor) in `directory`."""
    torch.manual_seed(0)
    draw = random.Random(0)
    config = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 64, 96],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        id2label=dict(enumerate(SHAPES)),
        label2id={shape: number for number, shape in enumerate(SHAPES)},
    )
    model = ResNetForImageClassification(config).train()
    processor = ConvNextImageProcessorPil(size={"shortest_edge": SIDE}, crop_pct=1.0)

    def find_loss() -> torch.Tensor:
        numbers = [draw.randrange(len(SHAPES)) for _ in range(IMAGES)]
        pictures = [draw_shape(SHAPES[number], draw) for number in numbers]
        pixels = torch.from_numpy(np.stack(processor(images=pictures)["pixel_values"]))
        return functional.cross_entropy(model(pixel_values=pixels).logits, torch.tensor(numbers))

    learn([model], STEPS, find_loss, progress)
    model.eval().save_pretrained(directory)
    processor.save_pretrained(directory)
    make_readable(directory)
