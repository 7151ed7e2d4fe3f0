"""Turns the engine's outputs for one choice into parts of a message with log probabilities.

`generated` uses one Choice for each engine request. This module knows neither HTTP nor the response's JSON.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from conveyor_engine.serving.http.failures import find_failure
from conveyor_engine.serving.metrics import EngineMetrics
from conveyor_engine.tasks.generate.preparing.prepare import PreparedChoice
from conveyor_engine.tasks.generate.serving.content_tokens import ContentTokens, Token
from conveyor_engine.text.detokenizer import Detokenizer, Piece
from conveyor_engine.text.parsing.interface import OutputParser, Part
from conveyor_engine.text.stop_strings import StopStrings
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.request import FinishReason, RequestOutput, TokenLogprobs


class Delta(NamedTuple):
    """The new part of one choice. Only the last delta has a `finish_reason`, with OpenAI's value."""

    choice: int
    parts: Sequence[Part]
    tokens: list[Token]  # tokens with known text; the parser may still hold that text back
    finish_reason: str | None
    num_tokens: int  # tokens generated so far, including the new ones
    token_ids: Sequence[int] = ()  # all new tokens, if the request asks for token ids
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # of the prompt's next tokens; its first token has none
    stop_string: str | None = None  # the stop string that ended the choice; in the last delta only
    content_tokens: Sequence[Token] = ()  # new tokens of the content, if the format shows them

    def without_answer(self) -> "Delta":
        """Return the delta of an answer that has no tokens of its own."""
        reason = None if self.finish_reason is None else "length"
        return Delta(self.choice, (), [], reason, 0, prompt_logprobs=self.prompt_logprobs)


class Choice:
    """The state of one choice.

    Invariants: the parser has received all text of the choice so far. The last delta, and no other, has a finish
    reason.
    """

    def __init__(
        self,
        index: int,
        request: PreparedChoice,
        stop: StopStrings,
        tokenizer: Tokenizer,
        metrics: EngineMetrics,
        parser: OutputParser,
        thinking_end: int | None = None,
        *,
        with_content_tokens: bool = False,
    ) -> None:
        """thinking_end: the id of the token that ends the thinking; None if no single token does."""
        self.index = index
        self.request_id = request.request_id
        self.finish_reason: str | None = None
        self.num_tokens = 0  # generated tokens, including an end-of-sequence token
        self.num_cached_tokens = 0
        self.num_predicted = (0, 0)  # accepted and rejected tokens of the prediction
        self._parser = parser
        self._with_token_ids = request.with_token_ids
        self._shows_stop = request.shows_stop
        self._detokenizer = Detokenizer(
            tokenizer,
            request.prompt_tail,
            stop,
            request.min_tokens,
            shows_stop=request.shows_stop,
            skip_special_tokens=request.skip_special_tokens,
        )
        self._logprobs: list[TokenLogprobs] = []  # of tokens whose text is not known yet
        self._content_tokens = ContentTokens() if with_content_tokens else None
        self._has_called = False  # whether the answer contains a tool call
        self._thinking = _ThinkingTokens(thinking_end)
        self._clock = _Clock(metrics, request.arrival_time, time.monotonic())

    def push(self, output: RequestOutput) -> Delta | None:
        """Return the new visible part from the next output, or None. Raises the error that the output reports."""
        before = self.num_tokens
        self.num_tokens += len(output.new_token_ids)
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.num_predicted = output.num_predicted
        self._clock.observe_tokens(output)
        self._thinking.count(output.new_token_ids)
        if output.finish_reason is not None:
            self._raise_failure(output)
        token_ids = output.new_token_ids
        self._logprobs.extend(output.logprobs or ())
        end: list[TokenLogprobs] = []
        if output.finish_reason is FinishReason.STOP and not self._shows_stop:
            token_ids = token_ids[:-1]  # the stop token itself is not shown
            end = [self._logprobs.pop()] if self._logprobs else []
        piece = self._detokenizer.push(token_ids)
        if output.finish_reason is not None and not piece.stopped:
            rest = self._detokenizer.finish()
            piece = Piece(piece.text + rest.text, piece.token_starts + rest.token_starts, rest.stopped)
        if piece.stopped:
            self.num_tokens = self._detokenizer.num_tokens  # without tokens that came after the stop string
            self._end(FinishReason.STOP)
        elif output.finish_reason is not None:
            is_stop = output.finish_reason is FinishReason.STOP_STRING
            self._end(FinishReason.STOP if is_stop else output.finish_reason)
        new_token_ids = output.new_token_ids[: self.num_tokens - before] if self._with_token_ids else ()
        return self._delta(piece, [] if piece.stopped else end, new_token_ids, output.prompt_logprobs or ())

    @property
    def num_thinking_tokens(self) -> int:
        """The number of tokens of the thinking, including the token that ends it."""
        return min(self._thinking.number, self.num_tokens)

    def leave(self) -> None:
        """End the choice if it is not finished. Called after the client has left."""
        if self.finish_reason is None:
            self._end(FinishReason.ABORT)

    def _end(self, reason: FinishReason) -> None:
        self.finish_reason = reason.value
        self._clock.observe_end(reason.value, self.num_tokens)

    def _delta(
        self,
        piece: Piece,
        end: list[TokenLogprobs],
        token_ids: Sequence[int],
        prompt_logprobs: Sequence[TokenLogprobs],
    ) -> Delta | None:
        num_tokens = len(piece.token_starts)
        shown, self._logprobs = self._logprobs[:num_tokens], self._logprobs[num_tokens:]
        tokens = [Token(logprobs, start) for logprobs, start in zip(shown, piece.token_starts, strict=False)]
        tokens += [Token(logprobs, self._detokenizer.num_characters) for logprobs in end]
        parts = self._parser.feed(piece.text) if piece.text else ()
        if self.finish_reason:
            parts = (*parts, *self._parser.finish())
        if not (parts or tokens or token_ids or prompt_logprobs or self.finish_reason):
            return None
        for name, _ in parts:
            self._has_called = self._has_called or name == "tool_call"
            self._thinking.is_shown = self._thinking.is_shown or name == "reasoning"
        reason = self.finish_reason
        if self._has_called and reason == FinishReason.STOP:
            reason = "tool_calls"
        stop = self._detokenizer.stop_string if piece.stopped else None
        own: Sequence[Token] = ()
        if self._content_tokens is not None:
            own = self._content_tokens.take(parts, tokens[:num_tokens], piece.text)
        return Delta(self.index, parts, tokens, reason, self.num_tokens, token_ids, prompt_logprobs, stop, own)

    def _raise_failure(self, output: RequestOutput) -> None:
        if (failure := find_failure(output)) is not None:
            assert output.finish_reason is not None
            self._end(output.finish_reason)
            raise failure


