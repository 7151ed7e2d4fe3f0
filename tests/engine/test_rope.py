"""Rotary embeddings whose frequencies change with a batch's longest text use those for `max_model_len` tokens."""

from pathlib import Path
from typing import Any

import pytest
from tests.engine.encoders import save_encoder
from tests.engine.references import Reference, answers
from tests.engine.tiny_models import greedy, save_tiny_model

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.models.kinds import TEXT_ENCODER
from conveyor_engine.execution.models.loader import load_config

ORIGINAL = 32  # tokens up to which the short factors apply
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 6,
    "long_factor": [8.0] * 6,
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


class Scaled(Reference):
    """A tiny model with these rotary embeddings. `prompts` and `answers` are for texts up to ORIGINAL tokens."""

    def __init__(self, directory: Path, rope: dict[str, Any]) -> None:
        self.directory = directory
        changes = {"original_max_position_embeddings": ORIGINAL, "sliding_window": None} if rope is LONGROPE else {}
        self.model = save_tiny_model("phi3" if changes else "llama", directory, rope_parameters=rope, **changes)
        self.prompts = [[5, 9, 11], list(range(20, 32))]
        self.answers = [greedy(self.model, prompt, 20) for prompt in self.prompts]
        self.long = [list(range(1, 51)), list(range(60, 105))]
        self.long_answers = [greedy(self.model, prompt, 20) for prompt in self.long]


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_short_texts_have_the_tokens_of_generate(tmp_path: Path, rope: dict[str, Any]) -> None:
    ref = Scaled(tmp_path, rope)
    assert answers(ref.make_core(max_model_len=ORIGINAL), ref.prompts) == ref.answers


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_long_texts_have_them_whatever_shares_their_batch(tmp_path: Path, rope: dict[str, Any]) -> None:
    ref = Scaled(tmp_path, rope)
    found = answers(ref.make_core(max_model_len=96), ref.long + ref.prompts)
    assert found[:2] == ref.long_answers
    assert (found[2:] == ref.answers) == (rope is DYNAMIC), "the long factors apply to short texts too"


def test_encoders_with_such_embeddings_are_refused(tmp_path: Path) -> None:
    save_encoder("qwen3", tmp_path, rope_parameters=DYNAMIC)
    with pytest.raises(ModelError, match="RoPE scaling of type dynamic"):
        load_config(str(tmp_path), TEXT_ENCODER)
