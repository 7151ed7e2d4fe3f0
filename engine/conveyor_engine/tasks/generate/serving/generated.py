"""The response to a request that generates text, whole or as server-sent events.

`completions`, `chat`, `responses` and `messages` build it, each with a format that writes its JSON. A request that
succeeds gets a whole body, or a stream with the format's last event. A request that fails gets an error status, or an
error event if its stream has already begun.
"""

import logging
from collections.abc import Callable, Sequence

from msgspec import UNSET
from starlette.types import Send

from conveyor_engine.errors import RequestError
from conveyor_engine.serving.adapter_metrics import AdapterUse
from conveyor_engine.serving.http.app_state import AppState
from conveyor_engine.serving.http.engine_response import EngineResponse, Opened
from conveyor_engine.serving.http.events import SSE_HEADERS
from conveyor_engine.serving.http.usage import build_last_words
from conveyor_engine.tasks.generate.preparing.prepare import PreparedText
from conveyor_engine.tasks.generate.serving.choice import Choice, Delta
from conveyor_engine.tasks.generate.serving.formats import Format, Usage, WholeChoice
from conveyor_engine.text.parsing.thinking import MARKS
from conveyor_engine.text.schema.problems import describe_relaxed
from conveyor_engine.text.stop_strings import StopStrings
from conveyor_engine.wire.request import RequestOutput
from conveyor_protocol.usage import UsedTokens

_log = logging.getLogger(__name__)


