"""Parses calls whose arguments are plain texts between marks, as Qwen3-Coder, GLM, MiniMax and Seed write them.

An argument's text becomes JSON. It becomes a string if the tool's schema says so, or if it is not valid JSON.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from conveyor_engine.text.parsing.machine import END, Program, Reading, Write, read_until, skip_space
from conveyor_engine.text.schema.keywords import type_of

# The arguments of each tool that may be strings, with the other types that each may have, by the tool's schema.
Strings = Mapping[str, Mapping[str, Collection[str]]]
_WORDS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class XmlSyntax:
    """The marks of one format. A function's mark is followed by the tool's name, a parameter's by the argument's."""

    begin: str  # around one or several calls; dropped, also if models leave it out; "": there is none
    end: str
    function: str
    name_end: str  # "": the name ends with the first parameter, or with the call
    function_end: str
    parameter: str
    key_end: str
    parameter_end: str
    value: str = ""  # a mark between the end of an argument's name and its text
    string_mark: str = ""  # text in front of that mark if the argument is a string; line breaks then belong to it

    def build(self, strings: Strings) -> Program:
        """Return the program that parses an answer."""
        return _XmlCalls(self, strings).read


class _XmlCalls:
    """The parser of one answer."""

    def __init__(self, syntax: XmlSyntax, strings: Strings) -> None:
        self._syntax = syntax
        self._strings = strings

    def read(self, write: Write, first: str | None) -> Reading[None]:
        """Read a whole answer."""
        content, syntax = partial(write, "content"), self._syntax
        is_call = False
        while True:
            # Models sometimes leave out the outer mark, but not the mark of the function.
            marks = [mark for mark in (syntax.begin, syntax.function, syntax.end) if mark]
            space, mark = yield from read_until(content, marks, first)
            first = None
            if mark == END:
                return
            if mark in (syntax.begin, syntax.function):
                is_call, first = yield from self._read_call(write, space, mark)
            elif not is_call:
                content(space + mark)
            if is_call:  # white space after a call is not text
                first = yield from skip_space(first)

    def _read_call(self, write: Write, space: str, mark: str) -> Reading[tuple[bool, str | None]]:
        held, syntax = [space, mark], self._syntax
        if mark == syntax.begin:
            character = yield from skip_space(None, held.append)
            for expected in syntax.function:
                if character != expected:
                    write("content", "".join(held))
                    return False, character
                held.append(character)
                if expected != syntax.function[-1]:
                    character = yield
        name: list[str] = []
        space, end = yield from read_until(name.append, self._name_ends)
        tool = "".join(name).strip()
        if end == END or not tool:
            write("content", "".join([*held, *name, space, end]))
            return False, END if end == END else None
        write("tool_call", tool)
        write("arguments", "{")
        yield from self._read_arguments(write, self._strings.get(tool, {}), end)
        return True, None

    @property
    def _name_ends(self) -> tuple[str, ...]:
        syntax = self._syntax
        return (syntax.name_end,) if syntax.name_end else (syntax.parameter, syntax.function_end)

    def _read_arguments(self, write: Write, strings: Mapping[str, Collection[str]], mark: str) -> Reading[None]:
        """Read the arguments. mark: that behind the tool's name."""
        separator, syntax = "", self._syntax
        while True:
            if mark not in (syntax.parameter, syntax.function_end):
                _, mark = yield from read_until(_ignore, (syntax.parameter, syntax.function_end))
            if mark == syntax.function_end:
                write("arguments", "}")
            if mark != syntax.parameter:
                return
            name: list[str] = []
            _, mark = yield from read_until(name.append, (syntax.key_end,))
            attributes: list[str] = []
            if syntax.value and mark != END:
                _, mark = yield from read_until(attributes.append, (syntax.value,))
            if mark == END:
                return
            key = "".join(name).strip()
            is_marked = bool(syntax.string_mark) and syntax.string_mark in "".join(attributes)
            others = () if is_marked else strings.get(key)
            write("arguments", f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            yield from self._read_value(partial(write, "arguments"), others)

    def _read_value(self, write: Callable[[str], None], others: Collection[str] | None) -> Reading[None]:
        """Read one argument, without the line breaks around it.

        others: the types besides string that it may have; empty: it is a string; None: unknown.
        """
        ends = (self._syntax.parameter_end,)
        line_break = "" if self._syntax.string_mark else "\n"
        character = yield
        first = None if character == "\n" == line_break else character
        if others is not None and not others:
            write('"')
            space, end = yield from read_until(lambda text: write(escape(text)), ends, first)
            if end != END:
                write(escape(space.removesuffix(line_break)) + '"')
            return
        texts: list[str] = []
        space, end = yield from read_until(texts.append, ends, first)
        if end != END:
            write(as_json("".join(texts) + space.removesuffix("\n"), others))


def as_json(text: str, others: Collection[str] | None = None) -> str:
    """Return the text if it is JSON of one of the types, otherwise as a string. None: of any type."""
    word = _WORDS.get(text, text)
    try:
        value = json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return f'"{escape(text)}"'
    return word if others is None or type_of(value) in others else f'"{escape(text)}"'


def _refuse(_: str) -> None:
    raise ValueError


def escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _ignore(_: str) -> None:
    """Drop the text between arguments."""
