"""The schema of /v1/chat/completions and its messages. Used by `prepare`. Pure."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Final, Literal, cast

from pydantic import AfterValidator, Field, PlainValidator, ValidationInfo, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from conveyor_engine.serving.preparing.content import check_images, join_content, read_image_url, text_part
from conveyor_engine.serving.preparing.costly_forms import FORM_FIELDS
from conveyor_engine.serving.preparing.fields import Place
from conveyor_engine.serving.preparing.schemas import Object, SamplingFields
from conveyor_engine.serving.preparing.structured import Form
from conveyor_engine.serving.preparing.tool_use import Choice, ToolUse, offer
from conveyor_engine.serving.preparing.tools import (
    AnyEarlierCall,
    EarlierCall,
    EarlierCustomCall,
    ToolChoice,
    Tools,
    count_left_out,
)
from conveyor_engine.serving.preparing.values import INTEGRAL, Alternatives
from conveyor_engine.text.chat_template import Rendering

_TEXT: Final = ("text",)
_ANSWER_TEXTS: Final = ("text", "refusal", "thinking")  # their text is in a field of the same name


def _parse_content(value: object, info: ValidationInfo) -> object:
    """Return the content of a message. Only the assistant's messages have parts of its answers."""
    return _join_parts(value, _ANSWER_TEXTS if info.data.get("role") == "assistant" else _TEXT)


def _join_parts(value: object, texts: Sequence[str]) -> object:
    """Return one string for a string or a list of text parts, and the parts if some are images.

    texts: the types of parts that are allowed beside images. Raises PydanticCustomError for other parts, such as audio.
    Ignores a part's other fields.
    """
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or a list of parts")
    parts = [_parse_part(number, part, texts) for number, part in enumerate(value)]
    return join_content([part for part in parts if part["type"] != "thinking"])


def _parse_part(number: int, part: Any, texts: Sequence[str]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind == "image_url" and isinstance(part, dict):
        return read_image_url(part.get("image_url"))
    if kind not in texts or not isinstance(part, dict):
        takes = "this engine takes parts of type 'text' and 'image_url' only"
        raise PydanticCustomError("content", f"part {number} is {kind!r}; {takes}")
    if not isinstance(part.get(kind), str):
        raise PydanticCustomError("content", f"part {number} must have a string `{kind}`")
    return part if kind == "thinking" else text_part(part[kind])


def _describe_part(kind: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, kind: {"type": "string"}},
        "required": ["type", kind],
    }


_PARTS = [_describe_part(kind) for kind in _ANSWER_TEXTS]
_URL = {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]}
_IMAGE = {
    "type": "object",
    "properties": {"type": {"const": "image_url"}, "image_url": {"anyOf": [_URL, {"type": "string"}]}},
    "required": ["type", "image_url"],
}
Content = Annotated[
    str | list[dict[str, Any]] | None,
    PlainValidator(_parse_content),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [*_PARTS, _IMAGE]}}, {"type": "null"}]}
    ),
]


