"""/v1/images/classify on a real server, with the labels and scores of transformers' pipeline: docs/images.md."""

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from jsonschema import Draft202012Validator
from PIL import Image
from tests.engine.image_models import LABELS, draw, encode, open_pipeline, save_image_model
from tests.engine.processes import EngineServer, error_of
from tests.engine.receipts import ASKED, check_receipt
from tests.engine.serving.http.other_tasks import list_paths
from transformers.image_utils import load_image
from tritonclient.utils import InferenceServerException

PATH = "/v1/images/classify"
FILES = [
    encode(draw(0, (200, 150)), "JPEG"),
    encode(draw(1, (40, 60))),
    encode(draw(2), "WEBP"),
    encode(draw(3, mode="P"), "GIF"),
    encode(draw(4, (1, 1))),
]
TEXTS = [base64.b64encode(data).decode() for data in FILES]
MODELS: dict[str, dict[str, Any]] = {
    "one of several": {"kind": "vit"},
    "several at once": {"kind": "resnet", "problem_type": "multi_label_classification"},
    "a number": {"kind": "swin", "num_labels": 1, "problem_type": "regression"},
}


class Served:
    """A server of a tiny classifier, and transformers' pipeline."""

    def __init__(self, folder: Path, kind: str = "vit", **changes: Any) -> None:
        model = save_image_model(kind, folder / "tiny", **changes)
        self.pipeline = open_pipeline(folder / "tiny", model)
        self.server = EngineServer(folder / "server", folder / "tiny", max_num_seqs=4)

    def expect(self, data: bytes, **how: Any) -> list[dict[str, Any]]:
        image: Image.Image = load_image(base64.b64encode(data).decode())
        found: list[dict[str, Any]] = self.pipeline(image, **how)
        return found

    def post(self, status: int = 200, **fields: Any) -> Any:
        answer = self.server.post(PATH, {"images": TEXTS, **fields})
        assert answer.status_code == status, answer.text
        return answer.json()

    def post_form(self, files: list[bytes], status: int = 200, **fields: Any) -> Any:
        parts = [("image", ("x.jpg", data, "image/jpeg")) for data in files]
        answer = self.server.client.post(self.server.url + PATH, data=fields, files=parts)
        assert answer.status_code == status, answer.text
        return answer.json()


OTHER_MODELS = [pytest.param(name, marks=pytest.mark.slow) for name in list(MODELS)[1:]]


@pytest.fixture(scope="module", params=["one of several", *OTHER_MODELS])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    one = Served(tmp_path_factory.mktemp("classifier"), **MODELS[request.param])
    with one.server as server:
        server.wait_ready()
        yield one


@pytest.fixture(scope="module")
def labels_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    one = Served(tmp_path_factory.mktemp("classifier"))
    with one.server as server:
        server.wait_ready()
        yield one


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [one["label"] for one in found] == [one["label"] for one in expected]
    assert [one["score"] for one in found] == pytest.approx([one["score"] for one in expected], abs=1e-4)


def test_images_get_the_labels_of_the_pipeline_in_json_and_in_a_form(served: Served) -> None:
    num_labels = served.pipeline.model.config.num_labels
    for answer in (served.post(model="tiny"), served.post_form(FILES, model="tiny")):
        for number, (one, data) in enumerate(zip(answer["data"], FILES, strict=True)):
            expected = served.expect(data)
            assert_same(one["scores"], expected)
            assert (one["index"], one["label"], one["num_classes"]) == (number, expected[0]["label"], num_labels)
        assert (answer["object"], answer["model"], answer["usage"]) == ("list", "tiny", {"images": len(FILES)})


@pytest.mark.parametrize("function", ["none", "sigmoid", "softmax", "default"])
def test_scores_are_made_as_the_request_says(labels_one: Served, function: str) -> None:
    how = {} if function == "default" else {"function_to_apply": function}
    expected = labels_one.expect(FILES[0], **how)
    assert_same(labels_one.post(images=TEXTS[:1], function_to_apply=function)["data"][0]["scores"], expected)
    assert_same(labels_one.post_form(FILES[:1], function_to_apply=function)["data"][0]["scores"], expected)


def test_only_the_best_labels_come_if_requested(labels_one: Served) -> None:
    assert_same(labels_one.post(top_k=2)["data"][0]["scores"], labels_one.expect(FILES[0], top_k=2))
    assert_same(labels_one.post_form(FILES, top_k="1")["data"][1]["scores"], labels_one.expect(FILES[1], top_k=1))
    assert len(labels_one.post(top_k=100)["data"][0]["scores"]) == len(LABELS)


