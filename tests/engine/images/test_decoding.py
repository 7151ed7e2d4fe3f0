"""Pictures are decoded as transformers' `load_image` does, and other bytes are an error that names the field."""

import base64
import io
import struct
import tracemalloc
import warnings
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms
from tests.engine.image_models import draw, encode
from transformers.image_utils import load_image

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.images.decoding import ASPECT_MAX, PIXELS_MAX, decode_image, read_base64


def png(width: int, height: int, depth: int = 8, colour: int = 2, rows: bytes = b"", profile: bytes = b"") -> bytes:
    """A PNG by hand: its header may promise anything."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    before = chunk(b"iCCP", b"a\0\0" + zlib.compress(profile, 9)) if profile else b""
    body = chunk(b"IHDR", header) + before + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def exif(orientation: int) -> Image.Exif:
    data = Image.Exif()
    data[0x0112] = orientation
    return data


def animated(kind: str) -> bytes:
    file = io.BytesIO()
    draw(1).save(file, kind, save_all=True, append_images=[draw(2), draw(3)])
    return file.getvalue()


def profile() -> bytes:
    """Return a profile of colours that are not sRGB's."""
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()


def transparent(mode: str) -> Image.Image:
    image = draw(4, mode="RGBA")
    image.putalpha(draw(5, mode="L"))
    return image.quantize(64) if mode == "P" else image.convert(mode)


RIGHT: dict[str, bytes] = {
    "png": encode(draw(0)),
    "jpeg": encode(draw(0), "JPEG", quality=90),
    "progressive jpeg": encode(draw(0), "JPEG", progressive=True),
    "webp": encode(draw(0), "WEBP", lossless=True),
    "gif": encode(draw(0), "GIF"),
    **{f"animated {kind}": animated(kind) for kind in ("GIF", "PNG", "WEBP")},
    "grey": encode(draw(0, mode="L")),
    "grey jpeg": encode(draw(0, mode="L"), "JPEG"),
    "black and white": encode(draw(0, mode="1")),
    "palette": encode(draw(0, mode="P")),
    "palette with transparency": encode(transparent("P")),
    "transparent": encode(transparent("RGBA")),
    "transparent webp": encode(transparent("RGBA"), "WEBP"),
    "grey and transparent": encode(transparent("LA")),
    "cmyk jpeg": encode(draw(0, mode="CMYK"), "JPEG"),
    "16 bits in each of three colours": png(3, 2, 16, 2, (b"\0" + bytes(range(18))) * 2),
    **{f"{kind} with a profile": encode(draw(0), kind, icc_profile=profile()) for kind in ("JPEG", "PNG", "WEBP")},
    "one pixel": encode(draw(0, (1, 1))),
    "a line": encode(draw(0, (ASPECT_MAX, 1))),
    **{f"turned {number}": encode(draw(0), "JPEG", exif=exif(number)) for number in range(1, 9)},
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_picture_is_what_transformers_makes_of_it(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = load_image(base64.b64encode(RIGHT[name]).decode())
    image = decode_image(RIGHT[name], "images[0]")
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), np.asarray(expected))


@pytest.mark.parametrize("name", [name for name in RIGHT if "transparen" in name])
@pytest.mark.filterwarnings("ignore")
def test_in_a_chat_transparent_pixels_are_white(name: str) -> None:
    pixels = np.asarray(Image.open(io.BytesIO(RIGHT[name])).convert("RGBA")).astype(int)
    alpha = pixels[..., 3:]
    expected = (pixels[..., :3] * alpha + 255 * (255 - alpha)) / 255
    assert np.abs(np.asarray(decode_image(RIGHT[name], "images[0]", on_white=True)) - expected).max() <= 1


def test_hidden_colours_are_not_shown_in_a_chat() -> None:
    hidden = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    assert not np.asarray(decode_image(encode(hidden), "images[0]")).any()
    assert (np.asarray(decode_image(encode(hidden), "images[0]", on_white=True)) == 255).all()


