"""POST /v1/chat/completions."""

import time

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from conveyor_engine.api.choice import Delta
from conveyor_engine.api.edge import Edge
from conveyor_engine.api.generated import GeneratedResponse, Usage, generate
from conveyor_engine.api.logprobs import ChatLogprobs, chat_logprobs
from conveyor_engine.api.prepare import Prepared


class DeltaMessage(msgspec.Struct, omit_defaults=True):
    """What is new; the role comes once, first."""

    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct):
    """Of one event."""

    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct):
    """One event."""

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
    """Of the whole answer."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletion(msgspec.Struct):
    """The whole answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


class ChatFormat:
    """Answers as chat completions."""

    def __init__(self, edge: Edge, prepared: Prepared) -> None:
        self._edge = edge
        self._with_logprobs = prepared.top_logprobs is not None
        self._id = prepared.id
        self._created = int(time.time())
        self._no_usage = None if prepared.include_usage else UNSET
        self._begun: set[int] = set()

    def chunk(self, delta: Delta, usage: Usage | None) -> ChatChunk:
        """One event; a choice's first has its role."""
        role = None if delta.choice in self._begun else "assistant"
        self._begun.add(delta.choice)
        message = DeltaMessage(role, delta.text if delta.text or role else None)
        choice = ChunkChoice(delta.choice, message, self._logprobs([delta]), delta.finish_reason)
        return ChatChunk(self._id, self._created, self._edge.model_name, [choice], usage or self._no_usage)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """The counts, with no choice."""
        return ChatChunk(self._id, self._created, self._edge.model_name, [], usage)

    def whole(self, deltas: list[list[Delta]], usage: Usage) -> ChatCompletion:
        """All choices at once."""
        choices = [
            ChatChoice(index, Message("".join(d.text for d in of)), self._logprobs(of), of[-1].finish_reason)
            for index, of in enumerate(deltas)
        ]
        return ChatCompletion(self._id, self._created, self._edge.model_name, choices, usage)

    def _logprobs(self, deltas: list[Delta]) -> ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        return chat_logprobs(self._edge.tokenizer, [token for delta in deltas for token in delta.tokens])


async def create_chat_completion(request: Request) -> GeneratedResponse:
    """Answers the conversation, `n` times."""
    return await generate(request, "chat", ChatFormat)