class GeneratedResponse(EngineResponse):
    """Responds with generated text, whole or as a stream."""

    def __init__(self, opened: Opened, make_format: Callable[[AppState, PreparedText], Format]) -> None:
        super().__init__(opened)
        state, prepared = opened.state, opened.prepared
        assert isinstance(prepared, PreparedText)
        self._prepared = prepared
        self._format = make_format(state, prepared)
        self._format.on_held = self._held.grow
        stop, tokenizer, thinking = StopStrings(prepared.stop), state.model.tokenizer, prepared.parsing.thinking
        end = tokenizer.find_id(MARKS[thinking].end) if thinking else None
        with_own = self._format.shows_content_tokens and prepared.top_logprobs is not None
        self._choices = [
            Choice(
                index, choice, stop, tokenizer, state.metrics, self._format.build_parser(), end,
                with_content_tokens=with_own,
            )
            for index, choice in enumerate(prepared.choices)
        ]  # fmt: skip
        self._use: AdapterUse | None = None
        self._choice_of = {choice.request_id: choice for choice in self._choices}

    def _leave(self) -> None:
        for choice in self._choices:
            choice.leave()

    async def _send_answer(self, send: Send) -> None:
        if not (adapter := self._state.model.adapter_in(self._prepared.model)):
            return await self._send_text(send)
        self._use = use = AdapterUse(self._state.metrics.adapters, adapter)
        try:
            await self._send_text(send)
        finally:
            used = self._count_used()
            use.end(used.prompt_tokens, used.completion_tokens)

    async def _start(self, headers: list[tuple[bytes, bytes]], send: Send) -> None:
        if relaxed := self._prepared.relaxed:
            headers.append((b"warning", describe_relaxed(relaxed).encode()))
        await super()._start(headers, send)

    async def _send_text(self, send: Send) -> None:
        self._state.metrics.count_relaxed_keywords(each.keyword for each in self._prepared.relaxed)
        for choice in self._prepared.choices:
            self._state.metrics.observe_prompt(choice.num_prompt_tokens, choice.max_tokens)
        self._held.grow(len(self._prepared.repeated) + 4 * len(self._prepared.continued_text))
        if self._prepared.stream:
            await self._send_stream(send)
        else:
            await self._send_whole(send)
        n = self._prepared.choices_per_prompt
        for first in range(0, len(self._choices), n):
            longest = max(choice.num_tokens for choice in self._choices[first : first + n])
            self._state.metrics.observe_choices(n, longest)

    def _push(self, outputs: list[RequestOutput]) -> list[Delta]:
        """Add the outputs to their choices and return the deltas. Raises DeadlineExceeded or GenerationFailed.

        A choice that a stop string ends is aborted in the engine.
        """
        if self._use is not None and any(output.new_token_ids for output in outputs):
            self._use.set_running()
        deltas: list[Delta] = []
        stopped: list[str] = []
        for output in outputs:
            choice = self._choice_of[output.request_id]
            if (delta := choice.push(output)) is not None:
                deltas.append(delta.without_answer() if self._prepared.shows_only_prompt else delta)
            if choice.finish_reason is not None and output.finish_reason is None:  # by a stop string
                stopped.append(choice.request_id)
        if stopped:
            self._generation.abort(stopped)
        return deltas

    async def _send_whole(self, send: Send) -> None:
        answers = [WholeChoice(choice.index) for choice in self._choices]
        async for outputs in self._generation.batches():
            self._held.grow(sum(answers[delta.choice].add(delta) for delta in self._push(outputs)))
        await self._send_json(self._format.write_whole(answers, await self._find_last_usage()), send)

    async def _send_stream(self, send: Send) -> None:
        """Send the stream. The status is sent with the first tokens, so an earlier failure gets an error status."""
        try:
            async for outputs in self._generation.batches():
                if deltas := self._push(outputs):
                    await self._send_events(deltas, send)
            last = self._format.write_end(await self._find_last_usage())
        except RequestError as error:
            if not self._started:
                raise
            self._note_failure(error)
            last = self._format.write_failure(error)
        await send({"type": "http.response.body", "body": last + build_last_words(self._report)})

    async def _send_events(self, deltas: list[Delta], send: Send) -> None:
        events = b""
        if not self._started:
            await self._start(list(SSE_HEADERS), send)
            events = self._format.write_begin(self._usage())
        events += b"".join(self._format.write_events(delta, self._usage_so_far(delta)) for delta in deltas)
        await send({"type": "http.response.body", "body": events, "more_body": True})

    def _count_used(self) -> UsedTokens:
        """Return the tokens used so far.

        A prompt counts as soon as an answer to it has a token, so a request that only waited has used no tokens.
        """
        prompt_tokens = cached_tokens = 0
        for start in range(0, len(self._choices), self._prepared.choices_per_prompt):
            of_prompt = self._choices[start : start + self._prepared.choices_per_prompt]
            if any(choice.num_tokens for choice in of_prompt):
                prompt_tokens += self._prepared.choices[start].num_prompt_tokens
                cached_tokens += of_prompt[0].num_cached_tokens
        return UsedTokens(prompt_tokens, cached_tokens, sum(choice.num_tokens for choice in self._choices))

    async def _find_last_usage(self) -> Usage:
        """Return the counts, and the receipt if the request asks for it.

        The receipt of an answer that a stop string ends arrives after the engine process's running step.
        """
        usage = self._usage()
        if self._receipt_request is not None:
            await self._generation.bill.wait()
            cached = self._count_used().cached_tokens if self._prepared.reports_cached_tokens else UNSET
            usage.receipt = self._find_receipt(cached)
        return usage

    def _usage(self) -> Usage:
        prompt_tokens = self._prepared.num_prompt_tokens
        completion_tokens = 0 if self._prepared.shows_only_prompt else sum(each.num_tokens for each in self._choices)
        first_choices = self._choices[:: self._prepared.choices_per_prompt]
        cached = sum(choice.num_cached_tokens for choice in first_choices)
        return self._count(prompt_tokens, completion_tokens, cached, self._choices)

    def _usage_so_far(self, delta: Delta) -> Usage | None:
        if not self._prepared.continuous_usage:
            return None
        prompt_tokens = self._prepared.choices[delta.choice].num_prompt_tokens
        choice = self._choices[delta.choice]
        return self._count(prompt_tokens, delta.num_tokens, choice.num_cached_tokens, [choice])

    def _count(
        self, prompt_tokens: int, completion_tokens: int, cached_tokens: int, choices: Sequence[Choice]
    ) -> Usage:
        """Return the counts.

        Without a cache salt the cached count is hidden, because it would reveal what other clients have sent.
        """
        details = {"cached_tokens": cached_tokens} if self._prepared.reports_cached_tokens else None
        of_answer: dict[str, int] = {}
        if self._prepared.parsing.thinking:
            of_answer["reasoning_tokens"] = sum(choice.num_thinking_tokens for choice in choices)
        if self._prepared.reports_prediction:
            for index, name in enumerate(("accepted_prediction_tokens", "rejected_prediction_tokens")):
                of_answer[name] = sum(choice.num_predicted[index] for choice in choices)
        total = prompt_tokens + completion_tokens
        return Usage(prompt_tokens, completion_tokens, total, details, of_answer or UNSET)
