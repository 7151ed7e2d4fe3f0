"""Compares our processor for Pixtral and Mistral 3 with transformers' own class, whose module gets no torchvision."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.engine.seeing_models import make_image, save_seeing_model

from conveyor_engine.tasks.generate.chat_pictures import load_chat_pictures
from conveyor_engine.tasks.generate.execution.sight import unpack

# As published with Mistral Small 3.1, with smaller images.
_IMAGES = {
    "image_processor_type": "PixtralImageProcessorFast", "processor_class": "PixtralProcessor",
    "size": {"longest_edge": 140}, "patch_size": {"height": 14, "width": 14}, "resample": 3, "do_pad": True,
}  # fmt: skip
_PROCESSOR = {
    "processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2, "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]",
}  # fmt: skip


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    without_torchvision: Any = ModuleType("image_processing_pixtral")
    without_torchvision.get_resize_output_image_size = None
    folder = "transformers.models.pixtral"
    monkeypatch.setitem(sys.modules, f"{folder}.image_processing_pixtral", without_torchvision)
    monkeypatch.delitem(sys.modules, f"{folder}.processing_pixtral", raising=False)
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    return type("PixtralProcessor", (PixtralProcessor,), {"check_argument_for_proper_class": lambda *_: None})


@pytest.mark.parametrize("size", [(100, 60), (29, 28), (20, 300), (1, 90), (141, 140)])
def test_images_are_read_as_by_transformers(tmp_path: Path, theirs: Any, size: tuple[int, int]) -> None:
    save_seeing_model("mistral3", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(_IMAGES))
    (tmp_path / "processor_config.json").write_text(json.dumps(_PROCESSOR))
    reader = load_chat_pictures(tmp_path)
    own = reader._processor
    settings = {name: value for name, value in _PROCESSOR.items() if name != "processor_class"}
    processor = theirs(own.image_processor, own.tokenizer, **settings)
    image = make_image(*size, seed=1)
    expected, (text,) = processor._process_images([image])
    picture, shown = reader.read(image)
    assert shown == text
    assert picture.num_places == text.count("[IMG]")
    assert picture.tensors["pixel_values"].data == expected["pixel_values"].tobytes()
    assert picture.tensors["image_sizes"].shape == (1, 2)


@pytest.mark.parametrize("size", [(1, 1), (28, 28), (20, 9), (1, 27)])
def test_an_image_that_would_be_one_token_is_enlarged(tmp_path: Path, size: tuple[int, int]) -> None:
    """The encoder of transformers' Mistral 3 raises for one token."""
    model = save_seeing_model("mistral3", tmp_path)
    picture, _ = load_chat_pictures(tmp_path).read(make_image(*size, seed=1))
    assert picture.num_places > 1
    inputs = {name: unpack(picture, name) for name in picture.tensors}
    (features,) = model.base_model.get_image_features(**inputs, return_dict=True).pooler_output
    assert len(features) == picture.num_places
