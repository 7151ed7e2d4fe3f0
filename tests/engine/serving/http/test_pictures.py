"""/v1/images/generations on a real server, with the pictures of diffusers' pipeline: docs/image-generation.md."""

import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from jsonschema import Draft202012Validator
from PIL import Image
from tests.engine.paint_models import Brief, Pixels, open_pipeline, paint, save_paint_model
from tests.engine.processes import EngineServer, error_of
from tests.engine.receipts import ASKED, check_receipt
from tests.engine.serving.http.other_tasks import list_paths

from conveyor_engine.tasks.imagegenerate.facts import Size

PATH = "/v1/images/generations"
BODY: dict[str, Any] = {"prompt": "a red circle", "seed": 3, "num_inference_steps": 4, "guidance_scale": 5.0}


class Served:
    """A server of a tiny model, and diffusers' pipeline."""

    def __init__(self, server: EngineServer, pipeline: Any) -> None:
        self.server, self.pipeline = server, pipeline

    def post(self, status: int = 200, **fields: Any) -> Any:
        answer = self.server.post(PATH, BODY | fields)
        assert answer.status_code == status, answer.text
        return answer.json()

    def expect(self, seed: int = 3, **changes: Any) -> Pixels:
        return paint(self.pipeline, Brief("a red circle", seed)._replace(**changes))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("paint")
    save_paint_model(folder / "tiny")
    with EngineServer(folder / "server", folder / "tiny", max_num_seqs=4, num_threads=1, dtype="float32") as server:
        yield Served(server.wait_ready(), open_pipeline(folder / "tiny"))


def read(text: str) -> Pixels:
    image = Image.open(io.BytesIO(base64.b64decode(text)))
    assert (image.format, image.mode) == ("PNG", "RGB")
    return np.asarray(image)


def assert_same(ours: Pixels, theirs: Pixels) -> None:
    assert ours.shape == theirs.shape
    assert int(np.abs(ours.astype(int) - theirs).max()) <= 1


def test_pictures_are_those_of_the_pipeline_each_with_its_seed(served: Served) -> None:
    answer = served.post(n=2, size="48x32", negative_prompt="blue star", model="tiny")
    assert [one["seed"] for one in answer["data"]] == [3, 4]
    for one in answer["data"]:
        assert_same(read(one["b64_json"]), served.expect(one["seed"], size=Size(48, 32), negative="blue star"))
    assert (answer["size"], answer["output_format"]) == ("48x32", "png")
    assert answer["usage"]["input_tokens"] == answer["usage"]["total_tokens"] > 2 * 5
    assert served.server.metric("conveyor_engine_steps_total") >= 4


def test_without_a_seed_pictures_differ_and_can_be_made_again(served: Served) -> None:
    first, second = (served.post(seed=None)["data"][0] for _ in range(2))
    assert first["b64_json"] != second["b64_json"]
    assert served.post(seed=first["seed"])["data"][0]["b64_json"] == first["b64_json"]


def test_a_request_without_steps_and_guidance_has_those_of_the_pipeline(served: Served) -> None:
    (picture,) = served.post(num_inference_steps=None, guidance_scale=None)["data"]
    assert_same(read(picture["b64_json"]), served.expect(num_steps=50, guidance=7.5))


def test_pictures_of_several_clients_share_steps(served: Served) -> None:
    steps = served.server.metric("conveyor_engine_steps_total")
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda seed: served.post(seed=seed, num_inference_steps=20), range(4)))
    for seed, answer in enumerate(answers):
        assert_same(read(answer["data"][0]["b64_json"]), served.expect(seed, num_steps=20))
    assert served.server.metric("conveyor_engine_steps_total") - steps < 80


