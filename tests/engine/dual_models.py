"""Makes tiny random models that embed images and texts, and computes transformers' vectors of single inputs."""

import json
from pathlib import Path
from typing import Any, Final

import torch
from PIL import Image
from tests.engine.chat_model import END, USER, VOCABULARY, write_tokenizer
from tests.engine.image_models import SIDE
from tokenizers import Tokenizer, processors
from torch.nn import functional
from transformers import AutoConfig, AutoImageProcessor, AutoModel, PreTrainedModel, ViTImageProcessorPil
from transformers.utils import logging as transformers_logging

KINDS: Final = ("clip", "siglip")
CONTEXT_TOKENS: Final = 24
SIZE: Final = 24
_COMMON: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "projection_dim": SIZE,
}
_PAD: Final = 5  # of the tokenizer; config.json names another, as that of SigLIP 2 does


def build_dual_model(kind: str, begin: int = 1, end: int = 0) -> PreTrainedModel:
    """Build the model with random weights. begin, end: the tokens around a text."""
    torch.manual_seed(0)
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT_TOKENS, "pad_token_id": 1}
    text |= {"bos_token_id": begin, "eos_token_id": end} | ({"projection_size": 32} if kind == "siglip" else {})
    vision = {"image_size": SIDE, "patch_size": 8}
    config = AutoConfig.for_model(kind, text_config=_COMMON | text, vision_config=_COMMON | vision, projection_dim=SIZE)
    model: PreTrainedModel = AutoModel.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():  # CLIP's own beginning is so small that all vectors are nearly alike
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    return model


def save_dual_model(kind: str, directory: Path) -> PreTrainedModel:
    """Save all files that a server needs. Returns the model in float32."""
    transformers_logging.disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokens = [(token, tokenizer.token_to_id(token)) for token in (USER, END)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{USER} $A {END}", special_tokens=tokens)
    tokenizer.save(str(path))
    settings = directory / "tokenizer_config.json"
    config = json.loads(settings.read_text()) | {"pad_token": tokenizer.id_to_token(_PAD)}
    settings.write_text(json.dumps(config))
    model = build_dual_model(kind, *(number for _, number in tokens))
    model.save_pretrained(directory)
    ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(directory)
    return model


def embed_image(model: Any, directory: Path, image: Image.Image) -> torch.Tensor:
    """Return transformers' vector of the image: float32 (size,), of length 1."""
    processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    pixels = processor(images=image, return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        return functional.normalize(model.get_image_features(pixel_values=pixels).pooler_output[0], dim=0)


def embed_text(model: Any, tokens: list[int]) -> torch.Tensor:
    """Return transformers' vector: float32 (size,), of length 1. SigLIP gets padded texts, as in its training."""
    padding = [_PAD] * (CONTEXT_TOKENS - len(tokens)) if model.config.model_type == "siglip" else []
    with torch.inference_mode():
        vector = model.get_text_features(input_ids=torch.tensor([tokens + padding])).pooler_output[0]
    return functional.normalize(vector, dim=0)
