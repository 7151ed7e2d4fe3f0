"""POST /v1/completions."""

from collections.abc import Iterator

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from conveyor_engine.serving.http.choice import Delta
from conveyor_engine.serving.http.engine_response import open_request
from conveyor_engine.serving.http.formats import Format, Usage, WholeChoice, encode
from conveyor_engine.serving.http.generated import GeneratedResponse
from conveyor_engine.serving.http.logprobs import CompletionLogprobs, completion_logprobs, completion_logprobs_pieces


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


class CompletionFormat(Format):
    """Answers as completions."""

    def chunk(self, delta: Delta, usage: Usage | None) -> Completion:
        """One event."""
        return Completion(*self._head, [self._chunk_choice(delta)], usage or self._no_usage)

    def usage_chunk(self, usage: Usage) -> Completion:
        """The counts, with no choice."""
        return Completion(*self._head, [], usage)

    def whole(self, usage: Usage) -> Completion:
        """The body without its choices."""
        return Completion(*self._head, [], usage)

    def choice(self, answer: WholeChoice) -> Iterator[bytes]:
        """One choice of the body."""
        yield b'{"index":%d,"text":%b,"logprobs":' % (answer.index, encode(answer.texts["content"].getvalue()))
        if self._with_logprobs:
            yield from completion_logprobs_pieces(self._tokenizer, answer.tokens)
        else:
            yield b"null"
        yield b',"finish_reason":%b}' % encode(answer.finish_reason)

    def _chunk_choice(self, delta: Delta) -> CompletionChoice:
        logprobs = None
        if self._with_logprobs and delta.tokens:
            logprobs = completion_logprobs(self._tokenizer, delta.tokens)
        text = ""
        for _, more in delta.parts:
            text += more
        return CompletionChoice(delta.choice, text, logprobs, delta.finish_reason)


async def create_completion(request: Request) -> GeneratedResponse:
    """Continues each prompt, `n` times."""
    return GeneratedResponse(await open_request(request, "completion"), CompletionFormat)
