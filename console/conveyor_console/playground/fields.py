"""The fields of a form, and what a browser sent in them: a multipart form, within limits. Knows no task."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from aiohttp import BodyPartReader, web

from conveyor_api.text import clip

MAX_FORM_BYTES: Final = 8 << 20
MAX_TEXT_BYTES: Final = 256 << 10  # of all values but the file: each becomes JSON, a command and HTML
_MAX_DISCARDED_BYTES: Final = 64 << 20  # browsers show no answer if the connection ends before they have sent all
_MAX_PARTS: Final = 256
_READ_SECONDS: Final = 30.0  # below the 60 s after which htmx gives up
_PIECE_BYTES: Final = 64 << 10
_KEY: Final = re.compile("[\x21-\x7e]{1,4096}")
_TOO_LONG: Final = (
    f"A form may have at most {MAX_TEXT_BYTES >> 10} KiB of text, and {MAX_FORM_BYTES >> 20} MiB with a file. "
    "Use a shorter text or a smaller file, or start again."
)

FieldKind = Literal["line", "text", "number", "file", "choice"]


class InvalidForm(Exception):
    """What was sent cannot become a request. The message is a sentence for the caller."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field. `value`: an example, with which the form works. `attributes`: further ones of the HTML element."""

    name: str
    label: str
    kind: FieldKind = "line"
    value: str = ""
    hint: str = ""
    choices: Sequence[tuple[str, str]] = ()
    """Of a choice: value and words."""
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Upload:
    """A file."""

    name: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Sent:
    """The values by the names of their fields, and the file of the form."""

    values: Mapping[str, Sequence[str]]
    upload: Upload | None = None

    def list_all(self, name: str) -> Sequence[str]:
        return self.values.get(name, ())

    def find(self, name: str) -> str:
        """Return the value without white space around it; "" if there is none."""
        return next(iter(self.list_all(name)), "").strip()

    def require(self, field: Field) -> str:
        if not (text := self.find(field.name)):
            raise InvalidForm(f"Fill in “{field.label}”.")
        return text

    def list_lines(self, field: Field) -> list[str]:
        return [line for line in map(str.strip, self.require(field).splitlines()) if line]

    def find_number(self, field: Field) -> float | int | None:
        """Return the number, whole if it is written so; None if the field is empty."""
        text = self.find(field.name)
        if not text:
            return None
        try:
            return int(text) if re.fullmatch("-?[0-9]{1,15}", text) else float(text)
        except ValueError:
            raise InvalidForm(f"“{field.label}” must be a number.") from None

    def require_upload(self, field: Field) -> Upload:
        if self.upload is None:
            raise InvalidForm(f"Choose a file in “{field.label}”.")
        return self.upload

    def find_key(self) -> str:
        """Return the API key; "" if there is none."""
        key = self.find("key")
        if key and not _KEY.fullmatch(key):
            raise InvalidForm("The API key has characters that no key has.")
        return key


def fill_in(fields: Sequence[Field]) -> Sent:
    """Return what a browser sends if nothing is changed, with a file of the name that the field's value has."""
    upload = next((Upload(each.value, b"") for each in fields if each.kind == "file"), None)
    return Sent({each.name: [each.value] for each in fields if each.kind != "file"}, upload)


async def read_form(request: web.Request) -> Sent:
    """Read a multipart form. Raises InvalidForm."""
    try:
        async with asyncio.timeout(_READ_SECONDS):
            return await _read_parts(request)
    except TimeoutError:
        raise InvalidForm(f"The form did not arrive within {_READ_SECONDS:g} s.") from None


async def _read_parts(request: web.Request) -> Sent:
    values, upload, num_bytes, num_text_bytes, num_parts = dict[str, list[str]](), None, 0, 0, 0
    if request.content_type != "multipart/form-data":
        raise InvalidForm("This is not the form of the page.")
    try:
        async for part in await request.multipart():
            num_parts += 1
            if not isinstance(part, BodyPartReader) or num_parts > _MAX_PARTS:
                raise InvalidForm(f"A form may have at most {_MAX_PARTS} values.")
            content = bytearray()
            while piece := await part.read_chunk(_PIECE_BYTES):
                num_bytes += len(piece)
                num_text_bytes += len(piece) if part.filename is None else 0
                if num_bytes > _MAX_DISCARDED_BYTES:
                    raise InvalidForm(_TOO_LONG)
                content += piece
                if num_bytes > MAX_FORM_BYTES or num_text_bytes > MAX_TEXT_BYTES:
                    content.clear()
            if part.filename:
                upload = Upload(clip(part.filename, 128), bytes(content))
            elif part.filename is None:
                text = content.decode(errors="replace").replace("\r\n", "\n")  # browsers send all line ends so
                values.setdefault(part.name or "", []).append(text)
    except ValueError:
        raise InvalidForm("This is not the form of the page.") from None
    if num_bytes > MAX_FORM_BYTES or num_text_bytes > MAX_TEXT_BYTES:
        raise InvalidForm(_TOO_LONG)
    return Sent(values, upload)
