"""Features are those of transformers' extractor with torch, in whatever pieces the samples come."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.speech_models import RATE, draw_sound
from transformers import WhisperFeatureExtractor

from conveyor_engine.errors import ModelError
from conveyor_engine.tasks.transcribe.features import build_mel_filters, load_extractor


@pytest.mark.parametrize("num_mels", [80, 128])
@pytest.mark.parametrize("seconds", [0.1, 4.3, 6.0, 15.003])
def test_features_are_those_of_transformers(tmp_path: Path, num_mels: int, seconds: float) -> None:
    theirs = WhisperFeatureExtractor(feature_size=num_mels, chunk_length=6)
    theirs.save_pretrained(tmp_path)
    ours, sound = load_extractor(tmp_path), draw_sound(1, seconds)
    fill = {"truncation": False, "padding": "longest"} if seconds > 6 else {}
    expected = theirs(sound, sampling_rate=RATE, return_tensors="np", **fill).input_features[0].T
    for size in (len(sound), 7001, 150):
        found, num_frames = ours.extract(sound[start : start + size] for start in range(0, len(sound), size))
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() < 2e-4
        assert num_frames == len(sound) // 160


def test_filters_are_those_of_transformers() -> None:
    assert np.abs(build_mel_filters(80, 400, RATE) - WhisperFeatureExtractor().mel_filters).max() < 1e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feature_size": 10**9}, "has feature_size 1000000000; 8 to 256 is possible"),
        ({"chunk_length": "30"}, "has chunk_length 30; 1 to 60 is possible"),
        ({"dither": 0.1}, "has dither or do_normalize"),
        ({"feature_extractor_type": "Wav2Vec2FeatureExtractor"}, "is for a Wav2Vec2FeatureExtractor"),
    ],
)
def test_a_file_with_other_numbers_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(changes))
    with pytest.raises(ModelError, match=message):
        load_extractor(tmp_path)


def test_a_model_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no preprocessor_config\.json"):
        load_extractor(tmp_path)
