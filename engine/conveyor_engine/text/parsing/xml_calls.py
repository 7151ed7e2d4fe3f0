"""Parses calls in the format of Qwen3-Coder: `<function=name>` with a plain-text `<parameter=name>` for each argument.

An argument's text becomes JSON. It becomes a string if the tool's schema says so, or if it is not valid JSON.
"""

import json
from collections.abc import Callable, Mapping, Set
from functools import partial

from conveyor_engine.text.parsing.machine import END, Reading, Write, read_until, skip_space

_BEGIN, _END, _FUNCTION, _FUNCTION_END = "<tool_call>", "</tool_call>", "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_WORDS = {"True": "true", "False": "false", "None": "null"}


class XmlCalls:
    """The parser. `strings`: the string arguments of each tool, by its schema."""

    def __init__(self, strings: Mapping[str, Set[str]]) -> None:
        self._strings = strings

    def read(self, write: Write, first: str | None) -> Reading[None]:
        """Read a whole answer."""
        content = partial(write, "content")
        is_call = False
        while True:
            # Models sometimes leave out the outer mark, but not the mark of the function.
            space, mark = yield from read_until(content, (_BEGIN, _FUNCTION, _END), first)
            first = None
            if mark == END:
                return
            if mark != _END:
                is_call, first = yield from self._read_call(write, space, mark)
            elif not is_call:
                content(space + mark)
            if is_call:  # white space after a call is not text
                first = yield from skip_space(first)

    def _read_call(self, write: Write, space: str, mark: str) -> Reading[tuple[bool, str | None]]:
        held = [space, mark]
        if mark == _BEGIN:
            character = yield from skip_space(None, held.append)
            for expected in _FUNCTION:
                if character != expected:
                    write("content", "".join(held))
                    return False, character
                held.append(character)
                if expected != _FUNCTION[-1]:
                    character = yield
        name: list[str] = []
        space, end = yield from read_until(name.append, (">",))
        tool = "".join(name).strip()
        if end == END or not tool:
            write("content", "".join([*held, *name, space, end]))
            return False, END if end == END else None
        write("tool_call", tool)
        write("arguments", "{")
        yield from self._read_arguments(write, self._strings.get(tool, frozenset()))
        return True, None

    def _read_arguments(self, write: Write, strings: Set[str]) -> Reading[None]:
        separator = ""
        while True:
            _, mark = yield from read_until(_ignore, (_PARAMETER, _FUNCTION_END))
            if mark == _FUNCTION_END:
                write("arguments", "}")
            if mark != _PARAMETER:
                return
            name: list[str] = []
            _, end = yield from read_until(name.append, (">",))
            if end == END:
                return
            key = "".join(name).strip()
            write("arguments", f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            yield from _read_value(partial(write, "arguments"), is_string=key in strings)


def _read_value(write: Callable[[str], None], *, is_string: bool) -> Reading[None]:
    """Read one argument, without the line breaks around it."""
    character = yield
    first = None if character == "\n" else character
    if is_string:
        write('"')
        space, end = yield from read_until(lambda text: write(_escape(text)), (_PARAMETER_END,), first)
        if end != END:
            write(_escape(space.removesuffix("\n")) + '"')
        return
    texts: list[str] = []
    space, end = yield from read_until(texts.append, (_PARAMETER_END,), first)
    if end != END:
        write(_as_json("".join(texts) + space.removesuffix("\n")))


def _as_json(text: str) -> str:
    text = _WORDS.get(text, text)
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return f'"{_escape(text)}"'
    return text


def _refuse(_: str) -> None:
    raise ValueError


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _ignore(_: str) -> None:
    """Drop the text between arguments."""
