"""Serves POST /v1/responses: chat answers in the format of OpenAI's Responses API. Responses are not stored."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Final, cast

import msgspec
from msgspec import UNSET
from starlette.requests import Request

from conveyor_engine.errors import RequestError
from conveyor_engine.serving.http.app_state import AppState
from conveyor_engine.serving.http.engine_response import open_request
from conveyor_engine.serving.http.events import encode, event
from conveyor_engine.tasks.generate.preparing.prepare import PreparedText
from conveyor_engine.tasks.generate.serving import responses_events as events
from conveyor_engine.tasks.generate.serving.content_tokens import Token
from conveyor_engine.tasks.generate.serving.formats import Block, BlocksFormat, Usage, WholeChoice
from conveyor_engine.tasks.generate.serving.generated import GeneratedResponse
from conveyor_engine.tasks.generate.serving.logprobs import ChatTokenLogprob, TokenNames, build_chat_logprob
from conveyor_engine.tasks.generate.serving.responses_events import (
    Answered,
    Call,
    CustomCall,
    Failure,
    FunctionCall,
    IncompleteDetails,
    Item,
    ItemStatus,
    OutputMessage,
    OutputText,
    Reasoning,
    ReasoningText,
    Response,
    ResponseUsage,
    Status,
)

_DONE: Final = b"data: [DONE]\n\n"  # required by the Open Responses specification; OpenAI's clients stop at it
_PREFIXES: Final = {"content": "msg", "reasoning": "rs", "tool_call": "fc"}


class ResponsesFormat(BlocksFormat):
    """Writes answers in the format of the Responses API. A stream keeps the whole answer for its last event."""

    shows_content_tokens = True

    def __init__(self, state: AppState, prepared: PreparedText) -> None:
        super().__init__(state, prepared)
        self._names = TokenNames(state.model.tokenizer, as_ids=False)
        self._created = int(time.time())
        self._repeated = prepared.repeated
        self._sequence = 0  # number of the next event
        self._output: list[Item] = []  # of a stream: the items that have ended
        self._item: Item | None = None  # of a stream: the item of the open block

    def write_whole(self, answers: Sequence[WholeChoice], usage: Usage) -> Iterator[bytes]:
        """Yield the response."""
        (answer,) = answers
        is_cut = answer.finish_reason == "length"
        items = [
            self._make_item(block, "incomplete" if is_cut and block is answer.blocks[-1] else "completed")
            for block in answer.blocks
        ]
        yield encode(self._end(items, usage, is_cut=is_cut))

    def write_begin(self, usage: Usage) -> bytes:
        """Return the first two events, each with the response and an empty output."""
        begun = self._respond(self._answer("in_progress", []))
        return self._write(events.Created(begun)) + self._write(events.InProgress(begun))

    def begin_block(self, block: Block) -> bytes:
        """Return the events that begin an item, and its part if it has parts."""
        self._item = item = self._make_item(block, "in_progress")
        return self._write(events.ItemAdded(self._index, item)) + self._write_part(item, events.PartAdded)

    def write_text(self, block: Block, text: str) -> bytes:
        """Return one event with the text."""
        assert self._item is not None, "a block is open"
        block.written.write(text)
        self.on_held(4 * len(text))
        at = self._item.id, self._index
        match block.kind:
            case "reasoning":
                return self._write(events.ReasoningDelta(*at, text))
            case "tool_call":
                is_custom = isinstance(self._item, CustomCall)
                return self._write(events.InputDelta(*at, text) if is_custom else events.ArgumentsDelta(*at, text))
        tokens, self._content_tokens = self._content_tokens, ()
        block.tokens.extend(tokens)
        self.on_held(500 * len(tokens))
        return self._write(events.OutputTextDelta(*at, text, logprobs=self._build_logprobs(tokens)))

    def end_block(self, block: Block) -> bytes:
        """Return the events that end the block, with its whole text, part and item."""
        assert self._item is not None, "a block is open"
        is_cut = self._finish_reason == "length"
        ids = (self._item.id, self._item.call_id if isinstance(self._item, Call) else "")
        item = self._make_item(block, "incomplete" if is_cut else "completed", ids)
        at = item.id, self._index
        match item:
            case Reasoning():
                done = self._write(events.ReasoningDone(*at, block.text))
            case FunctionCall():
                done = self._write(events.ArgumentsDone(*at, item.arguments, item.name))
            case CustomCall():
                done = self._write(events.InputDone(*at, item.input))
            case OutputMessage():
                done = self._write(events.OutputTextDone(*at, block.text, logprobs=item.content[0].logprobs))
        done += self._write_part(item, events.PartDone) + self._write(events.ItemDone(self._index, item))
        self._output.append(item)
        self._item = None
        return done

    def end_answer(self, usage: Usage) -> bytes:
        """Return the last event, with the whole response."""
        is_cut = self._finish_reason == "length"
        ended = self._end(self._output, usage, is_cut=is_cut)
        return self._write(events.Incomplete(ended) if is_cut else events.Completed(ended)) + _DONE

    def write_failure(self, error: RequestError) -> bytes:
        """Return the last event, with the items that had ended and the error."""
        answered = self._answer("failed", self._output)
        answered.error = Failure(str(error))
        return self._write(events.Failed(self._respond(answered))) + _DONE

    @property
    def _index(self) -> int:
        return len(self._output)

    def _make_ids(self, block: Block) -> tuple[str, str]:
        return uuid.uuid4().hex, self._make_call_id("call", block.name) if block.kind == "tool_call" else ""

    def _end(self, items: list[Item], usage: Usage, *, is_cut: bool) -> Response:
        status: Status = "incomplete" if is_cut else "completed"
        answered = self._answer(status, items)
        answered.usage, answered.completed_at = ResponseUsage.of(usage), int(time.time())
        answered.incomplete_details = IncompleteDetails() if is_cut else None
        return self._respond(answered)

    def _answer(self, status: Status, items: list[Item]) -> Answered:
        return Answered(id=self._id, created_at=self._created, status=status, model=self._model, output=items)

    def _respond(self, answered: Answered) -> Response:
        """Return the response: the JSON of `answered`, joined with the JSON of the fields that repeat the request's."""
        return cast(Response, msgspec.Raw(encode(answered)[:-1] + b"," + self._repeated[1:]))

    def _write_part(self, item: Item, make: type[events.PartAdded] | type[events.PartDone]) -> bytes:
        """Return the event for the item's part; b"" for a call, which has no parts."""
        if isinstance(item, Call):
            return b""
        part = (
            item.content[0]
            if item.content
            else OutputText("")
            if isinstance(item, OutputMessage)
            else ReasoningText("")
        )
        return self._write(make(item.id, self._index, part))

    def _make_item(
        self,
        block: Block,
        status: ItemStatus,
        ids: tuple[str, str] | None = None,
    ) -> Item:
        """Return the item for a block. While it is in progress it has no content.

        ids: the ids of the item and of its call; None makes new ones.
        """
        digits, call_id = ids or self._make_ids(block)
        tool = self._find_tool(block.name)
        prefix = "ctc" if tool.is_custom else _PREFIXES[block.kind]
        item_id = digits if "_" in digits else f"{prefix}_{digits}"
        is_begun = status != "in_progress"
        match block.kind:
            case "reasoning":
                return Reasoning(item_id, status, [ReasoningText(block.text)] if is_begun else [])
            case "tool_call":
                make = CustomCall if tool.is_custom else FunctionCall
                return make(item_id, status, call_id, tool.name, block.text, tool.namespace or UNSET)
        text = [OutputText(block.text, logprobs=self._build_logprobs(block.tokens))] if is_begun else []
        return OutputMessage(item_id, status, text)

    def _build_logprobs(self, tokens: Sequence[Token]) -> list[ChatTokenLogprob]:
        return [build_chat_logprob(self._names, token) for token in tokens]

    def _write(self, message: events.Event) -> bytes:
        message.sequence_number = self._sequence
        self._sequence += 1
        return event(encode(message), str(message.__struct_config__.tag))


async def create_response(request: Request) -> GeneratedResponse:
    """Return the response to the input."""
    return GeneratedResponse(await open_request(request, "responses"), ResponsesFormat)
