"""The schemas of /v1/messages and /v1/messages/count_tokens, Anthropic's API. Used by `messages`. Pure.

Validation converts each message to the dicts that chat templates receive, because a pydantic model takes four times as
much memory.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from conveyor_engine.serving.preparing.chat_schemas import check_call_and_form
from conveyor_engine.serving.preparing.content import Content, check_images, image_part, join_content, text_part
from conveyor_engine.serving.preparing.fields import Place
from conveyor_engine.serving.preparing.one_of import OneOf
from conveyor_engine.serving.preparing.schemas import ChoosingFields, ModelFields, Object
from conveyor_engine.serving.preparing.structured import Form
from conveyor_engine.serving.preparing.tool_use import Choice, Offered, ToolUse
from conveyor_engine.serving.preparing.tools import (
    TOOLS_MAX,
    Arguments,
    FunctionDefinition,
    LeftOutTool,
    Tool,
    count_left_out,
)
from conveyor_engine.serving.preparing.values import INTEGRAL, Stops

Json = dict[str, Any]


class TextBlock(Object):
    """A block of text."""

    type: Literal["text"]
    text: str


class Base64Source(Object):
    """The data of an image."""

    type: Literal["base64"]
    media_type: str
    data: str


class UrlSource(Object):
    """The place of an image: a data: URI, or a URL of a host in the engine's setting `media_hosts`."""

    type: Literal["url"]
    url: str


class ImageBlock(Object):
    """An image."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, OneOf("type", Base64Source, UrlSource)]

    def as_part(self) -> Json:
        """Return the image as a part of a message."""
        return image_part(self.source.data if isinstance(self.source, Base64Source) else self.source.url)


class ThinkingBlock(Object):
    """The thinking of an earlier answer. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Object):
    """Encrypted thinking of an earlier answer. It cannot be read here and is left out."""

    type: Literal["redacted_thinking"]


class LeftOutBlock(Object):
    """A call of a tool that only its maker's servers run, or its result. What the model made of it is in its text."""

    type: Literal[
        "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result",
        "bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result",
        "mcp_tool_use", "mcp_tool_result", "container_upload",
    ]  # fmt: skip


class ToolUseBlock(Object):
    """A tool call in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Arguments


def _wrap_text(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _or_text(block: Any) -> BeforeValidator:
    """Return a validator that also accepts a string in place of a list of such blocks."""
    return BeforeValidator(_wrap_text, json_schema_input_type=str | list[block])


_Text = Annotated[Object, OneOf("type", TextBlock)]
Texts = Annotated[list[_Text], Field(fail_fast=True), _or_text(_Text)]


class ToolReferenceBlock(Object):
    """The name of a tool that the client's search has found. The model has seen all tools from the beginning."""

    type: Literal["tool_reference"]
    tool_name: str


_Result = Annotated[Object, OneOf("type", TextBlock, ImageBlock, ToolReferenceBlock)]