def _check_images(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    check_images(messages)
    return messages


def _parse_text(value: object) -> str:
    """Return the text of a string or a list of text parts. Raises PydanticCustomError for anything else."""
    if not isinstance(text := _join_parts(value, _TEXT), str):
        raise PydanticCustomError("content", "must be a string or a list of parts of type 'text'")
    return text


TEMPLATE_ROLES = ("system", "user", "assistant", "tool")
_ROLES = {"developer": "system", "function": "tool"}  # as current templates name them
EMPTY_ROLES = ("assistant", "tool", "function")  # whose messages may have no content


class ChatMessage(Object):
    """One turn of a conversation. A null field counts as absent, because clients send responses back with nulls."""

    place = Place.MESSAGE

    role: Annotated[str, Field(pattern="^[A-Za-z][A-Za-z0-9_-]{0,63}$")]
    """Who speaks: `system`, `developer`, `user`, `assistant`, `tool`, or a role that the model's chat template shows.

    The template receives `developer` as `system`, and `function` as `tool`."""
    content: Content = None
    """A string, or parts `{"type": "text", "text": ...}` and `{"type": "image_url", "image_url": {"url": ...}}`, where
    the URL has the data itself (`data:image/png;base64,...`), or is of a host in the engine's setting `media_hosts`.
    Messages of the assistant and of tools may have none. In the assistant's, a part `refusal` is a text, and a part
    `thinking` counts as `reasoning`."""
    refusal: str | None = None
    """The assistant's refusal: its text, if the message has no content."""
    name: str | None = None
    """For chat templates that use it."""
    tool_calls: list[AnyEarlierCall] | None = None
    """The assistant's calls; a message with calls needs no content."""
    reasoning_content: str | None = None
    """The assistant's thinking, for chat templates that use it."""
    reasoning: str | None = None
    """The newer name of `reasoning_content`."""
    tool_call_id: str | None = None
    """For a `tool` message: the id of the call whose result this message contains."""

    @model_validator(mode="before")
    @classmethod
    def _take_thinking(cls, message: Any) -> Any:
        """Return the assistant's message with the thinking among the parts of its content as `reasoning`."""
        if not isinstance(message, dict) or message.get("role") != "assistant":
            return message
        parts = content if isinstance(content := message.get("content"), list) else ()
        found = [part.get("thinking") for part in parts if isinstance(part, dict) and part.get("type") == "thinking"]
        thinking = "\n".join(text for text in found if isinstance(text, str))
        return message | {"reasoning": message.get("reasoning") or thinking} if thinking else message

    @model_validator(mode="after")
    def _check_content(self) -> "ChatMessage":
        if self.content is None and self.role not in EMPTY_ROLES:
            raise PydanticCustomError("content", "content is missing")
        return self

    @property
    def calls(self) -> Sequence[EarlierCall | EarlierCustomCall]:
        """Return the message's tool calls; empty unless the assistant wrote the message."""
        return (self.tool_calls or ()) if self.role == "assistant" else ()

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates receive it.

        gpt-oss's template reads `thinking`, and refuses it beside a text and calls.
        """
        reasoning = self.reasoning_content or self.reasoning or None
        fields = {
            "role": _ROLES.get(self.role, self.role),
            "content": self.content or self.refusal or "",
            "name": self.name,
            "reasoning_content": reasoning,
            "thinking": None if self.content and self.calls else reasoning,
            "tool_calls": [call.for_template() for call in self.calls] or None,
            "tool_call_id": self.tool_call_id,
        }
        return {key: value for key, value in fields.items() if value is not None}


Messages = Annotated[
    list[Annotated[ChatMessage, AfterValidator(ChatMessage.for_template)]],
    Field(min_length=1, fail_fast=True),
    AfterValidator(_check_images),
]


def check_call_and_form(use: ToolUse, forms: Mapping[str, Form]) -> None:
    """Raise PydanticCustomError if a request requires both a tool call and a form for the answer.

    A text format of OpenAI's or Anthropic's API (`response_format`, `text.format`, `output_config.format`) may be
    combined with a required call: the format applies to text, and a call contains none.
    """
    if use.choice == "required" and (field := next(filter(FORM_FIELDS.__contains__, forms), None)):
        raise PydanticCustomError("tool_choice", f"tool_choice requires a call and {field} a format; send only one")


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatReasoning(Object):
    """How much the model thinks, in the words of SGLang and of other APIs' routers."""

    effort: Effort | None = None


class PredictedOutput(Object):
    """A text that the client expects as a large part of the answer, such as the file that the model edits."""

    type: Literal["content"]
    content: Annotated[
        str,
        PlainValidator(_parse_text),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _describe_part("text")}]}),
    ]


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    place = Place.CHAT
    prompt_field = "messages"

    messages: Messages
    """The conversation."""
    logprobs: bool | None = False
    """True: return log probabilities of the answer's tokens."""
    top_logprobs: Alternatives | None = None
    """Number of alternatives for each token."""
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31), INTEGRAL] | None = None
    """The newer name of `max_tokens`, over which it takes precedence."""
    add_generation_prompt: bool | None = None
    """False: the prompt does not begin the assistant's turn."""
    continue_final_message: bool | None = False
    """True: the answer continues the last message, without a new turn."""
    echo: bool | None = False
    """True: an answer that continues the last message begins with that message."""
    documents: list[dict[str, Any]] | None = None
    """For chat templates that use documents."""
    tools: Tools | None = None
    """Up to 128 functions and custom tools that the model may call. Other kinds are left out and counted."""
    tool_choice: ToolChoice = None
    """`auto` (the default if there are tools), `none`, `required`, the tool that the model must call, or
    `allowed_tools`."""
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    reasoning_effort: Effort | None = None
    """A variable for the chat template; `none` also sets the variable `enable_thinking` to false."""
    reasoning: ChatReasoning | None = None
    """`effort`: as `reasoning_effort`, which takes precedence. Its other fields have no effect."""
    thinking_token_budget: Annotated[int, Field(ge=-1, lt=2**31), INTEGRAL] | None = None
    """Maximum number of tokens of thinking; -1: no limit. The model's template must support thinking."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template, such as `{"enable_thinking": false}`."""
    prediction: PredictedOutput | None = None
    """Drafts of the answer's tokens. They do not change the answer. Only services with `speculation: {method: NGram}`
    use them."""
    include_reasoning: bool | None = None
    """False: the answer omits the model's thinking. The tokens of the thinking still count."""

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs is only allowed when logprobs is true")
        if self.add_generation_prompt and self.continue_final_message:
            raise PydanticCustomError(
                "add_generation_prompt", "add_generation_prompt and continue_final_message exclude each other; send one"
            )
        check_call_and_form(self.tool_use, self.forms())
        return self

    @cached_property
    def tool_use(self) -> ToolUse:
        """Which tools the request offers and which it requires."""
        return ToolUse.of(offer(self.tools), Choice.of(self.tool_choice), self.parallel_tool_calls)

    @property
    def ignored(self) -> int:
        """Number of fields and tools without an effect."""
        return super().ignored + count_left_out(self.tools)

    def rendering(self) -> Rendering:
        """Return the options with which the chat template renders the messages."""
        continues = bool(self.continue_final_message)
        begins = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        return Rendering(begins, continues, self.documents, self.tool_use.for_template())

    def variables(self) -> dict[str, Any]:
        """Return the template's variables. Values in `chat_template_kwargs` take precedence."""
        effort = self.reasoning_effort or (self.reasoning.effort if self.reasoning else None)
        variables = {} if effort is None else {"reasoning_effort": effort}
        thinking = {"enable_thinking": False} if effort == "none" else {}
        return {**variables, **thinking, **(self.chat_template_kwargs or {})}

    def messages_for_template(self) -> list[dict[str, Any]]:
        """Return the messages as dicts.

        Validation converts each message to a dict, because a ChatMessage takes four times as much memory.
        """
        return cast(list[dict[str, Any]], self.messages)

    def continued_text(self) -> str:
        """Return the text that the answer repeats before its own text; empty without `echo`."""
        return str(self.messages_for_template()[-1]["content"]) if self.echo and self.continue_final_message else ""

    def max_tokens_field(self) -> str:
        """Return the name of the field that limits the answer: the newer name if the client sends it."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def top_logprobs_wanted(self) -> int | None:
        """Return the number of alternatives for each token; None: the response has no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None
