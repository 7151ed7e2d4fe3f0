"""Parses the channels of gpt-oss (OpenAI's format Harmony), which separate thinking, text and calls.

An answer is `<|channel|>analysis<|message|>thinking<|end|><|start|>assistant<|channel|>final<|message|>text`.
A call is a message `<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`.
"""

import re
from functools import partial
from typing import Final

from conveyor_engine.text.parsing.interface import Field
from conveyor_engine.text.parsing.machine import END, Reading, Write, read_until, replay, skip_space

_BEGINS: Final = ("<|start|>", "<|channel|>")
_MESSAGE: Final = "<|message|>"
_ANALYSIS: Final = "<|channel|>analysis"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT: Final = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CALLER: Final = "to="  # an answer may begin with it, because the prompt ends with the message's author
_MODEL: Final = "assistant"  # a message to it is no call


class Harmony:
    """The program for one answer."""

    def __init__(self, thinking: Field, *, has_tools: bool) -> None:
        """thinking: the field for the channel `analysis`. has_tools: whether the request has tools."""
        self._thinking: Field = thinking
        self._has_tools = has_tools
        self._last: Field | None = None  # the field of the last message, unless it was a call

    def read(self, write: Write, first: str | None) -> Reading[None]:
        """Read a whole answer."""
        held: list[str] = []
        character = yield from skip_space(first, held.append)
        begin = ""
        for expected in _CALLER:
            if character != expected:
                break
            held.append(character)
            character = yield
        else:
            begin, held = "".join(held), []
        yield from replay(self._read_messages(write, begin), [*held, character])

    def _read_messages(self, write: Write, begin: str) -> Reading[None]:
        """Read messages. Text outside of them is content. begin: the beginning of a header that has been read."""
        while True:
            if not begin:
                _, begin = yield from read_until(partial(write, "content"), (*_BEGINS, *_ENDS))
            if begin == END:
                return
            begin = "" if begin in _ENDS else (yield from self._read_message(write, begin))

    def _read_message(self, write: Write, begin: str) -> Reading[str]:
        """Read a message after the beginning of its header. Returns the beginning of the next header if it was read."""
        header = [begin]
        space, mark = yield from read_until(header.append, (_MESSAGE,))
        if mark == END:
            write("content", "".join([*header, space]))
            return END
        field = self._find_field(write, "".join(header))
        texts = _Texts(write, field)
        space, mark = yield from read_until(texts.write, (*_ENDS, *_BEGINS))
        texts.write(space)
        if field == "arguments" and not texts.has_any:
            write(field, "{}")
        return mark if mark in _BEGINS else ""

    def _find_field(self, write: Write, header: str) -> Field:
        """Return the field of a message's text. Begins the call, if the message is one."""
        recipient = _RECIPIENT.search(header)
        if recipient and recipient[1] != _MODEL and self._has_tools:
            write("tool_call", recipient[1])
            self._last = None
            return "arguments"
        field: Field = self._thinking if recipient or _ANALYSIS in header else "content"
        if field == self._last:
            write(field, "\n")
        self._last = field
        return field


class _Texts:
    """Writes the text of one message, and notes whether there is any."""

    def __init__(self, write: Write, field: Field) -> None:
        self._write = write
        self._field: Field = field
        self.has_any = False

    def write(self, text: str) -> None:
        self.has_any = self.has_any or bool(text)
        self._write(self._field, text)
