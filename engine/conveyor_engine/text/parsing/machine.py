"""Runs a parser that is written as a generator, in which `yield` returns the next character of the answer.

Such a parser is written like a parser of a whole text, and keeps its position between chunks. The cost of a character
does not depend on earlier ones, and the division into chunks cannot change the result. The formats in this package use
the functions here.
"""

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from functools import partial
from typing import TypeVar

from conveyor_engine.text.parsing.interface import Field, Part

END = ""
"""The result of `yield` at the end of the text. A program then writes the text that it holds back, and returns."""

Result = TypeVar("Result")
Reading = Generator[None, str, Result]
Write = Callable[[Field, str], None]
Program = Callable[[Write, str | None], Reading[None]]
"""Reads an answer and writes its parts. The first character is passed if another program has already read it."""


class Machine:
    """An `OutputParser` that runs a program."""

    def __init__(self, program: Program) -> None:
        self._fields: list[Field] = []  # the fields of parts that `_take` has not returned yet
        self._texts: list[list[str]] = []  # the texts of the same parts, in pieces
        self._reading = program(self._write, None)
        next(self._reading)

    def feed(self, text: str) -> Sequence[Part]:
        send = self._reading.send
        for character in text:
            send(character)
        return self._take()

    def finish(self) -> Sequence[Part]:
        with contextlib.suppress(StopIteration):
            while True:  # nested programs get END first
                self._reading.send(END)
        return self._take()

    def _write(self, field: Field, text: str) -> None:
        if field == "tool_call" or not self._fields or self._fields[-1] != field:
            self._fields.append(field)
            self._texts.append([])
        self._texts[-1].append(text)

    def _take(self) -> Sequence[Part]:
        parts = [(field, "".join(texts)) for field, texts in zip(self._fields, self._texts, strict=True)]
        self._fields, self._texts = [], []
        return [part for part in parts if part[1]]


def read_until(
    write: Callable[[str], None], marks: Collection[str], first: str | None = None
) -> Reading[tuple[str, str]]:
    """Write text up to a mark. Returns the white space before the mark, which is not written, and the mark or END."""
    begins = {mark[0] for mark in marks}
    space = held = ""  # white space, and after it text that may become a mark
    while True:
        character = (yield) if first is None else first
        first = None
        if character == END:
            write(space + held)
            return "", END
        held += character
        while held and not (held[0] in begins and any(mark.startswith(held) for mark in marks)):
            if held[0].isspace():
                space += held[0]
            else:
                write(space + held[0])
                space = ""
            held = held[1:]
        if held in marks:
            return space, held


def replay(program: Reading[None], seen: Iterable[str]) -> Reading[None]:
    """Run a program first on characters that have already been read, then on further ones."""
    next(program)
    with contextlib.suppress(StopIteration):
        for character in seen:
            program.send(character)
        while True:
            program.send((yield))


def read_content(write: Write, first: str | None) -> Reading[None]:
    """Read all text as content."""
    yield from read_until(partial(write, "content"), (), first)


def skip_space(first: str | None = None, write: Callable[[str], object] = str) -> Reading[str]:
    """Return the next character that is not white space. The skipped white space is passed to `write`."""
    character = (yield) if first is None else first
    while character.isspace():
        write(character)
        character = yield
    return character
