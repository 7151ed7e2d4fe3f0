"""Decodes one image as transformers' `load_image` does, within limits. Runs in worker processes only.

Chats show transparent images on white, as OpenAI and vLLM do (ADR 207).

The bytes are not trusted. The header is read first: an image with too many pixels is rejected before its pixels are
decoded. Memory and CPU time for decoding are proportional to the number of pixels. The limits of a job
(`serving.preparing.process`) apply in any case.
"""

import base64
import binascii
import io
import warnings
from typing import Final

from PIL import Image, ImageOps, UnidentifiedImageError

from conveyor_engine.errors import InvalidRequest

FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF")  # docs/adr/0094 explains this choice
PIXELS_MAX: Final = 2**24  # of one image in every task, chats too: 4096 x 4096
SHOWN_PIXELS_MAX: Final = 2**21  # of an image in a conversation, after `shrink`
ASPECT_MAX: Final = 100  # longer side / shorter side: a processor that enlarges the shorter side enlarges both
_NAMES: Final = "JPEG, PNG, WebP or GIF"
_COLOURS_MAX: Final = 256  # of a palette
_SHALLOW: Final = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"})


def decode_image(data: bytes, param: str, *, on_white: bool = False) -> Image.Image:
    """Decode the image to RGB, rotated as its EXIF data say. Of an animation, decode the first frame. Raises
    InvalidRequest.

    on_white: show what lies behind transparent pixels as white, in place of the colours that the file has there.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this file limits everything that Pillow would warn about
            return _decode(data, param, on_white=on_white)
    except (InvalidRequest, MemoryError):
        raise
    except Exception as error:  # Pillow may raise any error for a broken file
        what = " ".join(str(error).split())[:200] or type(error).__name__
        raise InvalidRequest(f"{param} is a broken image: {what}", param=param) from None


def shrink(image: Image.Image, pixels_max: int) -> Image.Image:
    """Return the image with at most so many pixels."""
    width, height = image.size
    scale = (pixels_max / (width * height)) ** 0.5
    return image if scale >= 1 else image.resize((max(1, int(width * scale)), max(1, int(height * scale))))


def _decode(data: bytes, param: str, *, on_white: bool) -> Image.Image:
    Image.MAX_IMAGE_PIXELS = None  # the limit in this file is lower
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise InvalidRequest(f"{param} is not an image: send {_NAMES}", param=param) from None
    width, height = image.size
    if width * height > PIXELS_MAX:
        message = f"{param} has {width} x {height} pixels; at most {PIXELS_MAX} are allowed: make it smaller"
        raise InvalidRequest(message, param=param)
    if max(width, height) > ASPECT_MAX * min(width, height):
        message = f"{param} has {width} x {height} pixels: one side may be {ASPECT_MAX} times the other at most"
        raise InvalidRequest(message, param=param)
    if image.mode not in _SHALLOW:
        message = f"{param} has more than 8 bits for each colour (mode {image.mode}): save it with 8"
        raise InvalidRequest(message, param=param)
    turned = ImageOps.exif_transpose(image)
    if on_white and turned.has_transparency_data:
        if isinstance(alphas := turned.info.get("transparency"), bytes):  # of a palette's colours
            turned.info["transparency"] = alphas[:_COLOURS_MAX]
        shown = turned.convert("RGBA")
        turned = Image.new("RGB", shown.size, "white")
        turned.paste(shown, mask=shown)
    return turned if turned.mode == "RGB" else turned.convert("RGB")


def is_url(text: str) -> bool:
    """Return whether an image is the URL of its file. A data: URI is the file itself."""
    head = text[:128].lstrip().lower()
    return not head.startswith("data:") and "://" in head


def read_base64(text: str, param: str) -> bytes:
    """Decode the image in a JSON body, which is base64 or a data: URI with base64. Raises InvalidRequest."""
    if is_url(text):
        message = f"{param} is a URL, and this server fetches none: send the image itself, in base64 or as a data: URI"
        raise InvalidRequest(message, param=param)
    if text[:128].lstrip().lower().startswith("data:"):
        before, comma, text = text.partition(",")
        if not comma or not before.lower().endswith(";base64"):
            raise InvalidRequest(f"{param} is a data: URI without base64", param=param)
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{param} is not base64", param=param) from None
    if not data:
        raise InvalidRequest(f"{param} is empty", param=param)
    return data
