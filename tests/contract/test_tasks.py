"""Tests the manifests of all tasks but text with the engines that the operator configures and a real gateway."""

import asyncio
import base64
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import yaml
from tests.contract.serving import serving
from tests.engine.classifiers import LABELS, write_served_classifier
from tests.engine.dual_models import save_dual_model
from tests.engine.image_models import draw, encode, save_image_model
from tests.engine.paint_models import save_paint_model
from tests.engine.processes import EngineServer, details_of
from tests.engine.speech_models import draw_sound, save_speech_model
from tests.engine.speech_models import encode as encode_sound
from tests.gateway.process import GatewayProcess

from conveyor_api.resource import InferenceService
from conveyor_operator.inferenceservice.desired import build_owner
from conveyor_operator.inferenceservice.manifests.config import build_engine_config
from e2e import kube
from e2e.cluster.api import Api
from e2e.cluster.paths import REPOSITORY

HERE = ("model", "served_model_name", "device", "port")  # what this machine has in place of a pod
MODELS: dict[str, dict[str, Any]] = {
    "rerank": {"num_labels": 1},
    "classify": {"num_labels": 3, "id2label": dict(enumerate(LABELS))},
    "image-classify": {},
    "image-embed": {},
    "transcribe": {},
    "image-generate": {},
}
DOCUMENTS = ["the fox", "naïve café", "the lazy dog"]
IMAGES = [encode(draw(number)) for number in range(3)]
ENCODED = [base64.b64encode(each).decode() for each in IMAGES]
BODIES: dict[str, dict[str, dict[str, Any]]] = {
    "rerank": {
        "/v1/rerank": {"query": "the fox", "documents": DOCUMENTS},
        "/v2/rerank": {"query": "the fox", "documents": DOCUMENTS},
        "/v1/score": {"text_1": "the fox", "text_2": DOCUMENTS},
        "/score": {"text_1": "the fox", "text_2": DOCUMENTS},
        "/rerank": {"query": "the fox", "texts": DOCUMENTS},
    },
    "classify": {"/classify": {"input": DOCUMENTS}, "/predict": {"inputs": [[text] for text in DOCUMENTS]}},
    "image-classify": {"/v1/images/classify": {"images": ENCODED}},
    "image-embed": {
        "/v1/embeddings": {"modality": "image", "input": [f"data:image/png;base64,{each}" for each in ENCODED]},
        "/embed": {"inputs": DOCUMENTS},
    },
    "transcribe": {},  # whose bodies are forms
    "image-generate": {"/v1/images/generations": {"prompt": "a red star", "num_inference_steps": 2, "seed": 1}},
}

OTHERS = {
    "rerank": "classify",
    "classify": "rerank",
    "image-classify": "rerank",
    "image-embed": "classify",
    "transcribe": "image-classify",
    "image-generate": "classify",
}
"""A task whose paths an engine refuses. A model that embeds also ranks, by cosines."""

