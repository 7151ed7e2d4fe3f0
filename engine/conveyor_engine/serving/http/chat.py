"""POST /v1/chat/completions."""

from collections.abc import Iterator

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from conveyor_engine.serving.http.app_state import AppState
from conveyor_engine.serving.http.choice import Delta
from conveyor_engine.serving.http.engine_response import open_request
from conveyor_engine.serving.http.formats import Format, Usage, WholeChoice, encode
from conveyor_engine.serving.http.generated import GeneratedResponse
from conveyor_engine.serving.http.logprobs import ChatLogprobs, chat_logprobs, chat_logprobs_pieces
from conveyor_engine.serving.preparing.prepare import PreparedText


class DeltaMessage(msgspec.Struct, omit_defaults=True):
    """The new part of a message; the role is in the first one only."""

    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct):
    """A choice in one event."""

    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct):
    """One event of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"


class Message(msgspec.Struct):
    """The answer."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """A choice in the whole answer."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct):
    """The whole answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


class ChatFormat(Format):
    """Answers as chat completions."""

    def __init__(self, state: AppState, prepared: PreparedText) -> None:
        super().__init__(state, prepared)
        self._begun: set[int] = set()

    def chunk(self, delta: Delta, usage: Usage | None) -> ChatChunk:
        """One event; the role is in the first of a choice."""
        role = None if delta.choice in self._begun else "assistant"
        self._begun.add(delta.choice)
        message = DeltaMessage(role, "" if role else None)
        for name, text in delta.parts:
            setattr(message, name, (getattr(message, name) or "") + text)
        choice = ChunkChoice(delta.choice, message, self._logprobs(delta), delta.finish_reason)
        return ChatChunk(*self._head, [choice], usage or self._no_usage)

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, delta.tokens) if self._with_logprobs and delta.tokens else None

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """The counts, with no choice."""
        return ChatChunk(*self._head, [], usage)

    def whole(self, usage: Usage) -> ChatCompletion:
        """The body without its choices."""
        return ChatCompletion(*self._head, [], usage)

    def choice(self, answer: WholeChoice) -> Iterator[bytes]:
        """One choice of the body."""
        message = Message("")
        for name, text in answer.texts.items():
            setattr(message, name, text.getvalue())
        yield b'{"index":%d,"message":%b,"logprobs":' % (answer.index, encode(message))
        if self._with_logprobs:
            yield from chat_logprobs_pieces(self._tokenizer, answer.tokens)
        else:
            yield b"null"
        yield b',"finish_reason":%b}' % encode(answer.finish_reason)


async def create_chat_completion(request: Request) -> GeneratedResponse:
    """Answers the conversation, `n` times."""
    return GeneratedResponse(await open_request(request, "chat"), ChatFormat)
