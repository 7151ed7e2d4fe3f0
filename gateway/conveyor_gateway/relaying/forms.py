"""Reads `model` from forms with files (multipart/form-data) at the root, where it selects the service. Pure.

Called by `request_life`. A form may be as long as any body, because only its beginning is parsed: clients send `model`
before the files. The engine parses forms with the same library, and rejects a form with two models. ADR 125 has the
limits of the beginning.
"""

from typing import Final, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from conveyor_gateway.errors import Code, GatewayError

# The limits of the part of a form that is parsed to find `model`.
HEAD_BYTES_MAX: Final = 64 << 10
PARTS_MAX: Final = 64  # the engine's own limit
HEADERS_MAX: Final = 256  # of all parts together
_FORM: Final = "multipart/form-data"


class ModelField(NamedTuple):
    """The value of the field `model`, and its position in the body in bytes."""

    model: str
    start: int
    end: int


def is_form(content_type: str | None) -> bool:
    """Return whether a body with this Content-Type is a form."""
    return content_type is not None and content_type.partition(";")[0].strip().lower() == _FORM


def find_model_field(body: bytes, content_type: str) -> ModelField:
    """Find the field in the first HEAD_BYTES_MAX bytes and PARTS_MAX parts of the form. Raises GatewayError."""
    try:
        boundary = parse_options_header(content_type)[1].get(b"boundary")
    except UnicodeEncodeError:
        boundary = None
    if not boundary:
        raise _invalid("its Content-Type has no boundary")
    head = _Head()
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": head.begin,
                "on_header_field": head.add_header_name,
                "on_header_value": head.add_header_value,
                "on_header_end": head.end_header,
                "on_part_data": head.add_data,
                "on_part_end": head.end,
            },
        )
        parser.write(body[:HEAD_BYTES_MAX])
    except _Found:
        return ModelField(bytes(body[head.start : head.stop]).decode(errors="replace"), head.start, head.stop)
    except FormParserError as error:
        raise _invalid(str(error)) from None
    raise _no_model(f"{HEAD_BYTES_MAX} bytes")


def rename_model_field(body: bytes, field: ModelField, model: str) -> bytes:
    """Return the form with another model."""
    return b"".join((memoryview(body)[: field.start], model.encode(), memoryview(body)[field.end :]))


class _Found(Exception):
    """Raised when the parser has passed the field."""


class _Head:
    """The state of the part that the parser is in. Raises GatewayError for too many parts or headers."""

    def __init__(self) -> None:
        self.num_parts = self.num_headers = 0

    def begin(self) -> None:
        self.num_parts += 1
        if self.num_parts > PARTS_MAX:
            raise _no_model(f"{PARTS_MAX} parts")
        self._name, self._value, self._is_model = b"", b"", False
        self.start = self.stop = 0

    def add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def end_header(self) -> None:
        self.num_headers += 1
        if self.num_headers > HEADERS_MAX:
            raise _no_model(f"{HEADERS_MAX} headers")
        if self._name.lower() == b"content-disposition":
            self._is_model = parse_options_header(self._value)[1].get(b"name") == b"model"
        self._name = self._value = b""

    def add_data(self, data: bytes, start: int, end: int) -> None:
        self.start, self.stop = self.start or start, end

    def end(self) -> None:
        if self._is_model:
            raise _Found


def _no_model(beginning: str) -> GatewayError:
    message = f"the form has no model in its first {beginning}: it selects the service, so send it as the first field"
    return GatewayError(message, Code.NO_MODEL, "model")


def _invalid(what: str) -> GatewayError:
    return GatewayError(f"the body is not a valid {_FORM} form: {what}", Code.INVALID_FORM)
