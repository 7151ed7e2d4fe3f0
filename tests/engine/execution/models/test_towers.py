"""Checks that encoders of images use no memory in a model that answers texts, and that such a model is checked."""

from pathlib import Path

import pytest
import torch
from tests.engine.tiny_models import IMAGE_TEXT_KINDS, save_tiny_model

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.attention import packed
from conveyor_engine.execution.models import loader
from conveyor_engine.execution.models.loader import load_config, load_model


@pytest.mark.parametrize("kind", IMAGE_TEXT_KINDS)
def test_a_tower_is_not_loaded(tmp_path: Path, kind: str) -> None:
    whole = {name for name, _ in save_tiny_model(kind, tmp_path).named_parameters()}
    model = load_model(str(tmp_path), load_config(str(tmp_path)), torch.float32, torch.device("cpu"))
    gone = whole - {name for name, _ in model.named_parameters()}
    assert gone
    assert all(name.startswith(("model.visual.", "model.vision_tower.")) for name in gone)


def test_a_text_that_attends_otherwise_than_in_transformers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model("qwen3_vl", tmp_path)
    monkeypatch.setattr(packed, "_attend_whole", lambda query, key, value, spec: value.repeat(1, 2, 1))
    with pytest.raises(ModelError, match="gives other results"):
        load_model(str(tmp_path), load_config(str(tmp_path)), torch.float32, torch.device("cpu"))


def test_a_text_whose_positions_do_not_begin_with_0_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model("qwen3_vl", tmp_path)
    monkeypatch.setattr(loader, "find_first_position", lambda _: 2)
    with pytest.raises(ModelError, match="counts positions from 2"):
        load_model(str(tmp_path), load_config(str(tmp_path)), torch.float32, torch.device("cpu"))
