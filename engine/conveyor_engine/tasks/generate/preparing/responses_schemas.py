"""The schema of /v1/responses: OpenAI's Responses API without stored responses. Used by `responses`. Pure."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from conveyor_engine.serving.preparing.chat_schemas import Effort, check_call_and_form
from conveyor_engine.serving.preparing.content import Content, check_images, image_part, join_content, text_part
from conveyor_engine.serving.preparing.fields import Place
from conveyor_engine.serving.preparing.one_of import OneOf
from conveyor_engine.serving.preparing.schemas import ChoosingFields, Object
from conveyor_engine.serving.preparing.structured import Form
from conveyor_engine.serving.preparing.tool_use import ToolUse
from conveyor_engine.serving.preparing.tools import TOOLS_MAX, Arguments, count_left_out
from conveyor_engine.serving.preparing.values import INTEGRAL, Alternatives
from conveyor_engine.tasks.generate.preparing.responses_tools import (
    ResponsesTool,
    ResponsesToolChoice,
    join_name,
    offer,
    read_choice,
)

Json = dict[str, Any]
Label = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)]


class TextPart(Object):
    """A text part of a message."""

    type: Literal["input_text", "output_text"]
    text: str


class RefusalPart(Object):
    """The refusal that an earlier answer contained instead of text."""

    type: Literal["refusal"]
    refusal: str


class ImagePart(Object):
    """An image of a message."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


def _wrap_text(value: object) -> object:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


_Part = Annotated[TextPart | ImagePart | RefusalPart, OneOf("type", TextPart, ImagePart, RefusalPart)]
_Parts = Annotated[
    list[_Part], Field(fail_fast=True), BeforeValidator(_wrap_text, json_schema_input_type=str | list[_Part])
]


def join_parts(parts: Sequence[TextPart | ImagePart | RefusalPart]) -> Content:
    """Return the text of a message's parts, or the parts as chat templates know them if there are images."""
    return join_content([_as_part(part) for part in parts])


def _as_part(part: TextPart | ImagePart | RefusalPart) -> Json:
    if isinstance(part, ImagePart):
        return image_part(part.image_url, is_small=part.detail == "low")
    return text_part(part.text if isinstance(part, TextPart) else part.refusal)


class MessageItem(Object):
    """A message of the input or of an earlier answer."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: _Parts


class FunctionCallItem(Object):
    """A function call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: Arguments


class CustomCallItem(Object):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str

    @property
    def arguments(self) -> Json:
        """The arguments of the function that stands for the tool."""
        return {"input": self.input}


class FunctionOutputItem(Object):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: _Parts


class ReasoningPart(Object):
    """Text of the thinking or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Object):
    """The thinking of an earlier answer. Encrypted content is left out."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(fail_fast=True)] | None = None
    summary: Annotated[list[ReasoningPart], Field(fail_fast=True)] | None = None


class LeftOutItem(Object):
    """A call of a tool that only its maker's servers run. What the model made of it is in the message behind it."""

    type: Literal[
        "web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "tool_search_call",
        "mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response",
    ]  # fmt: skip


_REFERENCE: Final = (
    "this server stores nothing, so send the item itself: set `store: false` in the client "
    "(AI SDK: `providerOptions: {openai: {store: false}}`, or `openai.chat(...)` in place of `openai(...)`)"
)
Item = MessageItem | FunctionCallItem | CustomCallItem | FunctionOutputItem | ReasoningItem | LeftOutItem
_Item = Annotated[
    Item,
    OneOf(
        "type", MessageItem, FunctionCallItem, CustomCallItem, FunctionOutputItem, ReasoningItem, LeftOutItem,
        default="message", refused={"item_reference": _REFERENCE},
    ),
]  # fmt: skip


