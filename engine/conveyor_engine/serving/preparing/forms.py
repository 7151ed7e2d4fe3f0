"""Parses multipart/form-data bodies into fields and files, with limits. Runs in workers; used by tasks with files."""

from collections.abc import Container
from typing import Any, Final

from pydantic import ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from conveyor_engine.errors import ErrorCode, InvalidRequest
from conveyor_engine.serving.preparing.jobs import Fields, ServedModel
from conveyor_engine.serving.preparing.refusals import invalid_request
from conveyor_engine.wire.worker import Job

FORM: Final = "multipart/form-data"
FIELD_BYTES_MAX: Final = 128_000  # a prompt of 32,000 characters for a picture, with 4 bytes each
_FIELDS_MAX: Final = 64


def is_form(content_type: str) -> bool:
    """Return whether a body with this Content-Type is a form."""
    return content_type.partition(";")[0].strip().lower() == FORM


def parse_form(
    model: ServedModel, schema: type[Fields], job: Job, file_field: str, files_max: int
) -> tuple[Fields, list[bytes]]:
    """Return the fields and the files of the form in the job's body. Files are the parts named `file_field`, in order.

    OpenAI's clients name a part `image[]` if the caller gives a list of files.

    Raises InvalidRequest or UnknownModel.
    """
    parts = _Parts(file_field, files_max, schema.rows())
    boundary = parse_options_header(job.content_type)[1].get(b"boundary")
    if not boundary:
        raise _broken("its Content-Type has no boundary")
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": parts.begin,
                "on_header_field": parts.add_header_name,
                "on_header_value": parts.add_header_value,
                "on_header_end": parts.end_header,
                "on_headers_finished": parts.end_headers,
                "on_part_data": parts.add_data,
                "on_part_end": parts.end,
                "on_end": parts.finish,
            },
        )
        parser.write(job.body)
        parser.finalize()
    except FormParserError as error:
        raise _broken(str(error)) from None
    if not parts.is_whole:
        raise _broken("its last boundary is missing")
    if not parts.files:
        raise InvalidRequest(f"{file_field} is missing", param=file_field)
    try:
        fields = schema.model_validate(parts.given, strict=False)
    except ValidationError as error:
        raise invalid_request(error) from None
    model.find_adapter(fields.model)
    return fields, parts.files


class _Parts:
    """Collects the parts of one form. The parser calls the methods as it reads."""

    def __init__(self, file_field: str, files_max: int, known: Container[str]) -> None:
        """known: the fields that the schema accepts or refuses by name."""
        self._file_field, self._files_max, self._known = file_field, files_max, known
        self.fields: dict[str, str] = {}
        self.lists: dict[str, list[str]] = {}  # fields whose names end with [] may come several times
        self.files: list[bytes] = []
        self.is_whole = False

    @property
    def given(self) -> dict[str, Any]:
        """The fields. A form has no null, so those without text count as absent: pages send what users leave empty."""
        lists = {name: list(filter(None, texts)) for name, texts in self.lists.items()}
        return {name: value for each in (self.fields, lists) for name, value in each.items() if value}

    def begin(self) -> None:
        self._headers: dict[bytes, bytes] = {}
        self._header_name, self._header_value, self._data = b"", b"", bytearray()

    def add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def end_header(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name = self._header_value = b""

    def end_headers(self) -> None:
        options = parse_options_header(self._headers.get(b"content-disposition"))[1]
        name, self._is_file = options.get(b"name"), b"filename" in options
        if name is None:
            raise _broken("a part has no name")
        self._name = name.decode(errors="replace")
        if self._name == f"{self._file_field}[]":
            self._name = self._file_field
        if self._name == self._file_field and len(self.files) == self._files_max:
            message = f"the number of {self._name} is more than the {self._files_max} that one request may have"
            raise InvalidRequest(f"{message}; send them in several requests", param=self._name)
        num_fields = len(self.fields) + sum(map(len, self.lists.values()))
        if self._name != self._file_field and num_fields == _FIELDS_MAX:
            raise _broken(f"it has more than {_FIELDS_MAX} fields")

    def add_data(self, data: bytes, start: int, end: int) -> None:
        self._data += memoryview(data)[start:end]
        if self._name == self._file_field or len(self._data) <= FIELD_BYTES_MAX:
            return
        if self._is_file and self._name in self._known:  # the schema refuses it with its own sentence
            del self._data[FIELD_BYTES_MAX:]
            return
        advice = f", and the files of this path are named {self._file_field}" if self._is_file else ""
        message = f"{self._name[:100]} is longer than {FIELD_BYTES_MAX} bytes{advice}"
        raise InvalidRequest(message, param=self._name)

    def end(self) -> None:
        if self._name == self._file_field:
            self.files.append(bytes(self._data))
        elif self._name.endswith("[]"):
            self.lists.setdefault(self._name, []).append(self._data.decode(errors="replace"))
        elif self._name in self.fields:
            raise InvalidRequest(f"{self._name[:100]} appears in the form twice", param=self._name)
        else:
            self.fields[self._name] = self._data.decode(errors="replace")

    def finish(self) -> None:
        self.is_whole = True


def _broken(what: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not a valid {FORM} form: {what}", code=ErrorCode.INVALID_FORM)
