"""Tests what is read of an image whose size matters."""

from pathlib import Path

from PIL import Image
from tests.engine.seeing_models import save_seeing_model

from conveyor_engine.images.decoding import SHOWN_PIXELS_MAX
from conveyor_engine.tasks.generate.chat_pictures import load_chat_pictures


def test_the_largest_image_is_not_square_if_another_aspect_ratio_has_more_tiles(tmp_path: Path) -> None:
    save_seeing_model("internvl", tmp_path)
    reader = load_chat_pictures(tmp_path)
    side = int(SHOWN_PIXELS_MAX**0.5)
    square, largest = reader.read(Image.new("RGB", (side, side)))[0], reader.read_largest()
    assert largest.num_places > 2 * square.num_places
    assert largest.tensors["pixel_values"].shape[0] > 2 * square.tensors["pixel_values"].shape[0]
