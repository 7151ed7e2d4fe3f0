"""A tiny model of speech with random weights, and sounds for it."""

import io
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import soundfile
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.utils import logging as transformers_logging

from e2e.demo_model.train_tones import WINDOW_SECONDS, build_config, build_generation_config, build_tokenizer

RATE: Final = 16_000


def build_speech_model(**changes: Any) -> WhisperForConditionalGeneration:
    """The model with random weights, ready to run."""
    torch.manual_seed(0)
    ids = build_tokenizer().get_vocab()
    config: WhisperConfig = build_config(ids)
    config.update({"d_model": 32, "init_std": 0.6, **changes})
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight[ids["<|endoftext|>"]].normal_(0, 2)  # 0: it would never come
    model.generation_config = build_generation_config(ids)
    return model


def save_speech_model(directory: Path, **changes: Any) -> WhisperForConditionalGeneration:
    """Weights, configuration, tokenizer and feature extractor; returns the model in float32."""
    transformers_logging.disable_progress_bar()
    model = build_speech_model(**changes)
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    extractor = WhisperFeatureExtractor(chunk_length=WINDOW_SECONDS, feature_size=model.config.num_mel_bins)
    extractor.save_pretrained(directory)
    return model


def draw_sound(number: int, seconds: float, rate: int = RATE) -> npt.NDArray[np.float32]:
    """A random sound whose loudness and pitch change; the same for the same number."""
    random, length = np.random.default_rng(number), round(seconds * rate)
    times = np.arange(length) / rate
    pitch = np.interp(times, np.arange(0, seconds + 1, 0.25)[: int(seconds * 4) + 1], random.uniform(
        200, 3000, int(seconds * 4) + 1
    ))  # fmt: skip
    loudness = np.abs(np.sin(times * random.uniform(1, 4)))
    sound = loudness * np.sin(2 * np.pi * np.cumsum(pitch) / rate) * 0.3 + random.normal(0, 0.003, length)
    return sound.astype(np.float32)


def encode(samples: npt.NDArray[Any], kind: str = "WAV", rate: int = RATE, subtype: str | None = None) -> bytes:
    """The bytes of a file."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()