def test_openai_s_client_reads_pictures_and_streams_with_previews(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.server.url}/v1", api_key="none", max_retries=0)
    extra = {name: BODY[name] for name in ("seed", "num_inference_steps", "guidance_scale")}
    named: dict[str, Any] = {"prompt": BODY["prompt"], "model": "tiny", "extra_body": extra, "user": "me"}
    answer = client.images.generate(**named, response_format="b64_json", size="auto", quality="standard")
    assert answer.data is not None
    assert_same(read(answer.data[0].b64_json or ""), served.expect())
    events: list[Any] = list(client.images.generate(**named, stream=True, partial_images=2))
    kinds = ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert [event.type for event in events] == kinds
    assert [event.partial_image_index for event in events[:2]] == [0, 1]
    assert len({event.b64_json for event in events}) == 3
    assert_same(read(events[-1].b64_json), served.expect())
    assert events[-1].usage.input_tokens == 5


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"prompt": ""}, "prompt", "at least 1 character"),
        ({"prompt": "x" * 1_000_000}, "prompt", "at most 32000 characters"),
        ({"negative_prompt": "x" * 40_000}, "negative_prompt", "at most 32000 characters"),
        ({"n": 1000}, "n", "less than or equal to 10"),
        ({"size": "50000x50000"}, "size", "size 50000x50000 is too large: this model allows 4096 pixels in all"),
        ({"size": "129x8"}, "size", "128 pixels for a side"),
        ({"size": "33x32"}, "size", "must have sides that are multiples of 8 pixels"),
        ({"size": "0x0"}, "size", "pattern"),
        ({"size": "9" * 100_000}, "size", "pattern"),
        ({"num_inference_steps": 10_000}, "num_inference_steps", "less than or equal to 500"),
        ({"num_inference_steps": 0}, "num_inference_steps", "greater than or equal to 1"),
        ({"guidance_scale": 1e9}, "guidance_scale", "less than or equal to 100"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"seed": 2**63 - 1, "n": 2}, "seed", "so that the last one is below"),
        ({"response_format": "url"}, "response_format", "must be b64_json: this server stores no pictures"),
        ({"output_format": "jpeg"}, "output_format", "png"),
        ({"partial_images": 2}, "partial_images", "only allowed when stream is true"),
        ({"partial_images": 9, "stream": True}, "partial_images", "less than or equal to 3"),
        ({"n": 2, "stream": True}, "stream", "only allowed when n is 1"),
    ],
)
def test_what_cannot_be_made_is_one_error_that_names_the_field(
    served: Served, fields: dict[str, Any], param: str, sentence: str
) -> None:
    error = error_of(served.server.post(PATH, BODY | fields))
    assert error["param"] == param
    assert sentence in error["message"]


def test_other_paths_are_refused_and_other_models(served: Served) -> None:
    for path in list_paths("generates images"):
        answer = served.server.post(path, {})
        assert (answer.status_code, "makes pictures" in answer.text) == (400, True), path
    assert served.post(404, model="other")["error"]["code"] == "model_not_found"


def test_a_client_that_leaves_ends_its_picture(served: Served) -> None:
    with pytest.raises(httpx.TimeoutException):
        httpx.post(served.server.url + PATH, json=BODY | {"num_inference_steps": 500}, timeout=0.3)
    served.server.wait_load(waiting=0, running=0)


def test_a_stream_begins_with_an_error_status_if_it_fails_before_its_first_event(served: Served) -> None:
    answer = served.server.post(
        PATH, BODY | {"stream": True, "num_inference_steps": 500}, **{"X-Request-Timeout-Seconds": "0.2"}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_costs_are_counted_in_pixels_and_answers_are_as_the_document_says(served: Served) -> None:
    document = served.server.get("/openapi.json").json()
    schema = {"$ref": "#/components/schemas/PictureList", "components": document["components"]}
    Draft202012Validator(schema).validate(served.post())
    answer = served.server.post(PATH, BODY | {"stream": True, "partial_images": 1})
    assert answer.headers["content-type"].startswith("text/event-stream")
    for line in answer.text.splitlines():
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            name = "PartialPicture" if event["type"].endswith("partial_image") else "CompletedPicture"
            of_event = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
            Draft202012Validator(of_event).validate(event)
    assert served.server.metric("vllm:request_success_total", finished_reason="stop") >= 2


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_its_receipt(served: Served, stream: bool) -> None:
    body = {"prompt": "a fox", "num_inference_steps": 2, "stream": stream}
    answer = served.server.post(PATH, body, **ASKED)
    assert answer.status_code == 200, answer.text
    text = [line for line in answer.text.splitlines() if line.startswith("data: ")][-1][6:] if stream else answer.text
    check_receipt(json.loads(text)["usage"]["receipt"])