class ToolResultBlock(Object):
    """The result of a tool call. `is_error` is ignored, because chat templates have no field for it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[_Result], Field(fail_fast=True), _or_text(_Result)] | None = None


_BILLING: Final = "x-anthropic-billing-header"  # Claude Code's first system block; it differs in each request


def _join_system(blocks: Sequence[Object] | None) -> str:
    """Return the system message without Claude Code's billing header.

    The header differs in each request, so with it no two prompts would share a prefix.
    """
    shown = (block for block in blocks or () if not (isinstance(block, TextBlock) and block.text.startswith(_BILLING)))
    return _join(list(shown))


def _join(blocks: Sequence[Object] | None) -> str:
    return "\n".join(block.text for block in blocks or () if isinstance(block, TextBlock))


def _join_parts(blocks: Sequence[Object] | None) -> Content:
    """Return the text of the blocks, or the parts of a message if there are images."""
    parts = []
    for block in blocks or ():
        if isinstance(block, TextBlock):
            parts.append(text_part(block.text))
        elif isinstance(block, ImageBlock):
            parts.append(block.as_part())
        elif isinstance(block, ToolReferenceBlock):
            parts.append(text_part(block.tool_name))
    return join_content(parts)


_UserBlock = Annotated[Object, OneOf("type", TextBlock, ImageBlock, ToolResultBlock)]
_AssistantBlock = Annotated[
    Object, OneOf("type", TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock, LeftOutBlock)
]


class UserMessage(Object):
    """A message from the user, with the results of tool calls."""

    role: Literal["user"]
    content: Annotated[list[_UserBlock], Field(fail_fast=True), _or_text(_UserBlock)]

    def for_template(self) -> Iterator[Json]:
        """Yield the results of tool calls, each as a `tool` message, and then the text."""
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _join_parts(block.content)}
        content = _join_parts(self.content)
        if content or not any(isinstance(block, ToolResultBlock) for block in self.content):
            yield {"role": "user", "content": content}


class AssistantMessage(Object):
    """An earlier answer. If this is the last message, the new answer continues its text."""

    role: Literal["assistant"]
    content: Annotated[list[_AssistantBlock], Field(fail_fast=True), _or_text(_AssistantBlock)]

    def for_template(self) -> Iterator[Json]:
        """Yield the message with its thinking and its tool calls."""
        thinking = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
            for block in self.content
            if isinstance(block, ToolUseBlock)
        ]
        message = {"role": "assistant", "content": _join(self.content)}
        if thinking:
            message["reasoning_content"] = "\n".join(thinking)
        yield message | ({"tool_calls": calls} if calls else {})


class SystemMessage(Object):
    """A system message within the conversation; it applies to what follows."""

    role: Literal["system"]
    content: Texts

    def for_template(self) -> Iterator[Json]:
        """Yield a system message at this place of the conversation."""
        yield {"role": "system", "content": _join_system(self.content)}


def _for_template(message: UserMessage | AssistantMessage | SystemMessage) -> list[Json]:
    return list(message.for_template())


_Message = Annotated[
    list[Json], OneOf("role", UserMessage, AssistantMessage, SystemMessage), AfterValidator(_for_template)
]


class MessagesTool(Object):
    """A tool that the model may call."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: Json
    strict: bool | None = None

    def as_function(self) -> Tool:
        """Return the tool as the chat API has it."""
        function = FunctionDefinition.model_construct(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool.model_construct(type="function", function=function)


class AnyToolChoice(Object):
    """Whether the model may call (`auto`), must call (`any`), or may not (`none`)."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedToolChoice(Object):
    """The tool that the model must call."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class ThinkingEnabled(Object):
    """The model thinks, with at most `budget_tokens` tokens."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31), INTEGRAL]


class ThinkingChoice(Object):
    """The model does not think (`disabled`, the default), or its chat template decides (`adaptive`)."""

    type: Literal["disabled", "adaptive"]


_Tool = Annotated[MessagesTool | LeftOutTool, OneOf("type", MessagesTool, default="custom", other=LeftOutTool)]
_CHOICES: Final[dict[str, Literal["auto", "required", "none"]]] = {"auto": "auto", "any": "required", "none": "none"}
_ToolChoice = Annotated[AnyToolChoice | NamedToolChoice, OneOf("type", AnyToolChoice, NamedToolChoice)]
_Thinking = Annotated[ThinkingEnabled | ThinkingChoice, OneOf("type", ThinkingEnabled, ThinkingChoice)]


class OutputFormat(Object):
    """A JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: Annotated[Json, Field(alias="schema")]


class OutputConfig(Object):
    """The format of the answer and the effort of thinking."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensRequest(ModelFields):
    """POST /v1/messages/count_tokens."""

    place = Place.MESSAGES

    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    """Messages of `user`, `assistant` and `system`, with text, images, thinking, tool calls and results of
    tool calls."""
    system: Texts | None = None
    """The system message."""
    tools: Annotated[list[_Tool], Field(max_length=TOOLS_MAX, fail_fast=True)] | None = None
    """Up to 128 functions that the model may call. Tools that Anthropic defines are left out and counted."""
    tool_choice: _ToolChoice | None = None
    """`auto` (the default if there are tools), `any`, `tool` or `none`. `disable_parallel_tool_use`: at most one
    call."""
    thinking: _Thinking | None = None
    """`enabled` with `budget_tokens`, `disabled` (the default), or `adaptive` (the chat template decides)."""
    output_format: OutputFormat | None = None
    """The former name of `output_config.format`."""
    output_config: OutputConfig | None = None
    """`format`: a JSON schema that the answer follows; `effort`: a variable for the chat template."""
    chat_template_kwargs: Json | None = None
    """Variables for the model's chat template. They take precedence over `thinking`."""

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        check_call_and_form(self.tool_use, self.own_forms())
        return self

    def own_forms(self) -> dict[str, Form]:
        """Return the form that the answer must have, by the name of the field that requires it."""
        named = {
            "output_config.format": self.output_config and self.output_config.format,
            "output_format": self.output_format,
        }
        return {name: Form("json", form.schema_) for name, form in named.items() if form}

    @property
    def tool_use(self) -> ToolUse:
        """Which tools the request offers and which it requires."""
        offered = [
            Offered(tool.as_function(), f"tools[{number}].function.parameters")
            for number, tool in enumerate(self.tools or ())
            if isinstance(tool, MessagesTool)
        ]
        return ToolUse.of(offered, self._choice, self._is_parallel)

    @property
    def _choice(self) -> Choice:
        choice = self.tool_choice
        if isinstance(choice, NamedToolChoice):
            return Choice("required", [choice.name])
        return Choice("auto" if choice is None else _CHOICES[choice.type])

    @property
    def ignored(self) -> int:
        """Number of fields and tools without an effect."""
        return super().ignored + count_left_out(self.tools)

    @property
    def _is_parallel(self) -> bool:
        return not (self.tool_choice and self.tool_choice.disable_parallel_tool_use)

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        check_images(self.conversation())
        return self

    def conversation(self) -> list[Json]:
        """Return the messages as the chat template receives them, the system message first."""
        text = _join_system(self.system)
        system = [{"role": "system", "content": text}] if text else []
        return system + [each for message in self.messages for each in message]

    def variables(self) -> Json:
        """Return the chat template's variables. Values in `chat_template_kwargs` take precedence.

        Templates of models with optional thinking read one of two variables, so both are set.
        """
        kind = self.thinking.type if self.thinking else "disabled"
        thinks = {} if kind == "adaptive" else dict.fromkeys(("enable_thinking", "thinking"), kind == "enabled")
        effort = self.output_config and self.output_config.effort
        return thinks | ({"reasoning_effort": effort} if effort else {}) | (self.chat_template_kwargs or {})


class MessagesRequest(CountTokensRequest, ChoosingFields):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31), INTEGRAL]
    """Maximum number of tokens of the answer."""
    stop_sequences: Stops = ()
    """Up to 16 texts, of at most 1,024 characters each, that end the answer and are not part of it."""

    def own_forms(self) -> dict[str, Form]:
        """Return the forms of Anthropic's fields and of this engine's extensions."""
        return self.forms()

    def forms(self) -> dict[str, Form]:
        """Return the form that the answer must have, by the name of the field that requires it; at most one."""
        return super().own_forms() | super().forms()