def _wrap_message(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class PlainFormat(Object):
    """The answer is text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(Object):
    """A JSON schema that the answer follows."""

    type: Literal["json_schema"]
    name: str
    schema_: Annotated[Json, Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextConfig(Object):
    """The format of the answer's text."""

    format: Annotated[PlainFormat | SchemaFormat, OneOf("type", PlainFormat, SchemaFormat)] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    def form(self) -> Form | None:
        """Return the form that the answer must have; None for plain text."""
        if isinstance(self.format, SchemaFormat):
            return Form("json", self.format.schema_, strict=self.format.strict is True)
        return Form("json", {"type": "object"}) if self.format and self.format.type == "json_object" else None


class ReasoningConfig(Object):
    """How much the model thinks. The thinking is returned in full; `summary` has no effect."""

    effort: Effort | None = None
    summary: str | None = None


# Only the first has an effect. Thinking is always unencrypted. The other values select data that no response has.
_Includable = Literal[
    "message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results",
    "web_search_call.results", "web_search_call.action.sources", "message.input_image.image_url",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
]  # fmt: skip


class ResponseStreamOptions(Object):
    """Options of a stream. None has an effect."""

    place = Place.STREAM_OPTIONS


class ResponsesRequest(ChoosingFields):
    """POST /v1/responses."""

    place = Place.RESPONSES

    input: Annotated[
        list[_Item],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(
            _wrap_message, json_schema_input_type=str | Annotated[list[_Item], Field(min_length=1, fail_fast=True)]
        ),
    ]
    """A text, or items: messages of text and images, calls and their outputs, and `reasoning`."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31), INTEGRAL] | None = None
    """Maximum number of tokens of the answer, thinking included; default: as many as the context leaves."""
    tools: Annotated[list[ResponsesTool], Field(max_length=TOOLS_MAX, fail_fast=True)] | None = None
    """Up to 128 functions, custom tools and namespaces. Tools that OpenAI runs are left out and counted."""
    tool_choice: ResponsesToolChoice = None
    """`auto` (the default if there are tools), `none`, `required`, the tool that the model must call, or
    `allowed_tools`."""
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    text: TextConfig | None = None
    """`format`: `text`, `json_object`, or a `json_schema` that the answer follows."""
    reasoning: ReasoningConfig | None = None
    """`effort`: a variable for the chat template; `none` also sets the variable `enable_thinking` to false."""
    thinking_token_budget: Annotated[int, Field(ge=-1, lt=2**31), INTEGRAL] | None = None
    """Maximum number of tokens of thinking; -1: no limit. The model's template must support thinking."""
    chat_template_kwargs: Json | None = None
    """Variables for the model's chat template, such as `{"enable_thinking": false}`."""
    include: list[_Includable] | None = None
    """`message.output_text.logprobs`: log probabilities of the text's tokens. OpenAI's other values have no effect."""
    top_logprobs: Alternatives | None = None
    """Number of alternatives for each token, if `include` requests log probabilities."""
    stream_options: ResponseStreamOptions | None = None
    """Only for streams."""
    metadata: Metadata | None = None
    """Up to 16 strings of at most 512 characters, with keys of at most 64 characters. The answer repeats them."""
    user: Label | None = None
    """The answer repeats it."""
    safety_identifier: Label | None = None
    """The answer repeats it."""
    prompt_cache_key: Label | None = None
    """The answer repeats it. The gateway chooses the engine by it."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is only allowed when stream is true")
        check_call_and_form(self.tool_use, self.forms())
        check_images(self.conversation())
        return self

    @property
    def includes_logprobs(self) -> bool:
        """Whether the response has log probabilities of the text's tokens."""
        return "message.output_text.logprobs" in (self.include or ())

    def forms(self) -> dict[str, Form]:
        """Return the form that the answer must have, by the name of the field that requires it; at most one."""
        own = self.text.form() if self.text else None
        return ({"text.format": own} if own else {}) | super().forms()

    @property
    def tool_use(self) -> ToolUse:
        """Which tools the request offers and which it requires."""
        return ToolUse.of(offer(self.tools), read_choice(self.tool_choice), self.parallel_tool_calls)

    @property
    def ignored(self) -> int:
        """Number of fields, tools and items without an effect."""
        verbosity = self.text.verbosity if self.text else None
        num_items = sum(isinstance(item, LeftOutItem) for item in self.input)
        return super().ignored + count_left_out(self.tools) + num_items + (verbosity not in (None, "medium"))

    def conversation(self) -> list[Json]:
        """Return the messages as the chat template receives them. The items of one answer become one message."""
        messages: list[Json] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for item in self.input:
            if isinstance(item, FunctionOutputItem):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": join_parts(item.output)})
            elif isinstance(item, MessageItem) and item.role != "assistant":
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": join_parts(item.content)})
            elif not isinstance(item, LeftOutItem):
                _add_to_answer(messages, item)
        return messages


def _add_to_answer(messages: list[Json], item: MessageItem | FunctionCallItem | CustomCallItem | ReasoningItem) -> None:
    """Add an item of an answer to the last message if that is the assistant's and has room; otherwise begin a message.

    A message has thinking first, then text, then calls, so thinking always begins a message.
    """
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if isinstance(item, FunctionCallItem | CustomCallItem):
        if last is None:
            messages.append(last := {"role": "assistant", "content": ""})
        call = {"name": join_name(item.namespace, item.name), "arguments": item.arguments}
        last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": call})
        return
    if isinstance(item, ReasoningItem):
        text = "\n".join(part.text for part in item.content or item.summary or ())
        messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        return
    if last is None or last["content"] or "tool_calls" in last:
        messages.append(last := {"role": "assistant", "content": ""})
    last["content"] = join_parts(item.content)