def test_a_data_uri_is_an_image_too(labels_one: Served) -> None:
    uri = f"data:image/jpeg;base64,{TEXTS[0]}"
    assert_same(labels_one.post(images=[uri])["data"][0]["scores"], labels_one.expect(FILES[0]))


def test_images_of_several_clients_share_batches(labels_one: Served) -> None:
    steps = labels_one.server.metric("conveyor_engine_steps_total")
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda number: labels_one.post(images=TEXTS[number : number + 1]), [0, 1, 2, 3] * 3))
    for number, answer in enumerate(answers):
        assert_same(answer["data"][0]["scores"], labels_one.expect(FILES[number % 4]))
    assert labels_one.server.metric("conveyor_engine_steps_total") - steps < len(answers)
    assert "conveyor_engine_batch_close_total{" in labels_one.server.get("/metrics").text
    assert 'unit="pixels"' in labels_one.server.get("/metrics").text


@pytest.fixture(scope="module")
def inference(labels_one: Served) -> Iterator[triton.InferenceServerClient]:
    """The client of Triton, for the Open Inference Protocol."""
    with triton.InferenceServerClient(labels_one.server.url.removeprefix("http://"), network_timeout=60) as client:
        yield client


def infer(client: triton.InferenceServerClient, binary: bool = True, **inputs: Any) -> Any:
    tensors = []
    for name, data in inputs.items():
        datatype = "FP32" if data.dtype == np.float32 else "BYTES"
        tensor = triton.InferInput(name, list(data.shape), datatype)
        tensor.set_data_from_numpy(data, binary_data=binary)
        tensors.append(tensor)
    return client.infer("tiny", tensors)


def assert_labelled(labels_one: Served, answer: Any) -> None:
    for number, data in enumerate(FILES):
        expected = labels_one.expect(data, function_to_apply="none")
        assert answer.as_numpy("label")[number].decode() == expected[0]["label"]
        by_label = {one["label"]: one["score"] for one in expected}
        assert answer.as_numpy("logits")[number] == pytest.approx([by_label[label] for label in LABELS], abs=1e-4)


def test_the_open_inference_protocol_takes_encoded_pictures(
    labels_one: Served, inference: triton.InferenceServerClient
) -> None:
    metadata = inference.get_model_metadata("tiny")
    assert metadata["inputs"] == [
        {"name": "image", "datatype": "BYTES", "shape": [-1]},
        {"name": "pixel_values", "datatype": "FP32", "shape": [-1, 3, 32, 32]},
    ]
    assert metadata["outputs"] == [
        {"name": "logits", "datatype": "FP32", "shape": [-1, 3]},
        {"name": "label", "datatype": "BYTES", "shape": [-1]},
    ]
    assert_labelled(labels_one, infer(inference, image=np.array(FILES, dtype=np.object_)))
    in_base64 = np.array([text.encode() for text in TEXTS], dtype=np.object_)
    assert_labelled(labels_one, infer(inference, binary=False, image=in_base64))


@pytest.mark.parametrize("binary", [True, False])
def test_the_open_inference_protocol_takes_pixels(
    labels_one: Served, inference: triton.InferenceServerClient, binary: bool
) -> None:
    pictures = [load_image(text) for text in TEXTS]
    pixels = labels_one.pipeline.image_processor(pictures, return_tensors="np")["pixel_values"]
    assert_labelled(labels_one, infer(inference, binary, pixel_values=pixels))


def test_what_the_open_inference_protocol_cannot_take_is_named(inference: triton.InferenceServerClient) -> None:
    picture, pixels = np.array(FILES[:1], dtype=np.object_), np.zeros((1, 3, 32, 32), dtype=np.float32)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"image": picture, "pixel_values": pixels}, "inputs must have either image or pixel_values, not both"),
        ({"pixel_values": np.zeros((1, 3, 32, 31), dtype=np.float32)}, "pixel_values has [batch, 3, 32, 32]"),
        ({"image": np.array([FILES[0], b"no image"], dtype=np.object_)}, "item 1 "),
        ({"image": np.array([b"\xff" * 9], dtype=np.object_)}, "inputs "),
        ({"image": np.array(FILES[:1] * 65, dtype=np.object_)}, "inputs must have at most 64 items, not 65"),
    ]
    for inputs, words in refused:
        with pytest.raises(InferenceServerException) as refusal:
            infer(inference, **inputs)
        assert words in refusal.value.message()


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"images": []}, "invalid_value", "images"),
    ({"images": None}, "invalid_value", "images"),
    ({"images": TEXTS[0]}, "invalid_value", "images"),
    ({"images": [""]}, "invalid_value", "images[0]"),
    ({"images": [TEXTS[0], 7]}, "invalid_value", "images[1]"),
    ({"images": [TEXTS[1]] * 65}, "invalid_value", "images"),
    ({"images": ["https://example.com/cat.jpg"]}, "invalid_value", "images"),
    ({"images": [TEXTS[0], "file:///etc/passwd"]}, "invalid_value", "images[1]"),
    ({"images": [*TEXTS, "aGk=", TEXTS[0]]}, "invalid_value", f"images[{len(TEXTS)}]"),
    ({"images": [TEXTS[0], TEXTS[1][:100]]}, "invalid_value", "images[1]"),
    ({"top_k": 0}, "invalid_value", "top_k"),
    ({"top_k": "many"}, "invalid_value", "top_k"),
    ({"function_to_apply": "tanh"}, "invalid_value", "function_to_apply"),
    ({"model": "other"}, "model_not_found", "model"),
)