@dataclass(slots=True)
class _ThinkingTokens:
    """Counts the tokens of the thinking, including its end token.

    The count is 0 if the answer has no thinking.
    """

    end: int | None
    is_shown: bool = False
    num_before: int = 0

    def count(self, token_ids: Sequence[int]) -> None:
        if self.end is None:
            return
        if self.end in token_ids:
            self.num_before += token_ids.index(self.end) + 1
            self.end = None
        else:
            self.num_before += len(token_ids)

    @property
    def number(self) -> int:
        return self.num_before if self.is_shown else 0


@dataclass(slots=True)
class _Clock:
    """Measures when this choice's tokens arrive, for the metrics. All times are time.monotonic() seconds."""

    metrics: EngineMetrics
    arrival: float
    sent: float  # when the request was sent to the engine
    first: float = field(default=0.0)
    last: float = field(default=0.0)
    scheduled: float = field(default=0.0)
    num_preemptions: int = field(default=0)

    def observe_tokens(self, output: RequestOutput) -> None:
        self.scheduled, self.num_preemptions = output.scheduled_time, output.num_preemptions
        num_tokens = len(output.new_token_ids)
        if not num_tokens:
            return
        now = time.monotonic()
        if not self.first:
            self.first = self.last = now
            self.metrics.observe_first_token(now - self.arrival)
            num_tokens -= 1
        if num_tokens:
            self.metrics.observe_next_tokens(now - self.last, num_tokens)
        self.last = now

    def observe_end(self, reason: str, num_tokens: int) -> None:
        now = time.monotonic()
        self.metrics.observe_end(reason, num_tokens, now - self.arrival, now - self.first if self.first else 0.0)
        if self.first:
            queued, prefill = max(0.0, self.scheduled - self.sent), self.first - self.scheduled
            self.metrics.observe_stages(queued, prefill, self.last - self.first, self.num_preemptions)
