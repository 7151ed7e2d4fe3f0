"""Serves POST /v1/chat/completions."""

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from conveyor_engine.serving.http.app_state import AppState
from conveyor_engine.serving.http.engine_response import open_request
from conveyor_engine.serving.http.events import encode
from conveyor_engine.tasks.generate.preparing.prepare import PreparedText
from conveyor_engine.tasks.generate.serving.choice import Delta
from conveyor_engine.tasks.generate.serving.formats import Block, ChoicesFormat, Usage, WholeChoice
from conveyor_engine.tasks.generate.serving.generated import GeneratedResponse
from conveyor_engine.tasks.generate.serving.logprobs import (
    ChatLogprobs,
    PromptLogprob,
    chat_logprobs,
    chat_logprobs_pieces,
    prompt_logprobs_pieces,
)
from conveyor_engine.text.parsing.interface import Field


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    """The new part of a tool call's function. Only the first part of each call has the name."""

    arguments: str
    name: str | None = None


class CustomDelta(msgspec.Struct, omit_defaults=True):
    """The new part of a custom tool's call. Only the first part of each call has the name."""

    input: str
    name: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """The new part of a tool call. Only the first part of each call has `id` and `type`."""

    index: int
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET
    id: str | None = None
    type: str | None = None


class DeltaMessage(msgspec.Struct, omit_defaults=True):
    """The new part of a message. Only the first part of each choice has `role`."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # equals `reasoning`, under its older name
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """The new part of a choice in an event."""

    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """One event of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    object: str = "chat.completion.chunk"


class Function(msgspec.Struct):
    """The function of a tool call, with its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, tag="function"):
    """A tool call in a response that is not streamed."""

    id: str
    function: Function


class Custom(msgspec.Struct):
    """The custom tool of a call, with its input."""

    name: str
    input: str


class CustomToolCall(msgspec.Struct, tag="custom"):
    """A custom tool's call in a response that is not streamed."""

    id: str
    custom: Custom


class Message(msgspec.Struct):
    """The assistant's message. `content` is null if the message has only tool calls."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # equals `reasoning`, under its older name
    tool_calls: list[ToolCall | CustomToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """A choice in a response that is not streamed."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: Sequence[int] | None = None


class ChatCompletion(msgspec.Struct):
    """The body of a response that is not streamed."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType | None = UNSET
    object: str = "chat.completion"


class ChatFormat(ChoicesFormat):
    """Writes answers as chat completions."""

    def __init__(self, state: AppState, prepared: PreparedText) -> None:
        super().__init__(state, prepared)
        self._hides_reasoning = prepared.hides_reasoning
        self._continued = prepared.continued_text
        self._begun: set[int] = set()
        self._calls: dict[int, tuple[int, bool]] = {}  # in a stream, by choice: its latest call, and if it is custom

    def chunk(self, delta: Delta, usage: Usage | None) -> ChatChunk:
        """Return one event. The first event of each choice has the role."""
        role = None if delta.choice in self._begun else "assistant"
        self._begun.add(delta.choice)
        message = DeltaMessage(role, self._continued if role else None)
        for name, text in delta.parts:
            if name == "reasoning" and self._hides_reasoning:
                continue
            if name in ("tool_call", "arguments"):
                self._add_call(message, delta.choice, name, text)
            else:
                setattr(message, name, (getattr(message, name) or "") + text)
        message.reasoning_content = message.reasoning
        ids = self._ids(delta.token_ids)
        choice = ChunkChoice(delta.choice, message, self._logprobs(delta), delta.finish_reason, ids)
        return ChatChunk(*self._head, [choice], usage or self._no_usage, self._prompt_once(0))

    def _add_call(self, message: DeltaMessage, choice: int, field: Field, text: str) -> None:
        """Add a new tool call to the message, or append to the arguments of the choice's latest tool call."""
        calls = message.tool_calls = message.tool_calls or []
        index, is_custom = self._calls.get(choice, (-1, False))
        if field == "tool_call":
            index, is_custom = index + 1, self._find_tool(text).is_custom
            self._calls[choice] = index, is_custom
            call_id = self._make_call_id("call", text, choice)
            calls.append(ToolCallDelta(index, id=call_id, type="custom" if is_custom else "function"))
            _append(calls[-1], "", text, is_custom=is_custom)
            return
        if not calls:
            calls.append(ToolCallDelta(index))
        _append(calls[-1], text, None, is_custom=is_custom)

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        return chat_logprobs(self._names, delta.tokens) if self._with_logprobs and delta.tokens else None

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """Return the event with the token counts and no choices."""
        return ChatChunk(*self._head, [], usage)

    def whole(self, usage: Usage) -> ChatCompletion:
        """Return the body with empty `choices`."""
        prompt = self._prompt_of(0)
        return ChatCompletion(*self._head, [], usage, None if prompt is UNSET else prompt)

    def choice(self, answer: WholeChoice) -> Iterator[bytes]:
        """Yield one choice of the body, in pieces of JSON."""
        message = Message("")
        for kind in dict.fromkeys(block.kind for block in answer.blocks):
            if kind != "tool_call" and not (kind == "reasoning" and self._hides_reasoning):
                setattr(message, kind, answer.join(kind))
        message.content = self._continued + (message.content or "")
        message.reasoning_content = message.reasoning
        if answer.calls:
            message.content = message.content or None
            message.tool_calls = [self._make_call(call, answer.index) for call in answer.calls]
        yield b'{"index":%d,"message":%b,"logprobs":' % (answer.index, encode(message))
        if self._with_logprobs:
            yield from chat_logprobs_pieces(self._names, answer.tokens)
        else:
            yield b"null"
        yield b',"finish_reason":%b' % encode(answer.finish_reason)
        yield b',"token_ids":%b' % (encode(answer.token_ids.tolist()) if self._prompts else b"null")
        yield b"}"

    def _make_call(self, call: Block, choice: int) -> ToolCall | CustomToolCall:
        call_id = self._make_call_id("call", call.name, choice)
        if self._find_tool(call.name).is_custom:
            return CustomToolCall(call_id, Custom(call.name, call.text))
        return ToolCall(call_id, Function(call.name, call.text))

    def behind_choices(self, answers: Sequence[WholeChoice]) -> Iterator[bytes]:
        """Yield the prompt's log probabilities, which all choices share."""
        if self._reports_prompt_logprobs:
            yield b","
            yield from prompt_logprobs_pieces(self._names, answers[0].prompt_logprobs)
        else:
            yield b',"prompt_logprobs":null'


def _append(call: ToolCallDelta, text: str, name: str | None, *, is_custom: bool) -> None:
    """Append arguments, or the input of a custom tool, to a part of a call."""
    if is_custom:
        call.custom = call.custom or CustomDelta("", name)
        call.custom.input += text
    else:
        call.function = call.function or FunctionDelta("", name)
        call.function.arguments += text


async def create_chat_completion(request: Request) -> GeneratedResponse:
    """Return the response with `n` answers to the conversation."""
    return GeneratedResponse(await open_request(request, "chat"), ChatFormat)
