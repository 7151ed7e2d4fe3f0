"""What the two formats of answers, completions and chat, have in common. Used by `generated`."""

import io
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from conveyor_engine.serving.http.app_state import AppState
from conveyor_engine.serving.http.choice import Delta, Token
from conveyor_engine.serving.http.output_parser import PLAIN_TEXT, Field, OutputParser
from conveyor_engine.serving.preparing.prepare import PreparedText

encode = msgspec.json.Encoder().encode


class Usage(msgspec.Struct):
    """Token counts: of the whole answer, where each prompt counts once, or of one choice so far."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None  # of prefixes that only the same cache_salt shares


class Format(ABC):
    """The format of answers: completions or chat."""

    def __init__(self, state: AppState, prepared: PreparedText) -> None:
        self._tokenizer = state.model.tokenizer
        self._with_logprobs = prepared.top_logprobs is not None
        self._head = prepared.id, int(time.time()), state.model.name  # the first fields of every object
        self._no_usage = None if prepared.include_usage else UNSET

    def build_parser(self) -> OutputParser:
        """For one choice: what divides its text into fields."""
        return PLAIN_TEXT

    @abstractmethod
    def chunk(self, delta: Delta, usage: Usage | None) -> msgspec.Struct:
        """One event of a stream, with its choice's counts so far when each is to have them."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """The event with the counts, when asked for."""

    @abstractmethod
    def whole(self, usage: Usage) -> msgspec.Struct:
        """The one body, its `choices` empty."""

    @abstractmethod
    def choice(self, answer: "WholeChoice") -> Iterator[bytes]:
        """One of its choices, in pieces of JSON."""


@dataclass(slots=True)
class WholeChoice:
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
