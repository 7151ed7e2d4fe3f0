"""Makes tiny random models that read images in chats, with transformers' own processor of each family."""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from PIL import Image
from tests.engine.chat_model import TEXTS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

VOCABULARY: Final = 400
END: Final = "<|end|>"
_SPECIAL: Final = (
    END, "<|user|>", "<|assistant|>", "<image>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
    "<start_of_image>", "<image_soft_token>", "<end_of_image>", "<fake_token_around_image>", "<global-img>",
    "<end_of_utterance>", *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
    "<img>", "</img>", "<IMG_CONTEXT>", "<video>", "<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>",
    "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
)  # fmt: skip
_TEXT: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_SIZES: Final = {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.3}
_TOWER: Final = _SIZES | {"num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 14, "image_size": 56}
_QWEN_TOWER: Final = _SIZES | {"depth": 2, "num_heads": 4, "patch_size": 14, "out_hidden_size": 48}
_ROPE: Final = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2]}}
_QWEN_SIZE: Final = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
_GATED_DELTA: Final[dict[str, Any]] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25},
}  # fmt: skip


_GEMMA4_TEXT: Final[dict[str, Any]] = {
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 7, "num_global_key_value_heads": 1,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
_GEMMA4: Final[dict[str, Any]] = {
    "vision_config": _SIZES
    | {
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
        "patch_size": 16, "position_embedding_size": 64,
    },
    "audio_config": None,
}  # fmt: skip
_GEMMA4_TOKENS: Final = {
    "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<|image|>",
    "audio_token": "<video>", "boa_token": "<img>", "eoa_token": "</img>",
}  # fmt: skip


class Family:
    """How a family's tiny model and its processor are made."""

    def __init__(
        self, mark: str, config: dict[str, Any], size: dict[str, Any], tokens: dict[str, str] | None = None,
        place: str = "", processor: dict[str, Any] | None = None, around: tuple[str, str] = ("", ""),
        model_type: str = "",
    ) -> None:  # fmt: skip
        self.mark, self.config, self.size, self.tokens = mark, config, size, tokens or {}
        self.model_type = model_type  # empty: the name of the family
        self.place, self.processor, self.around = place or mark, processor or {}, around


_VISION: Final = ("<|vision_start|>", "<|vision_end|>")
FAMILIES: Final[dict[str, Family]] = {
    "qwen2_vl": Family(
        "<|image_pad|>",
        {
            "text_config": _TEXT | _ROPE,
            "vision_config": {
                "depth": 2, "embed_dim": 32, "hidden_size": 48, "num_heads": 4, "patch_size": 14, "mlp_ratio": 2,
            },
        },
        _QWEN_SIZE,
        around=_VISION,
    ),
    "qwen2_5_vl": Family(
        "<|image_pad|>",
        {
            "text_config": _TEXT | _ROPE,
            "vision_config": _QWEN_TOWER | {"window_size": 56, "fullatt_block_indexes": [1]},
        },
        _QWEN_SIZE,
        around=_VISION,
    ),
    "qwen3_vl": Family(
        "<|image_pad|>",
        {
            "text_config": _TEXT
            | {"head_dim": 16, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}},
            "vision_config": _QWEN_TOWER
            | {"patch_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        },
        {"shortest_edge": 32 * 32, "longest_edge": 128 * 128},
        around=_VISION,
    ),
    "qwen3_5": Family(
        "<|image_pad|>",
        {
            "text_config": _TEXT | _GATED_DELTA,
            "vision_config": _QWEN_TOWER | {"patch_size": 16, "num_position_embeddings": 16},
        },
        {"shortest_edge": 32 * 32, "longest_edge": 128 * 128},
        around=_VISION,
    ),
    "qwen3_5_moe": Family(
        "<|image_pad|>",
        {
            "text_config": _TEXT
            | _GATED_DELTA
            | {
                "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32,
            },
            "vision_config": _QWEN_TOWER | {"patch_size": 16, "num_position_embeddings": 16},
        },
        {"shortest_edge": 32 * 32, "longest_edge": 128 * 128},
        around=_VISION,
    ),
    "gemma4": Family(
        "<|image|>",
        _GEMMA4
        | {
            "text_config": _TEXT
            | _GEMMA4_TEXT
            | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
        },
        {},
        _GEMMA4_TOKENS,
        processor={"image_seq_length": 9},
    ),
    "gemma4_large": Family(
        "<|image|>",
        _GEMMA4
        | {
            "text_config": _TEXT
            | _GEMMA4_TEXT
            | {
                "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision", "attention_k_eq_v": True,
                "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
            }
        },
        {},
        _GEMMA4_TOKENS,
        processor={"image_seq_length": 9},
        model_type="gemma4",
    ),
    "glm_ocr": Family(
        "<|image|>",
        {
            "text_config": _TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2]}},
            "vision_config": _QWEN_TOWER | {"image_size": 56, "out_hidden_size": 48},
        },
        {"shortest_edge": 28 * 28, "longest_edge": 112 * 112},
        around=("<|begin_of_image|>", "<|end_of_image|>"),
    ),
    "paddleocr_vl": Family(
        "<|IMAGE_PLACEHOLDER|>",
        {
            "text_config": _TEXT | _ROPE | {"head_dim": 12},
            "vision_config": _TOWER,
        },
        {"shortest_edge": 28 * 28, "longest_edge": 112 * 112},
        tokens={"image_token": "<|IMAGE_PLACEHOLDER|>"},
        around=("<|IMAGE_START|>", "<|IMAGE_END|>"),
    ),
    "deepseek_ocr2": Family(
        "<image>",
        {
            "text_config": _TEXT
            | {
                "mlp_layer_types": ["dense", "sparse", "sparse"], "n_routed_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 32, "n_shared_experts": 1,
            },
            "vision_config": {
                "sam_config": {
                    "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
                    "image_size": 768, "patch_size": 64, "window_size": 5, "global_attn_indexes": [1],
                    "downsample_channels": [24, 32], "initializer_range": 0.3,
                },
                "encoder_config": _SIZES | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
            },
        },
        {"height": 768, "width": 768},  # whose 144 queries are those of the family
        processor={"patch_size": 16},
    ),
    "llava": Family(
        "<image>",
        {"text_config": _TEXT | {"model_type": "llama"}, "vision_config": _TOWER | {"model_type": "clip_vision_model"}},
        {"height": 56, "width": 56},
        processor={"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "mistral3": Family(
        "[IMG]",
        {
            "text_config": _TEXT | {"model_type": "mistral", "head_dim": 12, "sliding_window": None},
            "vision_config": _TOWER | {"model_type": "pixtral"},
            "spatial_merge_size": 2,
        },
        {"longest_edge": 112},
        processor={"patch_size": 14, "spatial_merge_size": 2},
    ),
    "ministral3": Family(
        "[IMG]",
        {
            "text_config": _TEXT
            | {
                "model_type": "ministral3", "head_dim": 12, "sliding_window": None,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "llama_4_scaling_beta": 0.1,
                                    "original_max_position_embeddings": 64},
            },
            "vision_config": _TOWER | {"model_type": "pixtral"},
            "spatial_merge_size": 2,
        },
        {"longest_edge": 112},
        processor={"patch_size": 14, "spatial_merge_size": 2},
        model_type="mistral3",
    ),
    "pixtral": Family(
        "[IMG]",
        {
            "text_config": _TEXT | {"model_type": "mistral", "head_dim": 12, "sliding_window": None},
            "vision_config": _TOWER | {"model_type": "pixtral"},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        {"longest_edge": 84},
        processor={"patch_size": 14},
        model_type="llava",
    ),
    "llava_next": Family(
        "<image>",
        {
            "text_config": _TEXT | {"model_type": "llama"},
            "vision_config": _TOWER | {"model_type": "clip_vision_model"},
            "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
        },
        {"shortest_edge": 56},
        processor={"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "idefics3": Family(
        "<image>",
        {"text_config": _TEXT | {"model_type": "llama"}, "vision_config": _TOWER, "scale_factor": 2},
        {"longest_edge": 112},
        processor={"image_seq_len": 4},
    ),
    "smolvlm": Family(
        "<image>",
        {"text_config": _TEXT | {"model_type": "llama"}, "vision_config": _TOWER, "scale_factor": 2},
        {"longest_edge": 112},
        processor={"image_seq_len": 4},
    ),
    "internvl": Family(
        "<IMG_CONTEXT>",
        {
            "text_config": _TEXT | {"model_type": "qwen2"},
            "vision_config": _TOWER | {"image_size": [56, 56], "patch_size": [14, 14]},
        },
        {"height": 56, "width": 56},
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
         "video_token": "<video>"},
        processor={"image_seq_length": 4},
    ),
    "glm4v": Family(
        "<|image|>",
        {
            "text_config": _TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2]}},
            "vision_config": _QWEN_TOWER | {"image_size": 56, "out_hidden_size": 48},
        },
        {"shortest_edge": 28 * 28, "longest_edge": 112 * 112},
        around=("<|begin_of_image|>", "<|end_of_image|>"),
    ),
    "gemma3": Family(
        "<start_of_image>",
        {
            "text_config": _TEXT
            | {
                "head_dim": 16,
                "sliding_window": 7,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            },
            "vision_config": _TOWER,
            "mm_tokens_per_image": 16,
        },
        {"height": 56, "width": 56},
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        place="<image_soft_token>",
        processor={"image_seq_length": 16},
    ),
}  # fmt: skip


