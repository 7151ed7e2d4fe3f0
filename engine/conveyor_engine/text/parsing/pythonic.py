"""Parses calls in the format of Llama 4, LFM2 and Olmo 3: `[name(key=value), ...]`, with values in Python's syntax.

Values are converted to JSON while they are read. Quotes, escapes, white space, `True`, `False` and `None` change.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from string import hexdigits

from conveyor_engine.text.parsing.machine import END, Program, Reading, Write, read_until, replay, skip_space

_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORD_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+.")
_PAIRS = {"[": "]", "{": "}"}
_CODE_LENGTHS = {"x": 2, "u": 4}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


@dataclass(frozen=True, slots=True)
class Pythonic:
    """Calls between two marks, or in a list at the beginning of an answer."""

    begin: str
    end: str
    is_list: bool = True  # whether the calls are in a list; otherwise each has a line

    def build(self) -> Program:
        """Return the program that parses an answer."""
        return partial(_read_answer, self)


def _read_answer(syntax: Pythonic, write: Write, first: str | None) -> Reading[None]:
    if syntax.is_list:
        held: list[str] = []
        character = yield from skip_space(first, held.append)
        if character != "[":
            yield from replay(_read_marked(syntax, write, None), [*held, character])
            return
        first = yield from _read_calls(syntax, write, held, character)
    yield from _read_marked(syntax, write, first)


def _read_marked(syntax: Pythonic, write: Write, first: str | None) -> Reading[None]:
    content, character = partial(write, "content"), first
    while True:
        space, mark = yield from read_until(content, (syntax.begin, syntax.end), character)
        if mark == END:
            return
        if mark == syntax.begin:
            held = [space, mark]
            character = yield from skip_space(None, held.append)
            character = yield from _read_calls(syntax, write, held, character)
        else:
            content(space)
            character = None


def _read_calls(syntax: Pythonic, write: Write, held: list[str], first: str) -> Reading[str | None]:
    """Read calls. The text in front of them, `held`, becomes content if there is none.

    Returns the next character, or None if it is not read yet.
    """
    character: str | None = first
    if syntax.is_list:
        if first != "[":
            write("content", "".join(held))
            return first
        held.append(first)
        character = None
    while True:
        is_call, character = yield from _read_call(write, held, character)
        if not is_call:
            return character
        character = yield from skip_space(character)
        if syntax.is_list and character != ",":
            return (yield from skip_space(None if character == "]" else character))
        if not syntax.is_list and character not in _WORD_CHARACTERS:
            return character
        held, character = ([","], None) if syntax.is_list else ([], character)


def _read_call(write: Write, held: list[str], first: str | None) -> Reading[tuple[bool, str | None]]:
    """Read `name(key=value, ...)`. Returns whether it is a call, and the next character if it has been read."""

    def refuse(character: str) -> tuple[bool, str]:
        write("content", "".join(held))
        return False, character

    character = yield from skip_space(first, held.append)
    name, character = yield from _read_word(character, held)
    if not name or character != "(":
        return refuse(character)
    held.append(character)
    character = yield from skip_space(None, held.append)
    key = ""
    if character != ")":
        key, character = yield from _read_word(character, held)
        character = yield from skip_space(character, held.append)
        if not key or character != "=":
            return refuse(character)
    write("tool_call", name)
    write("arguments", "{")
    while key:
        write("arguments", f"{json.dumps(key)}: ")
        after = yield from _read_value(partial(write, "arguments"), (yield from skip_space()))
        character = yield from skip_space(after)
        if character != ",":
            break
        character = yield from skip_space()
        key, character = yield from _read_word(character, [])
        character = yield from skip_space(character)
        if not key:
            break
        if character != "=":
            return True, character
        write("arguments", ", ")
    if character == ")":
        write("arguments", "}")
        return True, None
    return True, character


def _read_word(first: str, held: list[str]) -> Reading[tuple[str, str]]:
    """Read a word. Returns the word and the character after it."""
    word: list[str] = []
    character = first
    while character in _WORD_CHARACTERS:
        word.append(character)
        held.append(character)
        character = yield
    return "".join(word), character


def _read_value(write: Callable[[str], None], first: str) -> Reading[str | None]:
    """Read a value and write it as JSON. Returns the first character after the value, or None if it is not read yet."""
    if first in ("'", '"'):
        return (yield from _read_string(write, first))
    if first in _PAIRS:
        return (yield from _read_nested(write, first))
    word, character = yield from _read_word(first, [])
    write(_WORDS.get(word, word))
    return character


def _read_string(write: Callable[[str], None], quote: str) -> Reading[str | None]:
    write('"')
    character = yield
    while character != quote:
        if character == END:
            return END
        if character == "\\":
            character = yield from _read_escape(write)
        else:
            write(_to_json(character))
            character = yield
    write('"')
    return None


def _read_escape(write: Callable[[str], None]) -> Reading[str]:
    """Read what follows a backslash, and write it as JSON. Returns the character after it.

    Characters that are not an escape in Python are kept, with the backslash.
    """
    escaped = yield
    if escaped == END:
        return END
    if escaped not in _CODE_LENGTHS:
        write(_to_json(_ESCAPES.get(escaped, escaped if escaped in "\\'\"" else "\\" + escaped)))
        return (yield)
    code = ""
    while len(code) < _CODE_LENGTHS[escaped]:
        character = yield
        if character == END or character not in hexdigits:
            write(_to_json(f"\\{escaped}{code}"))
            return character
        code += character
    write(f"\\u{code:>04}")
    return (yield)


def _to_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _read_nested(write: Callable[[str], None], first: str) -> Reading[str | None]:
    """Read a list or a dictionary.

    Its structure is not checked. Returns the character that ended it too early, or None.
    """
    write(first)
    closing = [_PAIRS[first]]
    character: str | None = None
    while closing:
        character = yield from skip_space(character)
        if character in ("'", '"'):
            character = yield from _read_string(write, character)
        elif character in _PAIRS:
            closing.append(_PAIRS[character])
            write(character)
            character = None
        elif character == closing[-1]:
            closing.pop()
            write(character)
            character = None
        elif character in (",", ":"):
            write(character + " ")
            character = None
        elif character in _WORD_CHARACTERS and character != END:
            character = yield from _read_value(write, character)
        else:
            return character
    return None
