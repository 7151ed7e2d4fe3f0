"""Train a small CLIP that finds pictures of coloured shapes by words, in three minutes. Called by `e2e.demo_model`."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.nn import functional
from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast, ViTImageProcessorPil

from e2e.demo_model.bert import learn, save
from e2e.demo_model.shapes import COLOURS, SHAPES, SIDE, WHITE, paint_shape

IMAGES = 64  # per step
STEPS = 700
SENTENCES: Final = ("{} {}", "a {} {}", "a picture of a {} {}", "the {} {}")
KINDS: Final = [(colour, shape) for colour in COLOURS for shape in SHAPES]
CONTEXT_TOKENS: Final = 16
PAD, BEGIN, END, UNKNOWN = "<pad>", "<begin>", "<end>", "<unknown>"


def train(directory: Path, progress: Callable[[str], None]) -> None:
    """Leave a model directory (safetensors, tokenizer, image processor) in `directory`."""
    torch.manual_seed(0)
    draw = random.Random(0)
    tokenizer = _build_tokenizer()
    model = CLIPModel(_build_config(tokenizer)).train()
    processor = ViTImageProcessorPil(size={"height": SIDE, "width": SIDE})

    def find_loss() -> torch.Tensor:
        """Of the right sentence among one for each kind of picture."""
        numbers = [draw.randrange(len(KINDS)) for _ in range(IMAGES)]
        kinds = (KINDS[number] for number in numbers)
        pictures = [paint_shape(shape, COLOURS[colour], WHITE, draw) for colour, shape in kinds]
        pixels = torch.from_numpy(np.stack(processor(images=pictures)["pixel_values"]))
        texts = tokenizer([draw.choice(SENTENCES).format(*kind) for kind in KINDS], padding=True, return_tensors="pt")
        output = model(input_ids=texts["input_ids"], attention_mask=texts["attention_mask"], pixel_values=pixels)
        return functional.cross_entropy(output.logits_per_image, torch.tensor(numbers))

    learn([model], STEPS, find_loss, progress)
    processor.save_pretrained(directory)
    save(model, tokenizer, directory)


def _build_tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token. The end is not number 2, which would mean an old way of pooling to transformers."""
    words = {word for sentence in SENTENCES for word in sentence.replace("{}", "").split()} | {*SHAPES, *COLOURS}
    vocabulary = {word: number for number, word in enumerate((PAD, UNKNOWN, BEGIN, END, *sorted(words)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    around = [(token, vocabulary[token]) for token in (BEGIN, END)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A {END}", special_tokens=around)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BEGIN,
        eos_token=END,
        unk_token=UNKNOWN,
        model_max_length=CONTEXT_TOKENS,
    )


def _build_config(tokenizer: PreTrainedTokenizerFast) -> CLIPConfig:
    text = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": CONTEXT_TOKENS,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "image_size": SIDE,
        "patch_size": 8,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    return CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)