@pytest.mark.parametrize(("changes", "code", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_classified_is_refused_by_name(
    labels_one: Served, changes: dict[str, Any], code: str, param: str
) -> None:
    error = labels_one.post(404 if code == "model_not_found" else 400, **changes)["error"]
    assert (error["code"], error["param"]) == (code, param), error["message"]
    assert len(error["message"]) < 500


def test_a_form_is_refused_by_the_name_of_the_image(labels_one: Served) -> None:
    for files, param in (([FILES[0], b"no image"], "image[1]"), ([b"no image"], "image"), ([], None)):
        error = labels_one.post_form(files, 400)["error"]
        assert error["param"] == param, error["message"]
    assert labels_one.post_form(FILES, 404, model="other")["error"]["code"] == "model_not_found"


def test_a_body_of_another_type_is_refused(labels_one: Served) -> None:
    answer = labels_one.server.post(PATH, FILES[0], **{"Content-Type": "image/jpeg"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    answer = labels_one.server.post(PATH, FILES[0], **{"Content-Type": "multipart/form-data"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")


def test_a_body_of_more_than_8_mib_is_refused(labels_one: Served) -> None:
    answer = labels_one.server.post(PATH, bytes(8 * 2**20 + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_answers_and_errors_are_as_the_document_says(labels_one: Served) -> None:
    document = labels_one.server.get("/openapi.json").json()
    of_path = document["paths"][PATH]["post"]
    assert set(of_path["requestBody"]["content"]) == {"application/json", "multipart/form-data"}
    form = document["components"]["schemas"]["ImageClassificationForm"]["properties"]["image"]
    assert form["items"] == {"type": "string", "format": "binary"}
    for more, status in (({}, 200), ({"model": "other"}, 404), ({"model": 7}, 400)):
        found = labels_one.post(status, **more)
        schema = of_path["responses"][str(status)]["content"]["application/json"]["schema"]
        Draft202012Validator(schema | {"components": document["components"]}).validate(found)


@pytest.mark.parametrize("path", list_paths("classifies images"))
def test_an_engine_that_classifies_images_does_nothing_else(labels_one: Served, path: str) -> None:
    answer = labels_one.server.post(path, {"prompt": "a"})
    assert (answer.status_code, error_of(answer)["code"]) == (400, "wrong_task")
    assert error_of(answer)["message"].endswith("it answers /v1/images/classify")


def test_an_engine_that_generates_classifies_no_images(server: EngineServer) -> None:
    answer = server.post(PATH, {"images": TEXTS})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "wrong_task")
    assert "generates text and classifies no images" in answer.json()["error"]["message"]


def test_a_mode_in_which_images_would_join_is_refused(tmp_path: Path) -> None:
    save_image_model("vit", tmp_path / "tiny")
    with EngineServer(tmp_path / "server", tmp_path / "tiny", batching_mode="continuous") as server:
        assert server.wait_exit() == 2
        assert "`batching_mode: continuous` is set, but this model classifies images in one step" in json.dumps(
            server.termination()["message"]
        )


def test_the_usual_client_sends_a_form(labels_one: Served) -> None:
    """Chunked, as a client sends it that reads a file while it sends."""
    request = httpx.Request("POST", labels_one.server.url + PATH, files={"image": FILES[0]})
    body = request.read()

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    answer = labels_one.server.client.post(
        request.url, content=pieces(), headers={"Content-Type": request.headers["content-type"]}
    )
    assert_same(answer.json()["data"][0]["scores"], labels_one.expect(FILES[0]))


def test_an_answer_has_its_receipt(labels_one: Served) -> None:
    answer = labels_one.server.post(PATH, {"images": TEXTS[:1]}, **ASKED)
    assert answer.status_code == 200, answer.text
    check_receipt(answer.json()["usage"]["receipt"])
