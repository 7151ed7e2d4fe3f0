"""Tests images and texts at /v1/embeddings on a real server against transformers' vectors."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from tests.engine.dual_models import KINDS, SIZE, embed_image, embed_text, save_dual_model
from tests.engine.image_models import draw, encode
from tests.engine.processes import EngineServer
from tokenizers import Tokenizer
from transformers.image_utils import load_image

PATH = "/v1/embeddings"
FILES = [
    encode(draw(0, (200, 150)), "JPEG"),
    encode(draw(1, (40, 60))),
    encode(draw(2), "WEBP"),
    encode(draw(3), "GIF"),
]
URIS = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in FILES]
TEXTS = ["the fox", "naïve café", "the lazy dog"]


class Served:
    """A server with a tiny model, and transformers' vectors."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.directory = folder / "tiny"
        self.model = save_dual_model(kind, self.directory)
        self.tokenizer = Tokenizer.from_file(str(self.directory / "tokenizer.json"))
        self.server = EngineServer(folder / "server", self.directory, max_num_seqs=4)
        self.images = [embed_image(self.model, self.directory, load_image(uri.partition(",")[2])) for uri in URIS]
        self.texts = [embed_text(self.model, self.tokenizer.encode(text).ids) for text in TEXTS]

    def post(self, status: int = 200, **fields: Any) -> Any:
        answer = self.server.post(PATH, {"input": URIS, "modality": "image"} | fields)
        assert answer.status_code == status, answer.text
        return answer.json()


@pytest.fixture(scope="module", params=[KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    one = Served(tmp_path_factory.mktemp("dual"), request.param)
    with one.server as server:
        server.wait_ready()
        yield one


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    one = Served(tmp_path_factory.mktemp("dual"), "clip")
    with one.server as server:
        server.wait_ready()
        yield one


def assert_vectors(answer: Any, expected: list[torch.Tensor]) -> None:
    assert [one["index"] for one in answer["data"]] == list(range(len(expected)))
    for one, vector in zip(answer["data"], expected, strict=True):
        assert one["embedding"] == pytest.approx(vector.tolist(), abs=1e-4)


def test_images_and_texts_get_the_vectors_of_transformers(served: Served) -> None:
    answer = served.post(model="tiny")
    assert_vectors(answer, served.images)
    num_tokens = len(URIS) * (17 if served.model.config.model_type == "clip" else 16)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    texts = served.post(input=TEXTS, modality="text")
    assert_vectors(texts, served.texts)
    assert texts["usage"]["prompt_tokens"] == sum(len(served.tokenizer.encode(text).ids) for text in TEXTS)
    assert_vectors(served.server.post(PATH, {"input": TEXTS}).json(), served.texts)


def test_base64_without_a_uri_and_a_single_image_do_too(clip: Served) -> None:
    assert_vectors(clip.post(input=URIS[1].partition(",")[2]), clip.images[1:2])


def test_images_and_texts_of_several_clients_share_batches(clip: Served) -> None:
    steps = clip.server.metric("conveyor_engine_steps_total")

    def send(number: int) -> Any:
        if number % 2:
            return clip.post(input=[TEXTS[number % 3]], modality="text")
        return clip.post(input=[URIS[number % 4]])

    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(send, range(18)))
    for number, answer in enumerate(answers):
        assert_vectors(answer, [clip.texts[number % 3] if number % 2 else clip.images[number % 4]])
    assert clip.server.metric("conveyor_engine_steps_total") - steps < len(answers)


def test_the_client_of_openai_sends_images(clip: Served) -> None:
    with OpenAI(base_url=clip.server.url + "/v1", api_key="-") as client:
        answer = client.embeddings.create(model="tiny", input=URIS, extra_body={"modality": "image"})
    for one, vector in zip(answer.data, clip.images, strict=True):
        assert one.embedding == pytest.approx(vector.tolist(), abs=1e-4)


def test_tei_s_path_embeds_texts(clip: Served) -> None:
    answer = clip.server.post("/embed", {"inputs": TEXTS})
    for one, vector in zip(answer.json(), clip.texts, strict=True):
        assert one == pytest.approx(vector.tolist(), abs=1e-4)
    raw = clip.server.post("/embed", {"inputs": TEXTS, "normalize": False}).json()
    assert abs(sum(x * x for x in raw[0]) - 1) > 0.01


def as_uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"input": ["https://example.com/star.png"]}, "input", "is a URL, and this server fetches none"),
    ({"input": [URIS[0], "http://169.254.169.254/"]}, "input[1]", "is a URL, and this server fetches none"),
    ({"input": ["file:///etc/passwd"]}, "input", "is a URL, and this server fetches none"),
    ({"input": ["the fox"]}, "input", "is not base64"),
    ({"input": [URIS[0], as_uri(b"no image")]}, "input[1]", "is not an image"),
    ({"input": [as_uri(FILES[1][:90])]}, "input", "is a broken image"),
    ({"input": [as_uri(encode(draw(0, (1, 200))))]}, "input", "one side may be 100 times"),
    ({"input": ["data:image/png,abc"]}, "input", "is a data: URI without base64"),
    ({"input": [1, 2, 3]}, "input", "has token ids"),
    ({"input": [URIS[1]] * 65}, "input", "has 65 images; at most 64 are allowed"),
    ({"modality": "audio"}, "modality", "must be 'text' or 'image'"),
    ({"dimensions": 7}, "dimensions", "dimensions is 7"),
    ({"modality": "text", "input": ["fox " * 40]}, "input", "24"),
)


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_what_cannot_be_embedded_is_named(clip: Served, fields: dict[str, Any], param: str, words: str) -> None:
    error = clip.post(400, **fields)["error"]
    assert (error["param"], words in error["message"]) == (param, True), error
    assert len(clip.post(input=URIS[:1])["data"][0]["embedding"]) == SIZE
