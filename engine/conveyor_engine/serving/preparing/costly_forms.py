"""Finds the form that a body requires of its answer, and remembers forms that took too long to validate.

The API process searches each short body, so nothing is built except the fields that may require a form. `Lane.FORMS`
prepares the bodies that have one. `masks` remembers which of the grammars that passed cannot be compiled (ADR 126).
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Final

import msgspec
from msgspec import Raw

from conveyor_engine.errors import ErrorCode, InvalidRequest

REMEMBERED_SECONDS: Final = 60.0
REMEMBERED_MAX: Final = 1024  # forms
# A body that is longer without its form may be costly for another reason, so its form is not remembered.
REST_BYTES_MAX: Final = 16 * 2**10
FORM_FIELDS: Final = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "regex", "ebnf"),
)
_TYPED_FIELDS: Final = ("response_format", "output_format", "tool_choice")  # require a form, or not, by their type
_NESTING_FIELDS: Final = ("text", "output_config")  # have a field `format` of that sort
_NULL: Final = Raw(b"null")
_PLAIN_TYPES: Final = (b'"text"', b'"auto"', b'"none"')
_NO_FORMS: Final = (b"", b"null", *_PLAIN_TYPES)
# A body that msgspec cannot read may have a form if it contains one of these, or an escaped letter.
_MARKS: Final = tuple(name.encode() for name in (*FORM_FIELDS, "tool_choice", "format", "\\u00"))

_Body = msgspec.defstruct(
    "_Body", [(name, Raw, _NULL) for name in (*FORM_FIELDS, *_TYPED_FIELDS, *_NESTING_FIELDS, "tools")]
)
_body_decoder = msgspec.json.Decoder(_Body)


class _Typed(msgspec.Struct):
    type: Raw = _NULL


class _Nesting(msgspec.Struct):
    format: Raw = _NULL


def find_form(body: bytes) -> bytes | None:
    """Return the JSON of the fields that require a form of the answer; None if no field does.

    Empty: the body may have a form, but cannot be read here. pydantic also reads NaN, for example.
    """
    try:
        return _find(_body_decoder.decode(body))
    except (msgspec.DecodeError, RecursionError):
        return b"" if any(mark in body for mark in _MARKS) else None


def has_form(body: bytes) -> bool:
    """Return whether the answer has to follow a form: a schema, a regex, a grammar or the call of a tool."""
    return find_form(body) is not None


def _find(body: Any) -> bytes | None:
    forms = {name: bytes(getattr(body, name)) for name in FORM_FIELDS}
    forms |= {name: _find_typed(getattr(body, name)) for name in _TYPED_FIELDS}
    for name in _NESTING_FIELDS:
        if (nesting := bytes(getattr(body, name))).startswith(b"{"):
            forms[name] = _find_typed(msgspec.json.decode(nesting, type=_Nesting).format)
    found = [(name, form) for name, form in forms.items() if form not in _NO_FORMS]
    if not found:
        return None
    if forms["tool_choice"] not in _NO_FORMS:
        found.append(("tools", bytes(body.tools)))
    return b"".join(b"%s=%s\n" % (name.encode(), form) for name, form in found)


def _find_typed(value: Raw) -> bytes:
    """Return the value; nothing if it is an object whose type requires no form."""
    text = bytes(value)
    if text.startswith(b"{") and bytes(msgspec.json.decode(text, type=_Typed).type) in _PLAIN_TYPES:
        return b""
    return text


def form_too_costly() -> InvalidRequest:
    """Return the error for a body whose form took too long to validate."""
    message = "the answer's schema or grammar takes too much CPU time to read; simplify it"
    return InvalidRequest(message, code=ErrorCode.FORM_TOO_COSTLY)


class CostlyForms:
    """The forms that were too costly within the last minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._noted: OrderedDict[bytes, float] = OrderedDict()  # when each was noted, the oldest first

    def note(self, body: bytes) -> bool:
        """Remember the form of this body, which was too costly. Returns False if something else may be the cause."""
        form = find_form(body)
        if not form or len(body) - len(form) > REST_BYTES_MAX:
            return False
        key = _key(form)
        self._noted.pop(key, None)
        self._noted[key] = self._clock()
        self._forget()
        return True

    def has(self, body: bytes) -> bool:
        """Return whether this body's form was too costly."""
        self._forget()
        return bool(self._noted) and _key(find_form(body) or b"") in self._noted

    def _forget(self) -> None:
        while self._noted:
            key, noted_at = next(iter(self._noted.items()))
            if len(self._noted) <= REMEMBERED_MAX and self._clock() - noted_at < REMEMBERED_SECONDS:
                return
            del self._noted[key]


def _key(form: bytes) -> bytes:
    return blake2b(form, digest_size=16).digest()