def _write_tokenizer(directory: Path, family: Family) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, extra_special_tokens=family.tokens or None
    )
    begin, end = family.around
    fast.chat_template = (
        "{% for message in messages %}<|{{ message['role'] }}|>"
        "{% if message['content'] is string %}{{ message['content'] }}"
        "{% else %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}" + begin + family.mark + end + "{% else %}{{ part['text'] }}{% endif %}"
        "{% endfor %}{% endif %}" + END + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    fast.save_pretrained(directory)
    return fast


def save_seeing_model(kind: str, directory: Path) -> PreTrainedModel:
    """Save all files that a server needs. Returns the model in float32."""
    transformers_logging.disable_progress_bar()
    family = FAMILIES[kind]
    tokenizer = _write_tokenizer(directory, family)
    torch.manual_seed(0)
    place = {"image_token_id": tokenizer.convert_tokens_to_ids(family.place)}
    video = {"video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>")} if "qwen" in kind else {}
    config = AutoConfig.for_model(
        family.model_type or kind, **family.config, **place, **video, tie_word_embeddings=False
    )
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():  # such as the projection of Gemma 3, which hides all images
        if weight.ndim > 1 and not weight.any():
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(directory)
    _save_processor(kind, family, directory)
    return model


def _save_processor(kind: str, family: Family, directory: Path) -> None:
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    like = {"glm_ocr": "glm46v", "gemma4_large": "gemma4", "ministral3": "mistral3", "pixtral": "mistral3"}.get(
        kind, kind
    )
    name = IMAGE_PROCESSOR_MAPPING_NAMES[like]["pil"]
    processor: Any = getattr(transformers, name)(**({"size": family.size} if family.size else {}))
    if like == "gemma4":
        processor.max_soft_tokens = 70
    if kind == "internvl":
        processor.crop_to_patches, processor.max_patches = True, 3
    if kind in ("idefics3", "smolvlm"):
        processor.max_image_size = {"longest_edge": 56}
    if kind == "llava_next":
        processor.image_grid_pinpoints, processor.crop_size = (
            family.config["image_grid_pinpoints"],
            {"height": 56, "width": 56},
        )
    if kind == "llava":
        processor.crop_size = {"height": 56, "width": 56}
    if kind.startswith("qwen3"):
        processor.patch_size = 16
    processor.save_pretrained(directory)
    settings = family.processor | {"processor_class": PROCESSOR_MAPPING_NAMES[like]}
    (directory / "processor_config.json").write_text(json.dumps(settings))


def make_image(width: int, height: int, seed: int) -> Image.Image:
    """Make a random image with large patches, so that each encoder sees a difference."""
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height))
