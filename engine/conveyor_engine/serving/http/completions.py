"""POST /v1/completions."""

import time
from collections.abc import Iterator

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from conveyor_engine.serving.http.app_state import AppState
from conveyor_engine.serving.http.choice import Delta
from conveyor_engine.serving.http.engine_response import open_request
from conveyor_engine.serving.http.formats import Answer, Usage, encode
from conveyor_engine.serving.http.generated import GeneratedResponse
from conveyor_engine.serving.http.logprobs import CompletionLogprobs, completion_logprobs, completion_logprobs_pieces
from conveyor_engine.serving.http.output_parser import PLAIN_TEXT, OutputParser
from conveyor_engine.serving.preparing.prepare import PreparedText


class CompletionChoice(msgspec.Struct):
    """A choice in an event or in the whole answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct):
    """One event or the whole answer: the same object in this API."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


class CompletionFormat:
    """Answers as completions."""

    def __init__(self, state: AppState, prepared: PreparedText) -> None:
        self._state = state
        self._with_logprobs = prepared.top_logprobs is not None
        self._id = prepared.id
        self._created = int(time.time())
        self._no_usage = None if prepared.include_usage else UNSET

    def build_parser(self) -> OutputParser:
        return PLAIN_TEXT

    def chunk(self, delta: Delta, usage: Usage | None) -> Completion:
        """One event."""
        return self._completion([self._chunk_choice(delta)], usage or self._no_usage)

    def usage_chunk(self, usage: Usage) -> Completion:
        """The counts, with no choice."""
        return self._completion([], usage)

    def whole(self, usage: Usage) -> Completion:
        """The body without its choices."""
        return self._completion([], usage)

    def choice(self, answer: Answer) -> Iterator[bytes]:
        """One choice of the body."""
        yield b'{"index":%d,"text":%b,"logprobs":' % (answer.index, encode(answer.texts["content"].getvalue()))
        if self._with_logprobs:
            yield from completion_logprobs_pieces(self._state.model.tokenizer, answer.tokens)
        else:
            yield b"null"
        yield b',"finish_reason":%b}' % encode(answer.finish_reason)

    def _chunk_choice(self, delta: Delta) -> CompletionChoice:
        logprobs = None
        if self._with_logprobs and delta.tokens:
            logprobs = completion_logprobs(self._state.model.tokenizer, delta.tokens)
        text = ""
        for _, more in delta.parts:
            text += more
        return CompletionChoice(delta.choice, text, logprobs, delta.finish_reason)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self._id, self._created, self._state.model.name, choices, usage)


async def create_completion(request: Request) -> GeneratedResponse:
    """Continues each prompt, `n` times."""
    return GeneratedResponse(await open_request(request, "completion"), CompletionFormat)
