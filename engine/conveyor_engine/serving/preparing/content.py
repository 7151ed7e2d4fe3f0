"""The content of messages with images, as chat templates know it. Used by the schemas of all chat APIs. Pure.

Validation turns content into a string, or, if it has images, into a list of parts. An image keeps its data until
`take_images` takes them out of the messages.
"""

from collections.abc import Sequence
from typing import Any, Final

from pydantic_core import PydanticCustomError

Json = dict[str, Any]
Content = str | list[Json]
IMAGES_MAX: Final = 64  # in one body
_DATA: Final = "data"


def text_part(text: str) -> Json:
    """Return a part of text."""
    return {"type": "text", "text": text}


def image_part(data: str, *, is_small: bool = False) -> Json:
    """Return an image. data: base64, a data: URI or a URL. is_small: a small version is enough."""
    return {"type": "image", _DATA: data, "is_small": is_small}


def join_content(parts: Sequence[Json]) -> Content:
    """Return the text of the parts, or the parts themselves if some are images."""
    if any(part["type"] == "image" for part in parts):
        return list(parts)
    return "\n".join(part["text"] for part in parts)


def take_images(messages: Sequence[Json]) -> tuple[list[Json], list[Json]]:
    """Return the messages as chat templates receive them, and the images in their order."""
    shown, images = [], []
    for message in messages:
        if isinstance(message["content"], list):
            found = [part for part in message["content"] if part["type"] == "image"]
            images += found
            content = [{"type": "image"} if part["type"] == "image" else part for part in message["content"]]
            message = message | {"content": content}
        shown.append(message)
    return shown, images


def read_image_url(value: Any) -> Json:
    """Return the image of OpenAI's `image_url`: an object with `url`, or the URL. Raises PydanticCustomError."""
    url, detail = (value.get("url"), value.get("detail")) if isinstance(value, dict) else (value, None)
    if not isinstance(url, str):
        raise PydanticCustomError("content", "an image must have a string `url`")
    return image_part(url, is_small=detail == "low")


def check_images(messages: Sequence[Json]) -> None:
    """Raise PydanticCustomError if an answer has images, or if there are too many."""
    number = 0
    for message in messages:
        if isinstance(content := message["content"], list):
            if message["role"] == "assistant":
                raise PydanticCustomError("content", "an assistant's message has no images")
            number += sum(part["type"] == "image" for part in content)
    if number > IMAGES_MAX:
        message_ = f"the messages have {number} images; at most {IMAGES_MAX} are allowed"
        raise PydanticCustomError("content", message_)
