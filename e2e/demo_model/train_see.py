"""Train a small LLaVA that answers questions about pictures of shapes, in two minutes. Called by `e2e.demo_model`.

It would need far more pictures to find out from answers alone what a patch shows. So at first, its encoder only learns
to name the shape on each patch and its column, by a layer that is thrown away. Then the whole model learns.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from e2e.demo_model.bert import learn, save
from e2e.demo_model.scenes import CELL, CELLS, SIDE, Scene, draw_board, draw_questions, draw_scene
from e2e.demo_model.shapes import COLOURS, SHAPES

ROWS: Final = 16  # pictures per step, each with all its questions
ENCODER_STEPS: Final = 300
STEPS: Final = 1300
PATCHES: Final = CELLS**2
WIDTH: Final = 96
CONTEXT_TOKENS: Final = 512
USER, ASSISTANT, END, IMAGE = "<|user|>", "<|assistant|>", "<|end|>", "<image>"
NAMES: Final = [None, *((colour, shape, column) for colour in COLOURS for shape in SHAPES for column in range(CELLS))]
IGNORED: Final = -100  # label of what is not to be learnt: pictures, questions and padding
CHAT_TEMPLATE: Final = (
    "{% for message in messages if message['role'] != 'system' %}"  # the model has never seen a system message
    "{% if message['role'] == 'assistant' %}" + ASSISTANT + "{% else %}" + USER + "{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + IMAGE + "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


def train(directory: Path, progress: Callable[[str], None]) -> None:
    """Leave a model directory (safetensors, tokenizer, chat template, processor) in `directory`."""
    torch.manual_seed(0)
    draw = random.Random(0)
    tokenizer = _train_tokenizer()
    processor = CLIPImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, crop_size={"height": SIDE, "width": SIDE}, do_center_crop=False
    )
    model = LlavaForConditionalGeneration(_build_config(tokenizer)).train()
    with torch.no_grad():  # with the usual deviation of 0.02, hundreds of steps do not learn where a patch is
        model.model.vision_tower.embeddings.position_embedding.weight.mul_(30)
    namer = nn.Linear(WIDTH, len(NAMES))

    def draw_pictures(draw_one: Callable[[random.Random], Scene]) -> tuple[list[Scene], torch.Tensor]:
        scenes = [draw_one(draw) for _ in range(ROWS)]
        return scenes, torch.from_numpy(np.stack(processor(images=[each.picture for each in scenes])["pixel_values"]))

    def find_loss_of_names(scenes: list[Scene], features: torch.Tensor) -> torch.Tensor:
        named = torch.tensor([kind for scene in scenes for kind in _name_patches(scene)])
        return functional.cross_entropy(namer(features).view(-1, len(NAMES)), named)

    def find_encoder_loss() -> torch.Tensor:
        scenes, pixels = draw_pictures(draw_board)
        return find_loss_of_names(scenes, torch.cat(model.get_image_features(pixels).pooler_output))

    def find_loss() -> torch.Tensor:
        scenes, pixels = draw_pictures(draw_scene)
        inputs, labels = _write_conversations(scenes, tokenizer, draw)
        output = model(input_ids=inputs, pixel_values=pixels, labels=labels)
        return output.loss + find_loss_of_names(scenes, output.image_hidden_states)

    learn(
        [model.model.vision_tower, model.model.multi_modal_projector, namer], ENCODER_STEPS, find_encoder_loss, progress
    )
    learn([model, namer], STEPS, find_loss, progress)
    processor.save_pretrained(directory)
    settings = {
        "processor_class": "LlavaProcessor", "patch_size": CELL, "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }  # fmt: skip
    (directory / "processor_config.json").write_text(json.dumps(settings))
    save(model, tokenizer, directory)


def _train_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and the words of questions and answers."""
    draw = random.Random(0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    asked = [pair for _ in range(200) for pair in draw_questions(draw_scene(draw), draw)]
    tokenizer.train_from_iterator([text for pair in asked for text in pair], trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (END, USER, ASSISTANT, IMAGE)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _build_config(tokenizer: PreTrainedTokenizerFast) -> LlavaConfig:
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = CLIPVisionConfig(
        image_size=SIDE,
        patch_size=CELL,
        hidden_size=WIDTH,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    return LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=PATCHES,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )


def _write_conversations(
    scenes: list[Scene], tokenizer: PreTrainedTokenizerFast, draw: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input ids and labels, both (scenes, longest): each picture with all its questions, one after the other."""
    rows = [_write_conversation(scene, tokenizer, draw) for scene in scenes]
    inputs = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_token_id)
    labels = torch.full_like(inputs, IGNORED)
    for number, row in enumerate(rows):
        tokens, is_answer = map(torch.tensor, zip(*row, strict=True))
        inputs[number, : len(row)] = tokens
        labels[number, : len(row)] = torch.where(is_answer, tokens, IGNORED)
    return inputs, labels


def _write_conversation(
    scene: Scene, tokenizer: PreTrainedTokenizerFast, draw: random.Random
) -> list[tuple[int, bool]]:
    """Return each token, and whether it belongs to an answer. The picture is before or behind the first question."""
    row: list[tuple[int, bool]] = []
    for turn, (question, answer) in enumerate(draw_questions(scene, draw)):
        picture = "" if turn else IMAGE * PATCHES
        parts = [picture, question] if draw.random() < 0.5 else [question, picture]
        for text, is_answer in ((f"{USER}{''.join(parts)}{END}{ASSISTANT}", False), (f"{answer}{END}", True)):
            row += [(token, is_answer) for token in tokenizer.encode(text)]
    return row


def _name_patches(scene: Scene) -> list[int]:
    """Return the number of the name of what is on each patch, row by row; 0 for nothing."""
    things = {(thing.row, thing.column): (thing.colour, thing.shape, thing.column) for thing in scene.things}
    return [NAMES.index(things.get((row, column))) for row in range(CELLS) for column in range(CELLS)]
