"""Images that are meant to take all memory or time, behind a whole process: an answer or a sentence."""

import base64
import io
from collections.abc import Iterator

import pytest
from PIL import Image
from tests.engine.image_models import draw, encode, save_image_model
from tests.engine.images.test_decoding import png
from tests.engine.processes import EngineServer

pytestmark = pytest.mark.slow
PATH = "/v1/images/classify"
GOOD = encode(draw(0))
LARGEST = (4096, 4096)


@pytest.fixture(scope="module", params=["vit", pytest.param("convnext", marks=pytest.mark.nightly)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    folder = tmp_path_factory.mktemp("hostile")
    save_image_model(request.param, folder / "tiny")
    with EngineServer(folder / "server", folder / "tiny", max_num_seqs=8) as running:
        yield running.wait_ready()


def post(server: EngineServer, *images: bytes) -> tuple[int, str]:
    answer = server.post(PATH, {"images": [base64.b64encode(image).decode() for image in images]})
    return answer.status_code, answer.text


def save(image: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **({"method": 0} if kind == "WEBP" else {}))
    return file.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_a_picture_of_the_largest_size_is_answered(server: EngineServer, kind: str, mode: str) -> None:
    if (kind, mode) in {("JPEG", "RGBA"), ("JPEG", "P"), ("GIF", "RGBA"), ("WEBP", "P")}:
        return  # there are none
    image = Image.new(mode, LARGEST, 77 if mode == "P" else (1, 2, 3))
    assert post(server, save(image, kind))[0] == 200
    assert post(server, GOOD)[0] == 200


def test_a_turned_picture_of_the_largest_size_is_answered(server: EngineServer) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert post(server, encode(Image.new("RGB", LARGEST), "JPEG", exif=exif))[0] == 200


def test_many_bombs_are_refused_one_by_one(server: EngineServer) -> None:
    bomb = png(60_000, 60_000, rows=bytes(10_000_000))
    for images in ([bomb], [GOOD, bomb], [bomb] * 64):
        status, text = post(server, *images)
        assert (status, "60000 x 60000 pixels" in text) == (400, True)
    assert post(server, *[GOOD] * 64)[0] == 200


def test_many_large_pictures_take_no_more_than_their_time(server: EngineServer) -> None:
    """Small files: their request has the time of one MiB."""
    large = save(Image.new("RGB", LARGEST), "PNG")
    assert len(large) < 100_000
    status, text = post(server, *[large] * 64)
    assert (status, "could not be decoded and resized within the CPU time" in text) == (400, True)
    assert post(server, GOOD)[0] == 200
    assert server.process.poll() is None
