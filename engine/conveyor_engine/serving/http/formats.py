"""What the two formats of answers, completions and chat, have in common. Used by `generated`."""

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from conveyor_engine.serving.http.choice import Delta, Token
from conveyor_engine.serving.http.output_parser import Field, OutputParser

encode = msgspec.json.Encoder().encode


class Usage(msgspec.Struct):
    """Token counts: of the whole answer, where each prompt counts once, or of one choice so far."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None  # of prefixes that only the same cache_salt shares


class Format(Protocol):
    """The format of answers: completions or chat."""

    def build_parser(self) -> OutputParser:
        """For one choice: what divides its text into fields."""

    def chunk(self, delta: Delta, usage: Usage | None) -> msgspec.Struct:
        """One event of a stream, with its choice's counts so far when each is to have them."""

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """The event with the counts, when asked for."""

    def whole(self, usage: Usage) -> msgspec.Struct:
        """The one body, its `choices` empty."""

    def choice(self, answer: "Answer") -> Iterator[bytes]:
        """One of its choices, in pieces of JSON."""


@dataclass(slots=True)
class Answer:
    """A choice's whole answer while it is made."""

    index: int
    texts: dict[Field, io.StringIO] = field(default_factory=lambda: {"content": io.StringIO()})  # by field
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, delta: Delta) -> int:
        """Appends the delta; returns roughly how many bytes of memory it takes."""
        num_bytes = 500 * len(delta.tokens)
        for name, text in delta.parts:
            self.texts.setdefault(name, io.StringIO()).write(text)
            num_bytes += 4 * len(text)
        self.tokens += delta.tokens
        self.finish_reason = delta.finish_reason
        return num_bytes