PAGES = {
    "rerank": "docs/rerank.md",
    "classify": "docs/classify.md",
    "image-classify": "docs/images.md",
    "image-embed": "docs/image-embeddings.md",
    "transcribe": "docs/audio.md",
    "image-generate": "docs/image-generation.md",
    "see": "docs/images-in-chats.md",
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_the_manifest_of_its_task(name: str) -> None:
    shown = re.search(r"```yaml\n(.*?)```", (REPOSITORY / PAGES[name]).read_text(), re.DOTALL)
    assert shown
    assert shown[1] == (kube.MANIFESTS / f"{name}.yaml").read_text().partition("\n")[2]


@dataclass(frozen=True, slots=True)
class Task:
    """A task, its manifest and its engine."""

    name: str
    engine: EngineServer


IN_CI = ("rerank", "image-classify")


@pytest.fixture(
    scope="module", params=[name if name in IN_CI else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def task(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Task]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "image-classify":
        save_image_model("vit", folder / "tiny")
    elif request.param == "image-generate":
        save_paint_model(folder / "tiny")
    elif request.param == "image-embed":
        save_dual_model("clip", folder / "tiny")
    elif request.param == "transcribe":
        save_speech_model(folder / "tiny")
    else:
        write_served_classifier("bert", folder / "tiny", **MODELS[request.param])
    body = yaml.safe_load((kube.MANIFESTS / f"{request.param}.yaml").read_text())
    text = build_engine_config(build_owner("default", "tiny", "1"), InferenceService.parse(body).spec).text
    fields = {name: value for name, value in yaml.safe_load(text).items() if name not in HERE}
    with EngineServer(folder / "engine", folder / "tiny", host="0.0.0.0", **fields) as engine:
        yield Task(request.param, engine.wait_ready())


async def test_all_paths_of_the_task_answer_through_the_gateway(
    task: Task, gateway: GatewayProcess, crd: Api, namespace: str
) -> None:
    async with serving(task.engine, [gateway], crd, namespace) as service, aiohttp.ClientSession() as http:

        async def post(url: str, body: Any) -> tuple[int, Any]:
            async with http.post(gateway.url + url, json=body) as answer:
                return answer.status, await answer.json()

        for path, body in BODIES[task.name].items():
            direct = await asyncio.to_thread(task.engine.post, path, body)
            expected = (200, pytest.approx(read_scores(direct.json()), abs=1e-5))
            for url, named in ((f"/{service}{path}", body), (path, body | {"model": service})):
                status, answer = await post(url, named)
                assert (status, read_scores(answer)) == expected, url
        for path, body in BODIES[OTHERS[task.name]].items():
            status, refused = await post(f"/{service}{path}", body)
            assert (status, details_of(refused)["code"]) == (400, "wrong_task")
        async with http.get(f"{gateway.url}/{service}/openapi.json") as response:
            document = await response.json()
    for path in BODIES[task.name]:
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["$ref"].rpartition("/")[2] in document["components"]["schemas"]


async def test_a_form_with_images_is_routed_by_its_path_and_by_its_model(
    task: Task, gateway: GatewayProcess, crd: Api, namespace: str
) -> None:
    if task.name != "image-classify":
        return
    path = "/v1/images/classify"
    direct = await asyncio.to_thread(task.engine.post, path, BODIES[task.name][path])
    async with serving(task.engine, [gateway], crd, namespace) as service, aiohttp.ClientSession() as http:
        for url, model in ((f"/{service}{path}", "tiny"), (path, service)):
            form = aiohttp.FormData({"model": model})
            for number, image in enumerate(IMAGES):
                form.add_field("image", image, filename=f"{number}.png", content_type="image/png")
            async with http.post(gateway.url + url, data=form) as answer:
                assert answer.status == 200, await answer.text()
                assert read_scores(await answer.json()) == pytest.approx(read_scores(direct.json()), abs=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # of the client: OpenAI has no newer translations
async def test_audio_is_routed_by_its_path_and_by_its_model_and_may_be_long(
    task: Task, gateway: GatewayProcess, crd: Api, namespace: str
) -> None:
    """As OpenAI's client sends it, whole and streamed. 24 MiB are more than other bodies may have."""
    if task.name != "transcribe":
        return
    sound = np.repeat(draw_sound(0, 8.2, 192_000)[:, np.newaxis], 4, axis=1)
    file = ("x.wav", encode_sound(sound, rate=192_000, subtype="FLOAT"))

    def send(base: str, model: str) -> list[str]:
        with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
            audio = client.audio
            texts = [audio.transcriptions.create(model=model, file=file, language="de").text]
            texts.append(audio.translations.create(model=model, file=file).text)
            *_, done = audio.transcriptions.create(model=model, file=file, language="de", stream=True)
            return [*texts, done.text]  # type: ignore[union-attr]

    direct = await asyncio.to_thread(send, f"{task.engine.url}/v1", "tiny")
    assert direct[0] == direct[2] != direct[1]
    async with serving(task.engine, [gateway], crd, namespace) as service:
        assert await asyncio.to_thread(send, f"{gateway.url}/{service}/v1", "tiny") == direct
        assert await asyncio.to_thread(send, f"{gateway.url}/v1", service) == direct


async def test_the_page_s_request_for_images_is_answered(
    task: Task, gateway: GatewayProcess, crd: Api, namespace: str
) -> None:
    if task.name != "image-embed":
        return
    page = (REPOSITORY / "docs/image-embeddings.md").read_text()
    command = re.search(r"```sh\n(.*?)```", page, re.DOTALL)
    assert command
    async with serving(task.engine, [gateway], crd, namespace) as service:
        command_line = command[1].replace("http://127.0.0.1:8080/default/image-embed", f"{gateway.url}/{service}")
        run = await asyncio.create_subprocess_exec(
            "bash", "-c", command_line, cwd=REPOSITORY, stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await run.communicate()
    (one,) = json.loads(printed)["data"]
    assert sum(number * number for number in one["embedding"]) == pytest.approx(1)


def read_scores(answer: Any) -> list[float]:
    """Return all numbers in an answer that come from the model, in order."""
    if isinstance(answer, dict):
        named = [answer[name] for name in ("relevance_score", "score") if name in answer]
        return named + [n for value in answer.values() for n in read_scores(value)]
    if isinstance(answer, list):
        return [n for value in answer for n in ([value] if isinstance(value, float) else read_scores(value))]
    return []
