"""/v1/images/edits on a real server, with the pictures of diffusers' pipeline: docs/image-generation.md."""

import io
import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from jsonschema import Draft202012Validator
from PIL import Image
from tests.engine.images.test_decoding import png
from tests.engine.paint_models import Brief, draw, open_pipeline, paint, save_paint_model
from tests.engine.processes import EngineServer, error_of
from tests.engine.receipts import ASKED, check_receipt
from tests.engine.serving.http.test_pictures import BODY, Served, assert_same, read

from conveyor_engine.tasks.imagegenerate.facts import Size
from e2e.cluster.paths import REPOSITORY

PATH = "/v1/images/edits"
BRIEF = Brief("a red circle", 3, strength=0.5)


def save(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


STAR = save(draw(BRIEF.size))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("edits")
    save_paint_model(folder / "tiny")
    with EngineServer(folder / "server", folder / "tiny", max_num_seqs=4, num_threads=1, dtype="float32") as server:
        yield Served(server.wait_ready(), open_pipeline(folder / "tiny"))


def edit(served: Served, image: bytes = STAR, status: int = 200, files: Any = (), **fields: Any) -> Any:
    data = {name: value for name, value in (BODY | {"strength": 0.5} | fields).items() if value is not None}
    parts = [("image", ("a.png", image)), *files]
    answer = served.server.client.post(served.server.url + PATH, data=data, files=parts)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_edits_are_those_of_the_pipeline_beside_other_pictures(served: Served) -> None:
    steps = served.server.metric("conveyor_engine_steps_total")
    with ThreadPoolExecutor(4) as clients:
        plain = clients.submit(served.post, num_inference_steps=20)
        edits = clients.submit(edit, served, n=2, num_inference_steps=20)
        large = clients.submit(edit, served, save(draw(Size(48, 32))), num_inference_steps=10, strength=1)
    assert_same(read(plain.result()["data"][0]["b64_json"]), served.expect(num_steps=20))
    for one in edits.result()["data"]:
        theirs = paint(served.pipeline, BRIEF._replace(seed=one["seed"], num_steps=20))
        assert_same(read(one["b64_json"]), theirs)
    theirs = paint(served.pipeline, BRIEF._replace(num_steps=10, strength=1, size=Size(48, 32)))
    assert_same(read(large.result()["data"][0]["b64_json"]), theirs)
    assert (edits.result()["size"], large.result()["size"]) == ("32x32", "48x32")
    assert served.server.metric("conveyor_engine_steps_total") - steps <= 40


def test_a_request_without_strength_has_that_of_the_pipeline(served: Served) -> None:
    (picture,) = edit(served, strength=None, num_inference_steps=10)["data"]
    assert_same(read(picture["b64_json"]), paint(served.pipeline, BRIEF._replace(num_steps=10, strength=0.8)))


def test_the_size_of_an_answer_is_that_of_the_picture_or_of_the_request(served: Served) -> None:
    odd = draw(Size(45, 39))
    assert edit(served, save(odd))["size"] == "40x32", "whole multiples of 8 pixels"
    answer = edit(served, save(odd, "WEBP"), size="48x32")
    assert read(answer["data"][0]["b64_json"]).shape == (32, 48, 3)
    assert edit(served, save(Image.new("L", (3, 3))))["size"] == "8x8"


def test_openai_s_client_edits_and_streams(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.server.url}/v1", api_key="none", max_retries=0)
    extra = {name: BODY[name] for name in ("seed", "num_inference_steps", "guidance_scale")} | {"strength": 0.5}
    named: dict[str, Any] = {"prompt": BODY["prompt"], "model": "tiny", "extra_body": extra}
    theirs = paint(served.pipeline, BRIEF)
    for image in (STAR, [("a.png", STAR)]):  # a list is sent as image[]: basketikun/chatgpt2api#18
        answer = client.images.edit(**named, image=image, size="auto", input_fidelity="low", user="me")
        assert answer.data is not None
        assert_same(read(answer.data[0].b64_json or ""), theirs)
    events: list[Any] = list(client.images.edit(**named, image=STAR, stream=True, partial_images=1))
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]
    assert_same(read(events[-1].b64_json), theirs)
    assert events[-1].usage.input_tokens == 5


def turn(image: Image.Image) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    file = io.BytesIO()
    image.save(file, "JPEG", exif=exif)
    return file.getvalue()


WIDE = draw(Size(48, 32))


@pytest.mark.parametrize(
    ("image", "size"),
    [
        (save(WIDE.convert("RGBA")), "48x32"),  # Sygil-Dev/stable-diffusion#147: four channels end the server
        (save(WIDE.convert("LA")), "48x32"),
        (save(WIDE.convert("P"), "GIF"), "48x32"),
        (save(WIDE.convert("L"), "JPEG"), "48x32"),  # sgl-project/sglang#26751: a grey JPEG ends the scheduler
        (save(WIDE.convert("CMYK"), "JPEG"), "48x32"),
        (turn(WIDE), "32x48"),
        (save(draw(Size(45, 39))), "40x32"),  # invoke-ai/InvokeAI#1455: sides that are no multiples end in an error
    ],
)
def test_pictures_of_any_kind_are_edited(served: Served, image: bytes, size: str) -> None:
    assert edit(served, image)["size"] == size


