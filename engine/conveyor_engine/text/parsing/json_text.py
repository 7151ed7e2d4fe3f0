"""Reads JSON within an answer, character by character, as it is written: nothing is checked, changed or mended.

Used by the formats beside this file, whose calls are made of it.
"""

import json
from collections.abc import Callable, Collection

from conveyor_engine.text.parsing.machine import END, Reading, Write, skip_space

_OUTSIDE_STRINGS = frozenset(' \t\r\n{}[]:,"+-.0123456789eEtrufalsn')
_NAME, _ARGUMENTS = "name", ("arguments", "parameters")
_PAIRS = {"{": "}", "[": "]"}


def read_string(write: Callable[[str], object]) -> Reading[str | None]:
    """A string behind its quote. Returns what it stands for; None if it is not finished, or none of JSON."""
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
    """An object or a list, of which `opening` is read already. Returns None, or the character that ended it too early.

    The only check is what may stand outside strings: a mark of the model's format there ends what is broken.
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
    """A value that is no part of a call. Returns the next character if it has been read."""
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
    """An object with the name of a tool and its arguments. Returns whether it is one; the next character, if read.

    The call begins when its name and the beginning of its arguments are known. What is no call becomes content, with
    the text `before` it.
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
    """The call that an object becomes."""

    def __init__(self, write: Write, before: str) -> None:
        self._write = write
        self._held = [before]  # the text so far, until it is a call
        self._name: str | None = None
        self._arguments: list[str] | None = None  # those that came before the name
        self._begun = False

    def hold(self, text: str) -> None:
        if not self._begun:
            self._held.append(text)

    def refuse(self) -> bool:
        self._write("content", "".join(self._held))
        return False

    def read_value(self, key: str | None, first: str) -> Reading[str | None]:
        """One property's value. Returns the next character if it has been read."""
        if key == _NAME and first == '"' and self._name is None:
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
        """At this character, which is the object's own or comes too early."""
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
    """Calls that follow each other. Returns whether the last was one; the next character, if it has been read."""
    while True:
        is_call, character = yield from read_call(write, before, first)
        if not is_call:
            return False, character
        character = yield from skip_space(character)
        if character not in separators:
            return True, character
        before, first = character, None
