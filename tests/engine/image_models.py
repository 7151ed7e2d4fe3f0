"""Makes tiny random models that classify images, and pictures in the formats that clients send."""

import io
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    ConvNextImageProcessorPil,
    ImageClassificationPipeline,
    PreTrainedModel,
    ViTImageProcessorPil,
)
from transformers.utils import logging as transformers_logging

LABELS: Final = ("circle", "square", "star")
SIDE: Final = 32
_ATTENDING: Final[dict[str, Any]] = {
    "image_size": SIDE,
    "patch_size": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
_CONVOLVING: Final[dict[str, Any]] = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}
_MODELS: Final[dict[str, dict[str, Any]]] = {
    "vit": _ATTENDING,
    "deit": {"architectures": ["DeiTForImageClassificationWithTeacher"], **_ATTENDING},
    "resnet": {"embedding_size": 8, "layer_type": "basic", **_CONVOLVING},
    "convnext": {"patch_size": 4, **_CONVOLVING},
    "swin": {
        "image_size": SIDE,
        "patch_size": 2,
        "window_size": 4,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
    },
}
KINDS: Final = tuple(_MODELS)


def build_image_model(kind: str, num_labels: int = 3, **changes: Any) -> PreTrainedModel:
    """Build the model with random weights, ready to run."""
    torch.manual_seed(0)
    labels = {"num_labels": num_labels} if num_labels != len(LABELS) else {"id2label": dict(enumerate(LABELS))}
    config = AutoConfig.for_model(kind, **(_MODELS[kind] | {"initializer_range": 0.3} | labels | changes))
    model: PreTrainedModel = AutoModelForImageClassification.from_config(config).eval()
    return model


def save_image_model(kind: str, directory: Path, num_labels: int = 3, **changes: Any) -> PreTrainedModel:
    """Save weights, config.json and preprocessor_config.json. Returns the model in float32."""
    transformers_logging.disable_progress_bar()
    model = build_image_model(kind, num_labels, **changes)
    for module in model.modules():  # statistics as training leaves them: a batch must not change them
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.5)  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
    model.save_pretrained(directory)
    save_processor(kind, directory)
    return model


def save_processor(kind: str, directory: Path, **changes: Any) -> None:
    """Save the image processor.

    For ConvNeXt and ResNet it scales the shorter side and crops; for others it scales both.
    """
    if kind in ("convnext", "resnet"):
        processor: Any = ConvNextImageProcessorPil(**({"size": {"shortest_edge": SIDE}, "crop_pct": 0.875} | changes))
    else:
        processor = ViTImageProcessorPil(**({"size": {"height": SIDE, "width": SIDE}} | changes))
    processor.save_pretrained(directory)


def open_pipeline(directory: Path, model: PreTrainedModel) -> ImageClassificationPipeline:
    """Open transformers' pipeline, with the processor that does not need torchvision."""
    processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    return ImageClassificationPipeline(model=model, image_processor=processor, device="cpu")


def draw(number: int, size: tuple[int, int] = (60, 40), mode: str = "RGB") -> Image.Image:
    """Draw a random picture with large and small structures. The same number gives the same picture."""
    random = np.random.default_rng(number)
    coarse = Image.fromarray(random.integers(0, 256, (5, 4, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    noise = random.integers(-30, 31, (size[1], size[0], 3))
    return Image.fromarray((np.asarray(coarse) + noise).clip(0, 255).astype(np.uint8)).convert(mode)


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return the picture as the bytes of a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
