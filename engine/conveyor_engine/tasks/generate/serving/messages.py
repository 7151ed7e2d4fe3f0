"""Serves POST /v1/messages and /v1/messages/count_tokens, which return chat answers in Anthropic's format."""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from conveyor_engine.errors import RequestError
from conveyor_engine.serving.http.engine_response import open_request, prepare_request
from conveyor_engine.serving.http.events import encode, event
from conveyor_engine.serving.http.failures import failure_body
from conveyor_engine.serving.http.receipts import Receipt
from conveyor_engine.serving.preparing.tokens import PreparedTokens
from conveyor_engine.tasks.generate.serving.formats import Block, BlockKind, BlocksFormat, Usage, WholeChoice
from conveyor_engine.tasks.generate.serving.generated import GeneratedResponse

PATH: Final = "/v1/messages"
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
_STOP_REASONS: Final[dict[str, StopReason]] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicUsage(msgspec.Struct, omit_defaults=True):
    """Token counts. With a `cache_salt`, cached tokens have their own count and are not part of `input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int | UnsetType = UNSET
    output_tokens_details: dict[str, int] | UnsetType = UNSET  # if the model thinks
    receipt: Receipt | UnsetType = UNSET

    @classmethod
    def of(cls, usage: Usage) -> "AnthropicUsage":
        cached = (usage.prompt_tokens_details or {}).get("cached_tokens", UNSET)
        thinking: dict[str, int] | UnsetType = UNSET
        if usage.completion_tokens_details:
            thinking = {"thinking_tokens": usage.completion_tokens_details["reasoning_tokens"]}
        return cls(usage.prompt_tokens - (cached or 0), usage.completion_tokens, cached, thinking, usage.receipt)


class Text(msgspec.Struct, tag="text"):
    """Text."""

    text: str


class Thinking(msgspec.Struct, tag="thinking"):
    """A block of thinking. The signature is the message's id: some clients send thinking back only if it is signed."""

    thinking: str
    signature: str


class ToolUse(msgspec.Struct, tag="tool_use"):
    """A tool call."""

    id: str
    name: str
    input: dict[str, msgspec.Raw]


class AnthropicMessage(msgspec.Struct, tag="message"):
    """The whole answer, or its beginning in a stream."""

    id: str
    model: str
    content: list[Text | Thinking | ToolUse]
    usage: AnthropicUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"


class TextDelta(msgspec.Struct, tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(msgspec.Struct, tag="thinking_delta"):
    """More thinking."""

    thinking: str


class SignatureDelta(msgspec.Struct, tag="signature_delta"):
    """The end of thinking."""

    signature: str


class InputJsonDelta(msgspec.Struct, tag="input_json_delta"):
    """More of the JSON of a call's input."""

    partial_json: str


_Delta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta
_DELTAS: Final[Mapping[BlockKind, Callable[[str], _Delta]]] = {
    "content": TextDelta, "reasoning": ThinkingDelta, "tool_call": InputJsonDelta,
}  # fmt: skip


class MessageStart(msgspec.Struct, tag="message_start"):
    """The first event."""

    message: AnthropicMessage


class ContentBlockStart(msgspec.Struct, tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: Text | Thinking | ToolUse


class ContentBlockDelta(msgspec.Struct, tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: _Delta


class ContentBlockStop(msgspec.Struct, tag="content_block_stop"):
    """A block ends."""

    index: int


class Stop(msgspec.Struct):
    """Why the answer ends."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag="message_delta"):
    """The answer ends."""

    delta: Stop
    usage: AnthropicUsage


class MessageStop(msgspec.Struct, tag="message_stop"):
    """The last event."""


EVENTS: Final = (MessageStart, ContentBlockStart, ContentBlockDelta, ContentBlockStop, MessageDelta, MessageStop)


class TokenCount(msgspec.Struct):
    """The length of a prompt."""

    input_tokens: int


class MessagesFormat(BlocksFormat):
    """Writes answers in the format of Anthropic's Messages API."""

    _index = -1  # of the open block

    def write_whole(self, answers: Sequence[WholeChoice], usage: Usage) -> Iterator[bytes]:
        """Yield the whole message."""
        (answer,) = answers
        content = [self._make_block(block) for block in answer.blocks]
        stop = self._stop(answer.finish_reason, answer.stop_string)
        counts = AnthropicUsage.of(usage)
        yield encode(AnthropicMessage(self._id, self._model, content, counts, stop.stop_reason, stop.stop_sequence))

    def write_begin(self, usage: Usage) -> bytes:
        """Return the event with the message, which is still empty."""
        counts = AnthropicUsage.of(usage)
        counts.output_tokens = 0
        return _write(MessageStart(AnthropicMessage(self._id, self._model, [], counts)))

    def begin_block(self, block: Block) -> bytes:
        """Return the event that begins a block, with empty text, thinking or arguments."""
        self._index += 1
        content = self._make_block(block)
        if isinstance(content, Thinking):
            content.signature = ""
        return _write(ContentBlockStart(self._index, content))

    def write_text(self, block: Block, text: str) -> bytes:
        """Return one event with the text."""
        return _write(ContentBlockDelta(self._index, _DELTAS[block.kind](text)))

    def end_block(self, block: Block) -> bytes:
        """Return the events that end a block. For thinking, the first one has the signature."""
        signed = b""
        if block.kind == "reasoning":
            signed = _write(ContentBlockDelta(self._index, SignatureDelta(self._id)))
        return signed + _write(ContentBlockStop(self._index))

    def end_answer(self, usage: Usage) -> bytes:
        """Return the events with the stop reason and the token counts."""
        stop = self._stop(self._finish_reason, self._stop_string)
        return _write(MessageDelta(stop, AnthropicUsage.of(usage))) + _write(MessageStop())

    def write_failure(self, error: RequestError) -> bytes:
        """Return the error as an event in the form that Anthropic's clients expect."""
        return event(failure_body(error, PATH), "error")

    def _make_block(self, block: Block) -> Text | Thinking | ToolUse:
        match block.kind:
            case "reasoning":
                return Thinking(block.text, self._id)
            case "tool_call":
                return ToolUse(self._make_call_id("toolu", block.name), block.name, _read_input(block.text))
        return Text(block.text)

    def _stop(self, finish_reason: str | None, stop_string: str | None) -> Stop:
        assert finish_reason is not None, "the answer has ended"
        reason = _STOP_REASONS[finish_reason]
        return Stop("stop_sequence" if reason == "end_turn" and stop_string else reason, stop_string)


def _write(message: msgspec.Struct) -> bytes:
    kind = message.__struct_config__.tag
    assert isinstance(kind, str)
    return event(encode(message), kind)


def _read_input(arguments: str) -> dict[str, msgspec.Raw]:
    """Return the arguments of a call. If they are cut off or not an object, return {"arguments": their text}."""
    if not arguments:
        return {}
    try:
        return msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": msgspec.Raw(encode(arguments))}


async def create_message(request: Request) -> GeneratedResponse:
    """Return the answer to the conversation."""
    return GeneratedResponse(await open_request(request, "messages"), MessagesFormat)


async def count_message_tokens(request: Request) -> Response:
    """Return the number of tokens that the prompt of this request would have."""
    async with prepare_request(request, "count_tokens") as arriving:
        prepared = arriving.prepared
    assert isinstance(prepared, PreparedTokens)
    number = len(array("I", prepared.packed_token_ids))
    return Response(encode(TokenCount(number)), media_type="application/json")
