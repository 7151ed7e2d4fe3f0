"""POST /v1/completions."""

import time

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from conveyor_engine.api.choice import Delta
from conveyor_engine.api.edge import Edge
from conveyor_engine.api.generated import GeneratedResponse, Usage, generate
from conveyor_engine.api.logprobs import CompletionLogprobs, completion_logprobs
from conveyor_engine.api.prepare import Prepared


class CompletionChoice(msgspec.Struct):
    """Of a chunk or of the whole answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct):
    """A chunk or the whole answer: the same object in this API."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


class CompletionFormat:
    """Answers as completions."""

    def __init__(self, edge: Edge, prepared: Prepared) -> None:
        self._edge = edge
        self._num_top = prepared.top_logprobs
        self._id = prepared.id
        self._created = int(time.time())
        self._no_usage = None if prepared.include_usage else UNSET

    def chunk(self, delta: Delta, usage: Usage | None) -> Completion:
        """One event."""
        return self._completion([self._choice(delta.choice, [delta])], usage or self._no_usage)

    def usage_chunk(self, usage: Usage) -> Completion:
        """The counts, with no choice."""
        return self._completion([], usage)

    def whole(self, deltas: list[list[Delta]], usage: Usage) -> Completion:
        """All choices at once."""
        return self._completion([self._choice(index, of_choice) for index, of_choice in enumerate(deltas)], usage)

    def _choice(self, index: int, deltas: list[Delta]) -> CompletionChoice:
        logprobs = None
        if self._num_top is not None:
            tokens = [token for delta in deltas for token in delta.tokens]
            logprobs = completion_logprobs(self._edge.tokenizer, tokens, self._num_top)
        return CompletionChoice(index, "".join(d.text for d in deltas), logprobs, deltas[-1].finish_reason)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self._id, self._created, self._edge.model_name, choices, usage)


async def create_completion(request: Request) -> GeneratedResponse:
    """Continues each prompt, `n` times."""
    return await generate(request, "completion", CompletionFormat)
