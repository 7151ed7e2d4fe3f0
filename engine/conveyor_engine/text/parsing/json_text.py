"""Reads JSON within an answer, character by character. The JSON is not validated, changed or repaired.

Used by the formats in this package whose calls contain JSON.
"""

import json
from collections.abc import Callable, Collection

from conveyor_engine.text.parsing.machine import END, Reading, Write, skip_space

_OUTSIDE_STRINGS = frozenset(' \t\r\n{}[]:,"+-.0123456789eEtrufalsn')
_NAMES, _ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters")
_PAIRS = {"{": "}", "[": "]"}


def read_string(write: Callable[[str], object]) -> Reading[str | None]:
    """Read a string after its opening quote. Returns its value; None if it is unfinished or not valid JSON."""
    raw = ['"']
    escaped = False
    while True:
        character = yield
        if character == END:
            return None
        write(character)
        raw.append(character)
        if character == '"' and not escaped:
            break
        escaped = character == "\\" and not escaped
    try:
        text: str = json.loads("".join(raw), strict=False)
    except ValueError:
        return None
    return text


def read_nested(opening: str, write: Callable[[str], object]) -> Reading[str | None]:
    """Read an object or a list after its `opening` bracket. Returns None, or the character that ended it too early.

    A character that JSON does not allow outside strings ends the value. So a broken value ends at the model's next
    mark, for example `</tool_call>`. Characters inside strings are not checked.
    """
    write(opening)
    depth, in_string, escaped = 1, False, False
    while True:
        character = yield
        if character == END or not (in_string or character in _OUTSIDE_STRINGS):
            return character
        write(character)
        if in_string:
            in_string = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            in_string = True
        elif character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
            if not depth:
                return None


def _read_other(first: str, write: Callable[[str], object]) -> Reading[str | None]:
    """Read a value that does not belong to a call. Returns the character after it if that was read, otherwise None."""
    if first in _PAIRS:
        return (yield from read_nested(first, write))
    write(first)
    if first == '"':
        yield from read_string(write)
        return None
    while (character := (yield)) not in (END, ",", "}") and not character.isspace():
        write(character)
    return character


def read_call(write: Write, before: str, first: str | None = None) -> Reading[tuple[bool, str | None]]:
    """Read an object with a tool's name and arguments. Returns whether it is a call, and the next character if read.

    The call begins when its name and the beginning of its arguments are known. If it is not a call, it becomes content,
    with the text `before` it.
    """
    call = _Call(write, before)
    character = yield from skip_space(first, call.hold)
    if character != "{":
        return call.refuse(), character
    call.hold(character)
    while True:
        character = yield from skip_space(None, call.hold)
        if character != '"':
            return call.end(character)
        call.hold(character)
        key = yield from read_string(call.hold)
        character = yield from skip_space(None, call.hold)
        if character != ":":
            return call.end(character)
        call.hold(character)
        character = yield from skip_space(None, call.hold)
        if character in (END, ",", "}"):
            return call.end(character)
        after = yield from call.read_value(key, character)
        character = yield from skip_space(after, call.hold)
        if character != ",":
            return call.end(character)
        call.hold(character)


class _Call:
    """The state of an object that may become a call."""

    def __init__(self, write: Write, before: str) -> None:
        self._write = write
        self._held = [before]  # the text so far, until the call begins
        self._name: str | None = None
        self._arguments: list[str] | None = None  # arguments that came before the name
        self._begun = False

    def hold(self, text: str) -> None:
        if not self._begun:
            self._held.append(text)

    def refuse(self) -> bool:
        self._write("content", "".join(self._held))
        return False

    def read_value(self, key: str | None, first: str) -> Reading[str | None]:
        """Read the value of one property. Returns the next character if it has been read."""
        if key in _NAMES and first == '"' and self._name is None:
            self.hold(first)
            self._name = yield from read_string(self.hold)
            if self._name and self._arguments is not None:
                self._begin()
                self._write("arguments", "".join(self._arguments))
            return None
        if key in _ARGUMENTS and first == "{" and self._arguments is None:
            self._arguments = []
            if self._name:
                self._begin()
            return (yield from read_nested(first, self._write_arguments))
        return (yield from _read_other(first, self.hold))

    def end(self, character: str) -> tuple[bool, str | None]:
        """End the object at this character: its closing bracket, or a character at which it is broken."""
        if not self._begun:
            self.hold(character if character == "}" else "")
            self.refuse()
        return self._begun, None if character == "}" else character

    def _begin(self) -> None:
        assert self._name
        self._begun, self._held = True, []
        self._write("tool_call", self._name)

    def _write_arguments(self, text: str) -> None:
        if self._begun:
            self._write("arguments", text)
        else:
            assert self._arguments is not None
            self._arguments.append(text)
            self.hold(text)


def read_calls(
    write: Write, before: str, separators: Collection[str], first: str | None = None
) -> Reading[tuple[bool, str | None]]:
    """Read consecutive calls.

    Returns whether the last object was a call, and the next character if it has been read.
    """
    while True:
        is_call, character = yield from read_call(write, before, first)
        if not is_call:
            return False, character
        character = yield from skip_space(character)
        if character not in separators:
            return True, character
        before, first = character, None