def test_a_palette_may_have_more_alphas_than_colours() -> None:
    """Some programs write more than the 256 that PNG allows. Colour 0 is transparent here."""
    file = io.BytesIO()
    Image.new("P", (4, 4), 0).save(file, "PNG")
    content = b"tRNS" + b"\x00\x80" + b"\xff" * 298
    chunk = struct.pack(">I", 300) + content + struct.pack(">I", zlib.crc32(content))
    before, data = file.getvalue().split(b"IDAT")
    written = before[:-4] + chunk + before[-4:] + b"IDAT" + data
    assert (np.asarray(decode_image(written, "images[0]", on_white=True)) == 255).all()


WRONG: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is not an image: send JPEG, PNG, WebP or GIF"),
    "text": (b"the quick brown fox", "is not an image"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not an image"),
    "pdf": (b"%PDF-1.7\n", "is not an image"),
    "tiff": (encode(draw(0), "TIFF"), "is not an image"),
    "bmp": (encode(draw(0), "BMP"), "is not an image"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image"),
    "half a jpeg": (encode(draw(0), "JPEG")[:600], "is a broken image"),
    "half a png": (encode(draw(0))[:200], "is a broken image"),
    "half a webp": (encode(draw(0), "WEBP")[:200], "is"),
    "half a gif": (encode(draw(0), "GIF")[:900], "is a broken image"),
    "a header alone": (encode(draw(0))[:30], "is"),
    "damaged data": (png(30, 20, rows=b"\5" * 1900)[:-20] + bytes(20), "is a broken image"),
    "16 bits of grey": (png(3, 2, 16, 0, (b"\0" + bytes(6)) * 2), r"more than 8 bits .* save it with 8"),
    "too many pixels": (png(5000, 5000), f"5000 x 5000 pixels; at most {PIXELS_MAX}"),
    "a bomb": (png(60_000, 60_000), "60000 x 60000 pixels"),
    "a profile that is a bomb": (png(3, 2, rows=bytes(20), profile=bytes(20_000_000)), "is a broken image"),
    "no width": (png(0, 4), "is"),
    "1 x 50000": (png(1, 50_000), "one side may be 100 times the other at most"),
    "60000 x 1": (png(60_000, 1), "one side may be 100 times the other at most"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_picture_is_refused_by_name(name: str) -> None:
    data, sentence = WRONG[name]
    with pytest.raises(InvalidRequest, match=sentence) as caught:
        decode_image(data, "images[3]")
    assert caught.value.param == "images[3]"
    assert str(caught.value).startswith("images[3] ")
    assert len(str(caught.value)) < 400


def test_a_bomb_is_refused_before_its_pixels_take_memory() -> None:
    bomb = png(60_000, 60_000, rows=bytes(10_000_000))
    assert len(bomb) < 20_000
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest):
            decode_image(bomb, "image")
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


@given(st.sampled_from(sorted(RIGHT)), st.data())
def test_damaged_bytes_are_a_picture_or_an_invalid_request(name: str, data: st.DataObject) -> None:
    damaged = bytearray(RIGHT[name])
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        image = decode_image(bytes(damaged), "image")
    except InvalidRequest:
        return
    assert image.mode == "RGB"


@pytest.mark.parametrize(
    "text",
    ["aGk=", " aG\nk= ", "data:image/png;base64,aGk=", "data:;base64,aGk=", "DATA:image/jpeg;charset=x;BASE64,aGk="],
)
def test_base64_and_data_uris_are_read(text: str) -> None:
    assert read_base64(text, "images") == b"hi"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("https://example.com/cat.jpg", "is a URL, and this server fetches none: send the image itself"),
        ("file:///etc/passwd", "is a URL"),
        ("  HTTP://example.com", "is a URL"),
        ("data:image/png,abc", "a data: URI without base64"),
        ("data:image/png;base64", "a data: URI without base64"),
        ("/etc/passwd", "is not base64"),
        ("aGk", "is not base64"),
        ("é", "is not base64"),
        ("data:image/png;base64,", "is empty"),
        ("   ", "is empty"),
    ],
)
def test_other_strings_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as caught:
        read_base64(text, "images[1]")
    assert caught.value.param == "images[1]"
