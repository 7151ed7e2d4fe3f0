"""Parses tool calls with JSON arguments. The formats differ in their marks, so each is a row in `formats`.

No text is lost: if the text after a mark is not a call, it becomes content, including the mark.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from conveyor_engine.text.parsing.json_text import read_call, read_calls, read_nested
from conveyor_engine.text.parsing.machine import END, Program, Reading, Write, read_until, skip_space


@dataclass(frozen=True, slots=True)
class Marked:
    """Calls anywhere in the text. A mark is followed by an object with the tool's name and arguments."""

    begin: str
    ends: Collection[str] = ()  # marks after a call
    around: Collection[str] = ()  # marks around all calls; always dropped
    is_list: bool = False  # whether the objects may be in a list
    name_ends: Collection[str] = ()  # marks after a name, if the name may precede the object
    id_mark: str = ""  # a mark between such a name and the model's own call id; mark and id are dropped
    name: re.Pattern[str] | None = None  # finds the name, its group 1, in the text in front of the object

    def build(self) -> Program:
        """Return the program that parses an answer."""
        return self._read

    def read_text(self, write: Write, first: str | None) -> Reading[None]:
        """Read an answer without calls. Its marks are dropped, as the detokenizer drops special tokens."""
        while (yield from read_until(partial(write, "content"), self._marks, first))[1] != END:
            first = None

    @property
    def _marks(self) -> tuple[str, ...]:
        return self.begin, *self.ends, *self.around

    def _read(self, write: Write, first: str | None) -> Reading[None]:
        content = partial(write, "content")
        is_call = False
        while True:
            space, mark = yield from read_until(content, self._marks, first)
            first = None
            if mark == END:
                return
            if mark == self.begin:
                is_call, first = yield from self._read_calls(write, space)
            elif not is_call and mark not in self.around:
                content(space + mark)
            if is_call:  # white space after a call is not text
                first = yield from skip_space(first)

    def _read_calls(self, write: Write, space: str) -> Reading[tuple[bool, str | None]]:
        before = space + self.begin
        held: list[str] = []
        character = yield from skip_space(None, held.append)
        before += "".join(held)
        if self.is_list and character == "[":
            is_call, after = yield from read_calls(write, before + character, (",",))
            return is_call, None if is_call and after == "]" else after
        if self.name_ends and character != "{":
            return (yield from self._read_named(write, before, character))
        return (yield from read_call(write, before, character))

    def _read_named(self, write: Write, before: str, first: str) -> Reading[tuple[bool, str | None]]:
        name: list[str] = []
        marks = (*filter(None, [self.id_mark]), *self.name_ends)
        space, mark = yield from read_until(name.append, marks, first)
        held = [before, *name, space]
        if self.id_mark and mark == self.id_mark:
            held.append(mark)
            space, mark = yield from read_until(held.append, self.name_ends, None)
            held.append(space)
        if mark == "{":  # the object begins
            character = mark
        else:
            held.append(mark)
            character = yield from skip_space(END if mark == END else None, held.append)
        if character != "{" or not (tool := self._find_name("".join(name).strip())):
            write("content", "".join(held))
            return False, character
        write("tool_call", tool)
        return True, (yield from read_nested(character, partial(write, "arguments")))

    def _find_name(self, text: str) -> str:
        """Return the tool's name; "" if the text has none."""
        if self.name is None:
            return text
        found = self.name.fullmatch(text)
        return found[1] if found else ""


@dataclass(frozen=True, slots=True)
class Leading:
    """Calls only at the beginning of an answer, possibly after a mark."""

    mark: str = ""
    opening: str = ""  # the bracket before the first call, if the calls are in a list
    separators: Collection[str] = (",",)  # between calls

    def build(self) -> Program:
        """Return the program that parses an answer."""
        return self._read

    def _read(self, write: Write, first: str | None) -> Reading[None]:
        content = partial(write, "content")
        held: list[str] = []
        character: str | None = yield from skip_space(first, held.append)
        for expected in self.mark:
            if character != expected:
                break
            held.append(character)
            character = yield
        character = yield from skip_space(character, held.append)
        begins = "".join(held).strip() in ("", self.mark)
        if self.opening and begins and character == self.opening:
            held.append(character)
            character = yield from skip_space(None, held.append)
        if begins and character == "{":
            is_call, character = yield from read_calls(write, "".join(held), self.separators, character)
            held.clear()
            if is_call:
                character = yield from skip_space(None if self.opening and character == "]" else character)
        content("".join(held))
        yield from read_until(content, (), character)
