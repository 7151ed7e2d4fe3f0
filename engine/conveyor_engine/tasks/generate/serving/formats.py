"""Base classes for the formats of generated answers. Used by `generated`.

`Format` is the interface that `generated` needs. `ChoicesFormat` is for completions and chat, whose answers are a list
of choices. `BlocksFormat` is for `messages` and `responses`, whose answers are a list of blocks.
"""

import io
import time
import uuid
from abc import ABC, abstractmethod
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from conveyor_engine.errors import RequestError
from conveyor_engine.serving.http.app_state import AppState
from conveyor_engine.serving.http.events import encode, event
from conveyor_engine.serving.http.failures import failure_body
from conveyor_engine.serving.http.receipts import Receipt
from conveyor_engine.serving.preparing.tool_use import CalledAs
from conveyor_engine.tasks.generate.preparing.prepare import PreparedText
from conveyor_engine.tasks.generate.serving.choice import Delta
from conveyor_engine.tasks.generate.serving.content_tokens import Token
from conveyor_engine.tasks.generate.serving.logprobs import TokenNames
from conveyor_engine.text.parsing.build import build_parser
from conveyor_engine.text.parsing.interface import OutputParser
from conveyor_engine.wire.request import TokenLogprobs

_BLOCK_BYTES = 500  # roughly the memory that a block takes besides its text


class Usage(msgspec.Struct):
    """Token counts of the whole answer, in which each prompt counts once, or of one choice so far."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None  # cached tokens; only for requests with a cache_salt
    completion_tokens_details: dict[str, int] | UnsetType = UNSET  # of thinking and of a prediction
    receipt: Receipt | UnsetType = UNSET  # at the end, if the request asks for it


BlockKind = Literal["content", "reasoning", "tool_call"]


@dataclass(slots=True)
class Block:
    """Consecutive text of one kind: content, thinking or a tool call. A call's text is its arguments."""

    kind: BlockKind
    name: str = ""
    written: io.StringIO = field(default_factory=io.StringIO)
    tokens: list[Token] = field(default_factory=list)  # of content, if log probabilities are requested

    @property
    def text(self) -> str:
        return self.written.getvalue()


@dataclass(slots=True)
class WholeChoice:
    """Collects a choice's answer until it is complete."""

    index: int
    blocks: list[Block] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))  # if the request asks for them
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # if requested; not of the first token
    finish_reason: str | None = None
    stop_string: str | None = None

    def add(self, delta: Delta) -> int:
        """Append the delta. Return roughly how many bytes of memory it takes."""
        num_bytes = 500 * (len(delta.tokens) + len(delta.prompt_logprobs)) + 4 * len(delta.token_ids)
        num_blocks = len(self.blocks)
        self.token_ids.extend(delta.token_ids)
        self.prompt_logprobs += delta.prompt_logprobs
        for name, text in delta.parts:
            if name == "tool_call":
                self.blocks.append(Block("tool_call", text))
            else:
                self._find_block("tool_call" if name == "arguments" else name).written.write(text)
            num_bytes += 4 * len(text)
        self.tokens += delta.tokens
        if delta.content_tokens:
            self._find_last_text().tokens.extend(delta.content_tokens)
        self.finish_reason, self.stop_string = delta.finish_reason, delta.stop_string
        return num_bytes + _BLOCK_BYTES * (len(self.blocks) - num_blocks)

    def _find_block(self, kind: BlockKind) -> Block:
        if not self.blocks or self.blocks[-1].kind != kind:
            self.blocks.append(Block(kind))
        return self.blocks[-1]

    def _find_last_text(self) -> Block:
        return next(block for block in reversed(self.blocks) if block.kind == "content")

    def join(self, kind: BlockKind) -> str:
        """Return the text of all blocks of one kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def calls(self) -> list[Block]:
        """The blocks that are tool calls."""
        return [block for block in self.blocks if block.kind == "tool_call"]


class Format(ABC):
    """The format of one answer, whole or as a stream."""

    shows_content_tokens: ClassVar[bool] = False
    """Whether each part of the content has the log probabilities of its own tokens, if the client requests them."""

    def __init__(self, state: AppState, prepared: PreparedText) -> None:
        self._parsing = prepared.parsing
        self._called_as = prepared.called_as
        self._call_numbers = defaultdict[int, Iterator[int]](
            partial(count, self._parsing.num_earlier_calls)
        )  # by choice
        self.on_held: Callable[[int], None] = lambda _: None  # called with the number of bytes kept until the end

    def build_parser(self) -> OutputParser:
        """Build the parser that divides one choice's text into content, thinking and tool calls."""
        return build_parser(self._parsing)

    @abstractmethod
    def write_whole(self, answers: Sequence[WholeChoice], usage: Usage) -> Iterator[bytes]:
        """Yield the body of a response that is not streamed, in pieces of JSON."""

    def write_begin(self, usage: Usage) -> bytes:
        """Return the events that a stream has before its first delta."""
        return b""

    @abstractmethod
    def write_events(self, delta: Delta, usage: Usage | None) -> bytes:
        """Return the events for a delta. `usage`: its choice's token counts so far, if the events have them."""

    @abstractmethod
    def write_end(self, usage: Usage) -> bytes:
        """Return the events that a stream has after its last delta."""

    @abstractmethod
    def write_failure(self, error: RequestError) -> bytes:
        """Return the last event of a stream that fails."""

    def _find_tool(self, name: str) -> CalledAs:
        """Return the tool that the client knows, by the name of the function that the model called."""
        return self._called_as.get(name) or CalledAs(name)

    def _make_call_id(self, prefix: str, function: str, choice: int = 0) -> str:
        """Return the id for a call of this function, as the model's template expects ids."""
        match self._parsing.call_ids:
            case "short":
                return uuid.uuid4().hex[:9]
            case "numbered":
                return f"functions.{function}:{next(self._call_numbers[choice])}"
        return f"{prefix}_{uuid.uuid4().hex}"


