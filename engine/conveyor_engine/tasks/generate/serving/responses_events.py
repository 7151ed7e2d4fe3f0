"""The objects of the Responses API: the response, its items and the events of a stream. Used by `responses`. Pure."""

from typing import TYPE_CHECKING, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from conveyor_engine.serving.http.receipts import Receipt
from conveyor_engine.tasks.generate.preparing.responses import Repeated
from conveyor_engine.tasks.generate.serving.formats import Usage
from conveyor_engine.tasks.generate.serving.logprobs import ChatTokenLogprob

Status = Literal["in_progress", "completed", "incomplete", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[None] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    """Text of the thinking."""

    text: str


class OutputMessage(msgspec.Struct, tag="message"):
    """Text of the answer."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class Reasoning(msgspec.Struct, tag="reasoning"):
    """The thinking before the answer, unchanged."""

    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[None] = []
    encrypted_content: None = None


class FunctionCall(msgspec.Struct, tag="function_call"):
    """A function call. `arguments` is the text that the model wrote."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomCall(msgspec.Struct, tag="custom_tool_call"):
    """A call of a custom tool."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


Call = FunctionCall | CustomCall
Item = OutputMessage | Reasoning | FunctionCall | CustomCall
Part = OutputText | ReasoningText


class ResponseUsage(msgspec.Struct):
    """Token counts. Cached tokens are 0 unless the request has a `cache_salt`."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int
    receipt: Receipt | UnsetType = UNSET

    @classmethod
    def of(cls, usage: Usage) -> "ResponseUsage":
        cached = (usage.prompt_tokens_details or {}).get("cached_tokens", 0)
        thinking = (usage.completion_tokens_details or {}).get("reasoning_tokens", 0)
        return cls(
            usage.prompt_tokens,
            {"cached_tokens": cached, "cache_write_tokens": 0},
            usage.completion_tokens,
            {"reasoning_tokens": thinking},
            usage.total_tokens,
            usage.receipt,
        )


class IncompleteDetails(msgspec.Struct):
    """Why an answer is cut off."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Failure(msgspec.Struct):
    """The error of an answer that failed."""

    message: str
    code: Literal["server_error"] = "server_error"


class Answered(msgspec.Struct, kw_only=True):
    """The fields of a response that do not repeat the request's. `Repeated` has those that do."""

    id: str
    created_at: int
    status: Status
    model: str
    output: list[Item]
    usage: ResponseUsage | None = None
    error: Failure | None = None
    incomplete_details: IncompleteDetails | None = None
    completed_at: int | None = None
    object: Literal["response"] = "response"


if TYPE_CHECKING:

    class Response(Answered):
        """An answer in any state."""
else:  # msgspec structs cannot inherit from two structs
    _FIELDS = [each for kind in (Answered, Repeated) for each in msgspec.structs.fields(kind)]
    Response = msgspec.defstruct(
        "Response", [(each.name, each.type) for each in _FIELDS], namespace={"__doc__": "An answer in any state."}
    )


class Event(msgspec.Struct, kw_only=True):
    """One event of a stream. The events of a stream are numbered from 0."""

    sequence_number: int = 0


class Created(Event, tag="response.created"):
    """The first event."""

    response: Response


class InProgress(Event, tag="response.in_progress"):
    """The second event."""

    response: Response


class Completed(Event, tag="response.completed"):
    """The last event."""

    response: Response


class Incomplete(Event, tag="response.incomplete"):
    """The last event of an answer that is cut off."""

    response: Response


class Failed(Event, tag="response.failed"):
    """The last event of an answer that fails."""

    response: Response


class ItemAdded(Event, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: Item


class ItemDone(Event, tag="response.output_item.done"):
    """An item ends."""

    output_index: int
    item: Item


class PartAdded(Event, tag="response.content_part.added"):
    """A part of an item begins."""

    item_id: str
    output_index: int
    part: Part
    content_index: int = 0


class PartDone(Event, tag="response.content_part.done"):
    """A part of an item ends."""

    item_id: str
    output_index: int
    part: Part
    content_index: int = 0


class OutputTextDelta(Event, tag="response.output_text.delta"):
    """More text."""

    item_id: str
    output_index: int
    delta: str
    content_index: int = 0
    logprobs: list[ChatTokenLogprob] = []


class OutputTextDone(Event, tag="response.output_text.done"):
    """The whole text."""

    item_id: str
    output_index: int
    text: str
    content_index: int = 0
    logprobs: list[ChatTokenLogprob] = []


class ReasoningDelta(Event, tag="response.reasoning_text.delta"):
    """More thinking."""

    item_id: str
    output_index: int
    delta: str
    content_index: int = 0


class ReasoningDone(Event, tag="response.reasoning_text.done"):
    """The whole thinking."""

    item_id: str
    output_index: int
    text: str
    content_index: int = 0


class ArgumentsDelta(Event, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Event, tag="response.function_call_arguments.done"):
    """All arguments of a call."""

    item_id: str
    output_index: int
    arguments: str
    name: str


class InputDelta(Event, tag="response.custom_tool_call_input.delta"):
    """More of the input of a custom tool's call."""

    item_id: str
    output_index: int
    delta: str


class InputDone(Event, tag="response.custom_tool_call_input.done"):
    """The whole input of a custom tool's call."""

    item_id: str
    output_index: int
    input: str


EVENTS: Final = (
    *(Created, InProgress, Completed, Incomplete, Failed, ItemAdded, ItemDone, PartAdded, PartDone),
    *(OutputTextDelta, OutputTextDone, ReasoningDelta, ReasoningDone, ArgumentsDelta, ArgumentsDone),
    *(InputDelta, InputDone),
)
