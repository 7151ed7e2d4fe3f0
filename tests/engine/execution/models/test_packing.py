"""Checks that a model whose results change with packing is rejected at start, but not because of rounding."""

from pathlib import Path

import pytest
from tests.engine.embedding_cores import PROMPTS, answers, distance, make_core
from tests.engine.encoders import save_encoder

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.attention import packed


@pytest.mark.parametrize("kind", ["qwen3", "xlm-roberta"])
def test_half_precision_is_not_taken_for_a_change_by_packing(tmp_path: Path, kind: str) -> None:
    """Use 28 layers in bfloat16. Eager attention alone then causes errors of several hundredths."""
    save_encoder(kind, tmp_path, num_hidden_layers=28)
    core = make_core(tmp_path, task="embed", dtype="bfloat16")
    alone = [answers(core, [prompt])[0] for prompt in PROMPTS]
    assert distance(answers(core, PROMPTS), alone) < 0.05


def test_a_model_that_packing_would_change_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_encoder("xlm-roberta", tmp_path, pad_token_id=None)  # so that the first position cannot be found
    monkeypatch.setattr(packed.Packed, "attend", lambda self, spec, query, key, value: value)
    with pytest.raises(ModelError, match="packed"):
        make_core(tmp_path)