class ChoicesFormat(Format):
    """The format of completions and chat."""

    def __init__(self, state: AppState, prepared: PreparedText) -> None:
        super().__init__(state, prepared)
        self._with_logprobs = prepared.top_logprobs is not None
        self._names = TokenNames(
            state.model.tokenizer, as_ids=prepared.tokens_as_ids, with_chosen=prepared.names_alternatives
        )
        self._prompts = prepared.prompt_token_ids
        self._choices_per_prompt = prepared.choices_per_prompt
        self._reports_prompt_logprobs = prepared.reports_prompt_logprobs
        self._prompts_sent: set[int] = set()  # in a stream: the choices whose prompts are already sent
        self._head = prepared.id, int(time.time()), prepared.model  # the first fields of every object
        self._includes_usage = prepared.include_usage
        self._no_usage = None if prepared.include_usage else UNSET

    def write_whole(self, answers: Sequence[WholeChoice], usage: Usage) -> Iterator[bytes]:
        """Yield the body with its choices."""
        begin, end = encode(self.whole(usage)).split(b'"choices":[]')
        yield begin + b'"choices":['
        for answer in answers:
            if answer.index:
                yield b","
            yield from self.choice(answer)
        yield b"]"
        yield from self.behind_choices(answers)
        yield end

    def write_events(self, delta: Delta, usage: Usage | None) -> bytes:
        """Return one event for the delta."""
        return event(encode(self.chunk(delta, usage)))

    def write_end(self, usage: Usage) -> bytes:
        """Return the event with token counts, if the request asks for them, and the event `[DONE]`."""
        counts = event(encode(self.usage_chunk(usage))) if self._includes_usage else b""
        return counts + b"data: [DONE]\n\n"

    def write_failure(self, error: RequestError) -> bytes:
        """Return the error as an event in OpenAI's form. OpenAI's clients check each event for errors."""
        return event(failure_body(error))

    def _prompt_of(self, choice: int) -> list[int] | UnsetType:
        """Return the tokens of the choice's prompt; UNSET unless the request asks for them."""
        return array("I", self._prompts[choice // self._choices_per_prompt]).tolist() if self._prompts else UNSET

    def _prompt_once(self, choice: int) -> list[int] | UnsetType:
        """Return the choice's prompt as `_prompt_of` does on the first call for a choice, and UNSET on later calls."""
        if choice in self._prompts_sent:
            return UNSET
        self._prompts_sent.add(choice)
        return self._prompt_of(choice)

    def _ids(self, token_ids: Sequence[int]) -> Sequence[int] | UnsetType:
        return token_ids if self._prompts else UNSET

    @abstractmethod
    def chunk(self, delta: Delta, usage: Usage | None) -> msgspec.Struct:
        """Return the event for a delta. `usage`: its choice's token counts so far, if the event has them."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """Return the event with token counts, which is sent if the request asks for it."""

    @abstractmethod
    def whole(self, usage: Usage) -> msgspec.Struct:
        """Return the body of a response that is not streamed, with empty `choices`."""

    @abstractmethod
    def choice(self, answer: WholeChoice) -> Iterator[bytes]:
        """Yield one of the body's choices, in pieces of JSON."""

    def behind_choices(self, answers: Sequence[WholeChoice]) -> Iterator[bytes]:
        """Yield the fields after the choices, in pieces of JSON."""
        return iter(())


class BlocksFormat(Format):
    """The format of messages and responses: one choice, whose text, thinking and calls are blocks in their order."""

    def __init__(self, state: AppState, prepared: PreparedText) -> None:
        super().__init__(state, prepared)
        self._id, self._model = prepared.id, prepared.model
        self._open: Block | None = None  # the open block of a stream
        self._content_tokens: Sequence[Token] = ()  # of the current delta, until they are written
        self._finish_reason: str | None = None
        self._stop_string: str | None = None

    def write_events(self, delta: Delta, usage: Usage | None) -> bytes:
        """Return the events for a delta, including those that begin and end blocks."""
        events = []
        self._content_tokens = delta.content_tokens
        for name, text in delta.parts:
            kind: BlockKind = "tool_call" if name == "arguments" else name
            if name == "tool_call" or self._open is None or self._open.kind != kind:
                events.append(self._end_block())
                self._open = Block(kind, text if name == "tool_call" else "")
                events.append(self.begin_block(self._open))
            if name != "tool_call":
                events.append(self.write_text(self._open, text))
        self._finish_reason, self._stop_string = delta.finish_reason, delta.stop_string
        return b"".join(events)

    def write_end(self, usage: Usage) -> bytes:
        """Return the events that end the last block and the answer."""
        return self._end_block() + self.end_answer(usage)

    def _end_block(self) -> bytes:
        block, self._open = self._open, None
        return b"" if block is None else self.end_block(block)

    @abstractmethod
    def begin_block(self, block: Block) -> bytes:
        """Return the events that begin a block."""

    @abstractmethod
    def write_text(self, block: Block, text: str) -> bytes:
        """Return the events for more text of the block."""

    @abstractmethod
    def end_block(self, block: Block) -> bytes:
        """Return the events that end the block."""

    @abstractmethod
    def end_answer(self, usage: Usage) -> bytes:
        """Return the last events of the stream."""
