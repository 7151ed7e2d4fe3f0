"""Serves POST /v1/completions."""

from array import array
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from conveyor_engine.serving.http.app_state import AppState
from conveyor_engine.serving.http.engine_response import open_request
from conveyor_engine.serving.http.events import encode
from conveyor_engine.tasks.generate.preparing.prepare import PreparedText
from conveyor_engine.tasks.generate.serving.choice import Delta
from conveyor_engine.tasks.generate.serving.content_tokens import Token
from conveyor_engine.tasks.generate.serving.formats import ChoicesFormat, Usage, WholeChoice
from conveyor_engine.tasks.generate.serving.generated import GeneratedResponse
from conveyor_engine.tasks.generate.serving.logprobs import (
    CompletionLogprobs,
    PromptLogprob,
    completion_logprobs,
    completion_logprobs_pieces,
    prompt_logprobs_pieces,
)
from conveyor_engine.wire.request import TokenLogprobs


class CompletionChoice(msgspec.Struct):
    """A choice in an event, or in a response that is not streamed."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: Sequence[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType | None = UNSET


class Completion(msgspec.Struct):
    """An event, or the body of a response that is not streamed. Both are the same object in this API."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


class CompletionFormat(ChoicesFormat):
    """Writes answers as completions. With `echo`, the text and the log probabilities begin with the prompt's."""

    def __init__(self, state: AppState, prepared: PreparedText) -> None:
        super().__init__(state, prepared)
        self._shows_prompt = bool(prepared.echoes)
        self._echoes = prepared.echoes
        self._num_echoed: dict[int, int] = {}  # in a stream, by choice that has begun: prompt tokens sent so far

    def _echoed_text(self, choice: int) -> str:
        return self._echoes[choice // self._choices_per_prompt].text if self._shows_prompt else ""

    def _echo_once(self, choice: int) -> str:
        if choice in self._num_echoed:
            return ""
        self._num_echoed[choice] = 0
        return self._echoed_text(choice)

    def _echoed(self, choice: int, logprobs: Sequence[TokenLogprobs], num_sent: int) -> list[Token]:
        """Return the next tokens of an echoed prompt, of which `num_sent` are already sent.

        The prompt's first token has no log probability. Without `echo` the list is empty.
        """
        if not self._shows_prompt:
            return []
        echo = self._echoes[choice // self._choices_per_prompt]
        starts = array("I", echo.packed_starts)
        if num_sent:
            return [Token(each, starts[num_sent + i]) for i, each in enumerate(logprobs)]
        first = TokenLogprobs.of(array("I", echo.packed_token_ids)[0], None, [], [])
        return [Token(each, starts[i]) for i, each in enumerate([first, *logprobs])]

    def _shifted(self, choice: int, tokens: list[Token]) -> list[Token]:
        """Return the answer's tokens, with their starts moved by the length of an echoed prompt."""
        offset = len(self._echoed_text(choice))
        return [Token(token.logprobs, token.start + offset) for token in tokens] if offset else tokens

    def chunk(self, delta: Delta, usage: Usage | None) -> Completion:
        """Return one event."""
        return Completion(*self._head, [self._chunk_choice(delta)], usage or self._no_usage)

    def usage_chunk(self, usage: Usage) -> Completion:
        """Return the event with the token counts and no choices."""
        return Completion(*self._head, [], usage)

    def whole(self, usage: Usage) -> Completion:
        """Return the body with empty `choices`."""
        return Completion(*self._head, [], usage)

    def choice(self, answer: WholeChoice) -> Iterator[bytes]:
        """Yield one choice of the body, in pieces of JSON."""
        text = self._echoed_text(answer.index) + answer.join("content")
        yield b'{"index":%d,"text":%b,"logprobs":' % (answer.index, encode(text))
        if self._with_logprobs:
            tokens = self._echoed(answer.index, answer.prompt_logprobs, 0) + self._shifted(answer.index, answer.tokens)
            yield from completion_logprobs_pieces(self._names, tokens)
        else:
            yield b"null"
        yield b',"finish_reason":%b' % encode(answer.finish_reason)
        if self._prompts:
            yield b',"token_ids":%b' % encode(answer.token_ids.tolist())
            yield b',"prompt_token_ids":%b' % encode(self._prompt_of(answer.index))
        else:
            yield b',"token_ids":null,"prompt_token_ids":null'
        if self._reports_prompt_logprobs:
            yield b","
            yield from prompt_logprobs_pieces(self._names, answer.prompt_logprobs)
        else:
            yield b',"prompt_logprobs":null'
        yield b"}"

    def _chunk_choice(self, delta: Delta) -> CompletionChoice:
        tokens, logprobs = delta.tokens, None
        text = self._echo_once(delta.choice)
        if self._shows_prompt and self._with_logprobs:
            num_sent = self._num_echoed.get(delta.choice, 0)
            echoed = self._echoed(delta.choice, delta.prompt_logprobs, num_sent)
            self._num_echoed[delta.choice] = num_sent + len(echoed)
            tokens = echoed + self._shifted(delta.choice, tokens)
        if self._with_logprobs and tokens:
            logprobs = completion_logprobs(self._names, tokens)
        for _, more in delta.parts:
            text += more
        ids, prompt = self._ids(delta.token_ids), self._prompt_once(delta.choice)
        return CompletionChoice(delta.choice, text, logprobs, delta.finish_reason, ids, prompt)


async def create_completion(request: Request) -> GeneratedResponse:
    """Return the response with `n` continuations of each prompt."""
    return GeneratedResponse(await open_request(request, "completion"), CompletionFormat)
