"""Turns a conversation into a prompt: the chat template's text, its tokens, and the images that it shows.

Used by all kinds of bodies with messages. Runs in the workers of `process`. For a model that reads images,
`ServedModel.reader` is its `tasks.generate.chat_pictures.ChatPictures`.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.images.decoding import SHOWN_PIXELS_MAX, decode_image, is_url, read_base64, shrink
from conveyor_engine.serving.preparing.chat_schemas import TEMPLATE_ROLES, ChatRequest
from conveyor_engine.serving.preparing.content import take_images
from conveyor_engine.serving.preparing.jobs import FilesWanted, ServedModel
from conveyor_engine.text.tokenizer import Truncation
from conveyor_engine.wire.pictures import Picture, PictureSpan, PlacedPicture
from conveyor_engine.wire.request import ModelFacts

_SMALL_PIXELS_MAX: Final = 2**18  # with `detail: low`: 512 x 512


class Conversation(NamedTuple):
    """A conversation as the model reads it."""

    text: str  # as the chat template renders it
    token_ids: list[int]
    pictures: list[PlacedPicture]


def read_conversation(
    model: ServedModel,
    fields: ChatRequest,
    facts: ModelFacts,
    truncation: Truncation | None = None,
    *,
    add_special_tokens: bool = False,
) -> Conversation:
    """Return the prompt of a conversation. Raises InvalidRequest, or FilesWanted for images that were not fetched."""
    messages, images = take_images(fields.messages_for_template())
    if images and facts.image_place is None:
        raise _refuse(facts.no_images_because)
    if images and truncation is not None:
        raise _refuse("a prompt with images cannot be truncated")
    wanted = {image["data"]: _name(number) for number, image in enumerate(images) if is_url(image["data"])}
    if wanted.keys() - model.fetched.keys():
        raise FilesWanted(wanted)
    text = whole = _render(model, fields, messages, facts.max_model_len)
    shown = _read_images(model, images, facts)
    if images:
        given = [messages, fields.documents, fields.tool_use.for_template(), fields.variables()]
        _check_texts(given, model.reader.mark)
        whole = _insert(text, model.reader.mark, [each for _, each in shown])
    token_ids = model.tokenizer.encode(
        whole, facts.max_model_len, add_special_tokens=add_special_tokens, param="messages", truncation=truncation
    )
    pictures = [picture for picture, _ in shown]
    return Conversation(text, token_ids, _place(pictures, token_ids, facts.image_place, fields.cache_salt))


def _render(model: ServedModel, fields: ChatRequest, messages: list[dict[str, Any]], longest: int) -> str:
    fields.tool_use.check_size()
    render = partial(
        model.tokenizer.render_chat, max_tokens=longest, variables=fields.variables(), rendering=fields.rendering()
    )
    text = render(messages)
    _check_roles(messages, render)
    return text


def _check_roles(messages: Sequence[Mapping[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> None:
    """Raise InvalidRequest for a role, such as `User`, whose messages the template skips."""
    texts = {role: uuid.uuid4().hex for each in messages if (role := each["role"]) not in TEMPLATE_ROLES}
    if not texts:
        return
    rendered = render([{**each, "content": texts.get(each["role"], each["content"])} for each in messages])
    if hidden := next((role for role, text in texts.items() if text not in rendered), None):
        known = ", ".join(TEMPLATE_ROLES)
        raise _refuse(f"the model's chat template shows no message with the role {hidden!r}; send one of {known}")


def _read_images(model: ServedModel, images: Sequence[dict[str, Any]], facts: ModelFacts) -> list[tuple[Picture, str]]:
    """Read each image once, however often it is there, and none behind those that fill the context."""
    read: dict[tuple[str, bool], tuple[Picture, str]] = {}
    shown, num_places = [], 0
    for number, image in enumerate(images):
        key = image["data"], image["is_small"]
        if key not in read:
            read[key] = _read_image(model, image, number, facts)
        shown.append(read[key])
        num_places += read[key][0].num_places
        if num_places > facts.max_model_len:
            raise _refuse(
                f"the first {number + 1} images have {num_places} tokens, and the context has {facts.max_model_len}"
            )
    return shown


def _read_image(model: ServedModel, image: dict[str, Any], number: int, facts: ModelFacts) -> tuple[Picture, str]:
    param, text = _name(number), image["data"]
    data = model.fetched[text] if is_url(text) else read_base64(text, param)
    pixels = decode_image(data, param, on_white=True)
    shown = shrink(pixels, _SMALL_PIXELS_MAX if image["is_small"] else SHOWN_PIXELS_MAX)
    picture: tuple[Picture, str] = model.reader.read(shown, in_half=facts.dtype != "float32")
    return picture


def _name(number: int) -> str:
    return f"image {number} of the messages"


def _check_texts(values: object, mark: str) -> None:
    """Raise InvalidRequest if a text, a name, or texts behind one another, contain the mark that stands for an image.

    If the template leaves an image out, that mark would become its place.
    """
    texts: list[str] = []
    names: list[str] = []
    _collect(values, texts, names)
    if mark in "".join(texts) or mark in "".join(names):
        raise _refuse(f"no text may contain {mark!r} if the messages have images, because it stands for an image")


def _collect(value: object, texts: list[str], names: list[str]) -> None:
    """Append the texts and the names in a JSON value, in their order. The kinds of parts are no texts."""
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, Mapping):
        names += value
        for name, inner in value.items():
            if name != "type":
                _collect(inner, texts, names)
    elif isinstance(value, list | tuple):
        for inner in value:
            _collect(inner, texts, names)


def _insert(text: str, mark: str, shown: Sequence[str]) -> str:
    """Replace each mark in the text by what stands for its image."""
    first, *rest = text.split(mark)
    if len(rest) != len(shown):
        raise _refuse(
            f"the model's chat template shows {len(rest)} images, and the messages have {len(shown)}: put images where "
            "it shows them, such as into messages of the user"
        )
    return first + "".join(each + behind for each, behind in zip(shown, rest, strict=True))


def _place(
    pictures: Sequence[Picture], token_ids: Sequence[int], place_id: int | None, cache_salt: str | None
) -> list[PlacedPicture]:
    """Find the tokens that stand for each picture."""
    if not pictures:
        return []
    places = [index for index, token_id in enumerate(token_ids) if token_id == place_id]
    if len(places) != sum(picture.num_places for picture in pictures):
        raise _refuse("a text contains a token that stands for a part of an image")
    placed, done = [], 0
    for picture in pictures:
        span = places[done : done + picture.num_places]
        done += picture.num_places
        placed.append(PlacedPicture(PictureSpan(span[0], span[-1] + 1, picture.digest(cache_salt)), picture))
    return placed


def _refuse(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")
