"""The models that are trained here on pictures of shapes, as the engine serves them."""

import base64
import io
import random
from pathlib import Path

import pytest
from tests.engine.processes import EngineServer

from e2e.demo.tasks import PICTURES, TASKS
from e2e.demo_model import IMAGE_CLASSIFIER, IMAGE_EMBEDDING, demo_model_directory
from e2e.demo_model.shapes import SHAPES, draw_shape


def encode(shape: str, draw: random.Random) -> str:
    file = io.BytesIO()
    draw_shape(shape, draw).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.nightly  # trains for half a minute where the cache has no model
@pytest.mark.timeout(1800)
def test_shapes_that_it_has_not_seen_are_named(tmp_path: Path) -> None:
    draw, shapes = random.Random("unseen"), list(SHAPES) * 15
    with EngineServer(tmp_path, demo_model_directory(IMAGE_CLASSIFIER)) as engine:
        engine.wait_ready()
        answer = engine.post("/v1/images/classify", {"images": [encode(shape, draw) for shape in shapes]})
        labels = [each["label"] for each in answer.json()["data"]]
        assert sum(a == b for a, b in zip(labels, shapes, strict=True)) >= 0.85 * len(shapes)
        task = TASKS["image-classify"]
        answer = engine.post(task.path, task.body)
        assert [each["label"] for each in answer.json()["data"]] == list(SHAPES)
        star = base64.b64encode(Path("examples/star.png").read_bytes()).decode()
        assert engine.post(task.path, {"images": [star]}).json()["data"][0]["label"] == "star"


@pytest.mark.nightly  # trains for two minutes where the cache has no model
@pytest.mark.timeout(1800)
def test_pictures_are_found_by_words(tmp_path: Path) -> None:
    with EngineServer(tmp_path, demo_model_directory(IMAGE_EMBEDDING)) as engine:
        engine.wait_ready()
        task = TASKS["image-embed"]
        lines = task.describe(*(engine.post(task.path, body).json() for body in (task.body, task.second)))
        assert all(f"the {picture} (" in line for picture, line in zip(PICTURES, lines, strict=True))