def test_a_form_that_is_sent_in_chunks_is_read(served: Served) -> None:
    """lemonade-sdk/lemonade#1963: Open WebUI sends no Content-Length."""
    request = httpx.Request("POST", served.server.url + PATH, data=BODY, files={"image": STAR})
    whole, headers = request.read(), {"Content-Type": request.headers["Content-Type"]}
    pieces = (whole[start : start + 100] for start in range(0, len(whole), 100))
    answer = served.server.client.post(request.url, content=pieces, headers=headers)
    assert answer.request.headers["Transfer-Encoding"] == "chunked"
    assert answer.status_code == 200, answer.text


BOMB = png(60_000, 60_000, rows=bytes(1_000_000))


@pytest.mark.parametrize(
    ("image", "fields", "param", "sentence"),
    [
        (BOMB, {}, "image", "image has 60000 x 60000 pixels; at most"),
        (png(16_000, 100, rows=b""), {}, "image", "one side may be 100 times the other at most"),
        (STAR[:60], {}, "image", "image is a broken image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", {}, "image", "image is not an image: send JPEG, PNG"),
        (b"", {}, "image", "image is not an image"),
        (save(Image.new("RGB", (256, 64))), {}, "image", "image of 256x64 pixels is too large: this model allows 4096"),
        (STAR, {"size": "256x64"}, "size", "size 256x64 is too large"),
        (STAR, {"strength": 0}, "strength", "greater than 0"),
        (STAR, {"strength": 1.5}, "strength", "less than or equal to 1"),
        (STAR, {"strength": "nan"}, "strength", ""),
        # easydiffusion#741, huggingface/diffusers#1867: no step is left
        (STAR, {"strength": 0.1}, "strength", "strength 0.1 leaves none of the 4 num_inference_steps: raise one of"),
        (STAR, {"response_format": "url"}, "response_format", "must be b64_json"),  # vllm-omni#2081: ignored
        (STAR, {"prompt": None}, "prompt", "prompt is missing"),
        (STAR, {"input_fidelity": "high"}, "input_fidelity", "send a smaller `strength`"),
        (STAR, {"n": 11}, "n", "less than or equal to 10"),
    ],
)
def test_what_cannot_be_edited_is_one_error_that_names_the_field(
    served: Served, image: bytes, fields: dict[str, Any], param: str, sentence: str
) -> None:
    error = edit(served, image, 400, **fields)["error"]
    assert (error["param"], sentence in error["message"]) == (param, True), error


@pytest.mark.parametrize(
    ("files", "param", "sentence"),
    [
        ([("mask", ("m.png", STAR))], "mask", "an edit changes the whole picture"),
        ([("mask", ("m.png", bytes(200_000)))], "mask", "an edit changes the whole picture"),
        ([("image", ("b.png", STAR))], "image", "more than the 1 that one request may have"),
        ([("image[]", ("b.png", STAR))], "image", "more than the 1 that one request may have"),
    ],
)
def test_other_files_are_refused_by_name(served: Served, files: Any, param: str, sentence: str) -> None:
    error = edit(served, STAR, 400, files)["error"]
    assert (error["param"], sentence in error["message"]) == (param, True), error


def test_a_body_without_a_file_is_refused(served: Served) -> None:
    for body, kind in ((BODY, "application/json"), ({}, "text/plain")):
        error = error_of(served.server.post(PATH, body, **{"Content-Type": kind}))
        assert (error["param"], "as multipart/form-data" in error["message"]) == ("image", True)
    answer = served.server.client.post(served.server.url + PATH, data=BODY, files={"x": b"y"})
    assert error_of(answer)["message"] == "image is missing"


def test_an_answer_is_as_the_document_says_and_has_its_receipt(served: Served) -> None:
    document = served.server.get("/openapi.json").json()
    schema = {"$ref": "#/components/schemas/PictureList", "components": document["components"]}
    answer = served.server.client.post(served.server.url + PATH, data=BODY, files={"image": STAR}, headers=ASKED).json()
    Draft202012Validator(schema).validate(answer)
    check_receipt(answer["usage"]["receipt"])
    (form,) = document["paths"][PATH]["post"]["requestBody"]["content"].values()
    name = form["schema"]["$ref"].rpartition("/")[2]
    assert {"image", "prompt"} <= set(document["components"]["schemas"][name]["required"])


def test_the_page_s_command_edits_a_picture(served: Served) -> None:
    page = (REPOSITORY / "docs" / "image-generation.md").read_text()
    (command,) = re.findall(r"```sh\n(curl[^`]*/v1/images/edits[^`]*)```", page)
    command = command.replace("http://127.0.0.1:8080/default/image-generate", served.server.url)
    command = command.replace("model=image-generate", "model=tiny")
    done = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, capture_output=True, check=True, timeout=60)
    assert read(json.loads(done.stdout)["data"][0]["b64_json"]).shape == (32, 32, 3)
