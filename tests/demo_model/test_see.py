"""The model that is trained here on pictures with questions, as the engine serves it."""

import base64
import io
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image
from tests.engine.processes import EngineServer

from e2e.demo.tasks import TASKS
from e2e.demo_model import SEEING, demo_model_directory
from e2e.demo_model.scenes import draw_questions, draw_scene

PICTURES = 100
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]  # trains for minutes where the cache has no model


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    with EngineServer(tmp_path_factory.mktemp("see"), demo_model_directory(SEEING), max_num_seqs=16) as engine:
        yield engine.wait_ready()


def show(picture: Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def ask(engine: EngineServer, messages: list[dict[str, Any]]) -> str:
    answer = engine.post("/v1/chat/completions", {"messages": messages, "temperature": 0}).json()
    content: str = answer["choices"][0]["message"]["content"]
    return content


def test_pictures_that_it_has_not_seen_get_right_answers(engine: EngineServer) -> None:
    draw = random.Random("unseen")
    asked = []
    for _ in range(PICTURES):
        scene = draw_scene(draw)
        for question, answer in draw_questions(scene, draw):
            parts = [show(scene.picture), {"type": "text", "text": question}]
            draw.shuffle(parts)
            asked.append(([{"role": "user", "content": parts}], question, answer))
    with ThreadPoolExecutor(16) as clients:
        found = list(clients.map(lambda each: ask(engine, each[0]), asked))
    wrong = [(question, answer, own) for (_, question, answer), own in zip(asked, found, strict=True) if own != answer]
    assert len(wrong) <= 0.08 * len(asked), f"{len(wrong)} of {len(asked)}: {wrong[:10]}"


def test_a_conversation_goes_on_about_its_picture(engine: EngineServer) -> None:
    task = TASKS["see"]
    answers = [engine.post(task.path, body).json() for body in (task.body, task.second)]
    assert task.describe(*answers) == ["a red circle and a blue square", "a red circle"]
    messages = [*task.body["messages"], {"role": "assistant", "content": "a red circle and a blue square"}]
    for question, answer in (("How many shapes are there?", "two"), ("What is on the right?", "a blue square")):
        messages.append({"role": "user", "content": question})
        assert ask(engine, messages) == answer
        messages.append({"role": "assistant", "content": answer})
