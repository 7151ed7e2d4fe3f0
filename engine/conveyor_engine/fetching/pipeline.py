"""Chooses the files of a diffusion pipeline, whose parts have a folder each. Used by `fetch`.

Only names that the engine loads are chosen. So variants in other types (`.fp16.safetensors`), weights of other
libraries (Flax, ONNX, OpenVINO), pickles, safety checkers and whole checkpoints at the root are left out.
"""

import re
from collections.abc import Collection
from typing import Final

from conveyor_engine.errors import ModelError
from conveyor_engine.model_files import PIPELINE_INDEX, PIPELINE_TOKENIZERS, PIPELINE_WEIGHTS

_OF_TOKENIZER: Final = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json",
    "added_tokens.json",
)  # fmt: skip
_WANTED: Final = (
    PIPELINE_INDEX,
    "scheduler/scheduler_config.json",
    *(f"{folder}/config.json" for folder in PIPELINE_WEIGHTS),
    *(f"{folder}/{name}" for folder in PIPELINE_TOKENIZERS for name in _OF_TOKENIZER),
)


def choose_pipeline_files(title: str, names: Collection[str]) -> list[str]:
    """Return the names that the engine loads. Raises ModelError if the weights of a part are missing."""
    denoiser = "transformer" if "transformer/config.json" in names else "unet"
    folders = [
        folder
        for folder in PIPELINE_WEIGHTS
        if f"{folder}/config.json" in names or folder in ("text_encoder", denoiser, "vae")
    ]
    weights = [name for folder in folders for name in _choose_weights(title, names, folder)]
    return [name for name in _WANTED if name in names] + weights


def _choose_weights(title: str, names: Collection[str], folder: str) -> list[str]:
    """Return the weights of a part: one file, or an index with the files of its name. Raises ModelError."""
    stem = f"{folder}/{PIPELINE_WEIGHTS[folder]}"
    whole, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    if whole in names:
        return [whole]
    shard = re.compile(rf"{re.escape(stem)}-\d{{5}}-of-\d{{5}}\.safetensors")
    if index in names and (shards := sorted(filter(shard.fullmatch, names))):
        return [index, *shards]
    others = sorted(name for name in names if name.startswith(f"{folder}/"))
    raise ModelError(
        f"{title} has no {whole}, and weights in pickles or in a variant are not loaded; "
        f"{folder} has {', '.join(others[:10]) or 'no files'}"
    )
