"""Chooses the files of a diffusion pipeline, whose parts have a folder each. Used by `fetch`.

Only names that the engine loads are chosen. So variants in other types (`.fp16.safetensors`), weights of other
libraries (Flax, ONNX, OpenVINO), pickles, safety checkers and whole checkpoints at the root are left out.
"""

from collections.abc import Collection
from typing import Final

from conveyor_engine.errors import ModelError
from conveyor_engine.model_files import PIPELINE_INDEX

_WEIGHTS: Final = (
    "text_encoder/model.safetensors",
    "unet/diffusion_pytorch_model.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
)
_TOKENIZER: Final = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json",
    "added_tokens.json",
)  # fmt: skip
_WANTED: Final = (
    PIPELINE_INDEX,
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    *(f"tokenizer/{name}" for name in _TOKENIZER),
    "unet/config.json",
    "vae/config.json",
)


def choose_pipeline_files(title: str, names: Collection[str]) -> list[str]:
    """Return the names that the engine loads. Raises ModelError if the weights of a part are missing."""
    for weights in _WEIGHTS:
        if weights not in names:
            folder = weights.partition("/")[0]
            others = sorted(name for name in names if name.startswith(f"{folder}/"))
            raise ModelError(
                f"{title} has no {weights}, and weights in pickles, in several files or in a variant are not loaded; "
                f"{folder} has {', '.join(others[:10]) or 'no files'}"
            )
    return [name for name in (*_WANTED, *_WEIGHTS) if name in names]
