"""Parses calls in the format of Gemma: `call:name{key:value, ...}`, with marks around texts in place of quotes.

The arguments become JSON while they are read.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from conveyor_engine.text.parsing.machine import END, Program, Reading, Write, read_until, skip_space
from conveyor_engine.text.parsing.xml_calls import as_json, escape

_PAIRS = {"{": "}", "[": "]"}


@dataclass(frozen=True, slots=True)
class Gemma:
    """Calls anywhere in the text, each between two marks."""

    begin: str
    end: str
    quote: str

    def build(self) -> Program:
        """Return the program that parses an answer."""
        return partial(_read_answer, self)


def _read_answer(syntax: Gemma, write: Write, first: str | None) -> Reading[None]:
    content = partial(write, "content")
    is_call = False
    while True:
        space, mark = yield from read_until(content, (syntax.begin, syntax.end), first)
        first = None
        if mark == END:
            return
        if mark == syntax.begin:
            is_call = yield from _read_call(syntax, write, space)
        elif not is_call:
            content(space + mark)
        if is_call:  # white space after a call is not text
            first = yield from skip_space()


def _read_call(syntax: Gemma, write: Write, space: str) -> Reading[bool]:
    name: list[str] = []
    behind, mark = yield from read_until(name.append, ("{", syntax.end))
    tool = "".join(name).strip().removeprefix("call").removeprefix(":")
    if mark != "{" or not tool:
        write("content", "".join([space, syntax.begin, *name, behind, mark]))
        return False
    write("tool_call", tool)
    yield from _Arguments(syntax, partial(write, "arguments")).read()
    return True


class _Arguments:
    """The arguments of one call. Their structure is not checked."""

    def __init__(self, syntax: Gemma, write: Callable[[str], None]) -> None:
        self._syntax = syntax
        self._write = write
        self._closing = ["}"]
        self._is_key = True  # whether a key comes next
        self._separator = ""
        self._lacks_value = False  # whether a key has no value yet

    def read(self) -> Reading[None]:
        """Read up to the bracket that ends the arguments, or to a mark before it."""
        self._write("{")
        while self._closing:
            plain: list[str] = []
            marks = (self._syntax.quote, self._syntax.end, *"{}[],", *([":"] if self._is_key else []))
            _, mark = yield from read_until(plain.append, marks)
            if mark in (END, self._syntax.end):
                return
            self._add(mark, "".join(plain).strip())
            if mark == self._syntax.quote:
                yield from self._read_text()

    def _add(self, mark: str, plain: str) -> None:
        """Write the plain text in front of a mark, and the mark."""
        if plain:
            self._begin(json.dumps(plain, ensure_ascii=False) if mark == ":" else as_json(plain))
        if mark == ":":
            self._write(": ")
            self._is_key, self._lacks_value = False, True
        elif mark in _PAIRS:
            self._begin(mark)
            self._closing.append(_PAIRS[mark])
            self._is_key = mark == "{"
        elif mark == "," or mark == self._closing[-1]:
            if self._lacks_value:
                self._begin('""')
            self._separator = ", "
            self._is_key = self._closing[-1] == "}"
            if mark != ",":
                self._write(self._closing.pop())

    def _begin(self, text: str) -> None:
        """Write the beginning of a key or value."""
        self._write(self._separator + text)
        self._separator, self._lacks_value = "", False

    def _read_text(self) -> Reading[None]:
        self._begin('"')
        space, end = yield from read_until(lambda text: self._write(escape(text)), (self._syntax.quote,))
        if end != END:
            self._write(escape(space) + '"')
