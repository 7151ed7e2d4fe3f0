"""The schemas of requests: the fields that act, with OpenAI's and vLLM's names. `fields` has those that do not.

A wrong value is an error that names the field; null is the same as no field. A field that nobody defines is ignored:
`ModelFields.ignored` counts those of the request itself. Used by `prepare` and `sampling_defaults`. Pure.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.fields import ROWS, Place, Row
from conveyor_engine.text.tokenizer import Side, Truncation
from conveyor_protocol.request_headers import LEVEL_MAX

STOP_STRINGS_MAX = 16
STOP_CHARACTERS_MAX = 1024
TOP_LOGPROBS_MAX = 20
CHOICES_MAX = 128
CACHE_SALT_CHARACTERS_MAX = 1024


def _parse_stop(value: object) -> object:
    """A string or a list of strings -> a tuple of strings."""
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or not all(isinstance(s, str) and 0 < len(s) <= STOP_CHARACTERS_MAX for s in stops):
        raise PydanticCustomError(
            "stop", f"must be a string or a list of strings of 1 to {STOP_CHARACTERS_MAX} characters"
        )
    if len(stops) > STOP_STRINGS_MAX:
        raise PydanticCustomError("stop", f"must be at most {STOP_STRINGS_MAX} strings, not {len(stops)}")
    return tuple(stops)


def _parse_prompt(value: object) -> list[Any]:
    """A string, a list of strings, a list of token ids or a list of such lists -> a list of strings or id lists."""
    if isinstance(value, str):
        return [value]
    if (ids := _read_ids(value)) is not None:
        return [ids]
    if isinstance(value, list) and value:
        if all(isinstance(prompt, str) for prompt in value):
            return value
        lists = list(map(_read_ids, value))
        if None not in lists:
            return lists
    raise PydanticCustomError(
        "prompt", "must be a string, a list of strings, a list of token ids or a list of such lists, none of them empty"
    )


def _parse_input(value: object) -> list[Any]:
    """As `_parse_prompt`; the empty text has no vector."""
    inputs = _parse_prompt(value)
    if "" in inputs:
        raise PydanticCustomError("input", "must not be an empty text")
    return inputs


def _read_ids(value: object) -> list[object] | None:
    """The token ids; None if it is no list of them."""
    if not isinstance(value, list) or not value:
        return None
    ids = value if all(type(v) is int for v in value) else list(map(_read_integer, value))
    return ids if all(type(v) is int and 0 <= v < 2**31 for v in ids) else None


def _read_integer(value: object) -> object:
    """5.0 is an integer in JSON Schema."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


# JSON Schema of what the parsers above accept, which pydantic cannot derive.
_STOP: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": STOP_CHARACTERS_MAX}
_IDS = _list_of({"type": "integer", "minimum": 0, "exclusiveMaximum": 2**31})

_TEXT = {"type": "string"}
_NOT_EMPTY = {"type": "string", "minLength": 1}

# A body may have millions of values: no list is copied once more, and each stops at its first error.
_Prompts = list[str] | list[list[int]]
Prompts = Annotated[
    _Prompts,
    PlainValidator(_parse_prompt),
    WithJsonSchema({"anyOf": [_TEXT, _list_of(_TEXT), _IDS, _list_of(_IDS)]}),
]
Inputs = Annotated[
    _Prompts,
    PlainValidator(_parse_input),
    WithJsonSchema({"anyOf": [_NOT_EMPTY, _list_of(_NOT_EMPTY), _IDS, _list_of(_IDS)]}),
]
Stops = Annotated[
    tuple[str, ...],
    BeforeValidator(_parse_stop),
    WithJsonSchema(
        {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": STOP_STRINGS_MAX}, {"type": "null"}]}
    ),
]
INTEGRAL = BeforeValidator(_read_integer)
TokenId = Annotated[int, Field(ge=0, lt=2**31), INTEGRAL]


class Object(BaseModel):
    """An object of the API: its own fields, those that `fields` accepts beside them, and others, which are ignored."""

    model_config = ConfigDict(extra="allow", strict=True, use_attribute_docstrings=True)
    place: ClassVar[Place | None] = None

    @classmethod
    def rows(cls) -> Mapping[str, Row]:
        """The fields of `fields` that such an object may have."""
        return {} if cls.place is None else ROWS[cls.place]

    @model_validator(mode="after")
    def _check_others(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            row = self.rows().get(name)
            if row is not None and (refusal := row.refusal(value)):
                error = InitErrorDetails(type=PydanticCustomError("unsupported", refusal), loc=(name,), input=value)
                raise ValidationError.from_exception_data(type(self).__name__, [error])
        return self


class StreamOptions(Object):
    """How a stream ends, and what each of its chunks tells."""

    place = Place.STREAM_OPTIONS

    include_usage: bool | None = None
    """A last chunk with the token counts of the whole answer."""
    continuous_usage_stats: bool | None = None
    """In each chunk the token counts of its choice so far, and the last chunk, unless `include_usage` is false."""

    def usage_wanted(self) -> tuple[bool, bool]:
        """At the end; in each chunk too. As vLLM has it: not in each chunk if not at the end."""
        each = bool(self.continuous_usage_stats)
        at_end = each if self.include_usage is None else self.include_usage
        return at_end, at_end and each


class ModelFields(Object):
    """What every request has."""

    model: str | None = None
    """The served name."""
    priority: Annotated[int, Field(ge=0, le=LEVEL_MAX), INTEGRAL] | None = None
    """The request's level: lower ones go first. A gateway's `X-Request-Level` wins over it."""

    @property
    def ignored(self) -> int:
        """How many of the request's fields nobody defines: perhaps an extension, perhaps a misspelt name."""
        return sum(name not in self.rows() for name in self.model_extra or ())


class PromptFields(ModelFields):
    """What every request has that brings text or tokens."""

    truncates: ClassVar[Side]  # the side, unless the request says another

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31), INTEGRAL] | None = None
    """Cut each prompt to so many tokens; -1 to as many as the model's context leaves."""
    truncation_side: Side | None = None
    """Where it is cut. Unless this says otherwise, the end of an input to embed and the beginning of a prompt go."""

    def truncation(self, room: int) -> Truncation | None:
        """How prompts are cut if `room` tokens are free for each; without room they are too long, cut or not.

        Raises InvalidRequest.
        """
        wanted = self.truncate_prompt_tokens
        if wanted is None or room < 1:
            return None
        if wanted > room:
            most = f"must be at most {room}, the tokens that this model's context leaves for the prompt"
            raise InvalidRequest(f"truncate_prompt_tokens {most}, not {wanted}", param="truncate_prompt_tokens")
        return Truncation(room if wanted < 0 else wanted, self.truncation_side or self.truncates)


class EmbeddingRequest(PromptFields):
    """POST /v1/embeddings."""

    place = Place.EMBEDDINGS
    truncates = "right"

    input: Inputs
    """A text, token ids, or a list of either: each is embedded by itself. No text may be empty."""
    encoding_format: Literal["float", "base64"] | None = "float"
    """Numbers, or the bytes of float32, little-endian, in base64."""
    dimensions: Annotated[int, Field(ge=1, lt=2**31), INTEGRAL] | None = None
    """Only so many dimensions, the first ones, of a model that was trained for it."""


class SamplingFields(PromptFields):
    """What completions and chat have in common."""

    prompt_field: ClassVar[str]  # the field that holds the prompt, whatever its form
    truncates = "left"

    stream: bool | None = False
    """The answer as server-sent events."""
    stream_options: StreamOptions | None = None
    """Of a stream only."""
    n: Annotated[int, Field(ge=1, le=CHOICES_MAX), INTEGRAL] | None = 1
    """Choices for each prompt."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Only the likeliest tokens that together have this probability."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31), INTEGRAL] | None = None
    """Only this many of the likeliest tokens; 0 and -1 are all."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64), INTEGRAL] | None = None
    """Makes the choice of tokens repeatable."""
    stop: Stops = ()
    """A string or a list of up to 16, of at most 1,024 characters each; what ends the answer is no part of it."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128, fail_fast=True)] | None = None
    """Up to 128 tokens that end the answer."""
    max_tokens: Annotated[int, Field(ge=1, lt=2**31), INTEGRAL] | None = None
    """The longest answer. Without it a completion has 16 tokens, a chat what the context leaves."""
    min_tokens: Annotated[int, Field(ge=0, lt=2**31), INTEGRAL] | None = 0
    """No end before so many tokens."""
    ignore_eos: bool | None = False
    """Go on past the model's end-of-sequence token."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=CACHE_SALT_CHARACTERS_MAX)] | None = None
    """Share cached prefixes only with requests of the same salt; `usage` then tells how many tokens were cached."""

    @model_validator(mode="after")
    def _check_together(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is only allowed when stream is true")
        return self

    def choices_per_prompt(self) -> int:
        """`n`."""
        return self.n or 1

    def max_tokens_field(self) -> str:
        """The name by which the client limits the answer."""
        return "max_tokens"


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    place = Place.COMPLETIONS
    prompt_field = "prompt"

    prompt: Prompts
    """A text, token ids, or a list of either."""
    logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX), INTEGRAL] | None = None
    """Log probabilities of the tokens and of so many alternatives."""


def _parse_content(value: object) -> object:
    """A string, or text parts -> one string. Other parts (images, audio) are refused, a part's other fields ignored."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("content", "must be a string or a non-empty list of text parts")
    return "\n".join(_parse_part(number, part) for number, part in enumerate(value))


def _parse_part(number: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part, dict):
        raise PydanticCustomError("content", f"part {number} is {kind!r}; this engine takes parts of type 'text' only")
    if not isinstance(part.get("text"), str):
        raise PydanticCustomError("content", f"part {number} must have a string `text`")
    text: str = part["text"]
    return text


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Content = Annotated[
    str | None,
    BeforeValidator(_parse_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, _list_of(_PART)]}),
]


class ChatMessage(Object):
    """One turn. Null fields, which clients send back from answers, are taken as absent."""

    place = Place.MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    """`developer` is given to the chat template as `system`."""
    content: Content = None
    """A string, or parts `{"type": "text", "text": ...}`."""
    name: str | None = None
    """For chat templates that show it."""

    @model_validator(mode="after")
    def _check_content(self) -> "ChatMessage":
        if self.content is None:
            raise PydanticCustomError("content", "content is missing")
        return self

    def for_template(self) -> dict[str, str]:
        """What a chat template sees; templates of today know `system`, not its new name."""
        role = "system" if self.role == "developer" else self.role
        fields = {"role": role, "content": self.content, "name": self.name}
        return {key: value for key, value in fields.items() if value is not None}


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    place = Place.CHAT
    prompt_field = "messages"

    messages: Annotated[
        list[Annotated[ChatMessage, AfterValidator(ChatMessage.for_template)]], Field(min_length=1, fail_fast=True)
    ]
    """The conversation."""
    logprobs: bool | None = False
    """Log probabilities of the answer's tokens."""
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX), INTEGRAL] | None = None
    """So many alternatives of each token."""
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31), INTEGRAL] | None = None
    """The newer name of `max_tokens`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template, as `{"enable_thinking": false}`."""

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs is only allowed when logprobs is true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise PydanticCustomError(
                "max_completion_tokens", "max_completion_tokens and max_tokens differ; send max_completion_tokens alone"
            )
        return self

    def messages_for_template(self) -> list[dict[str, str]]:
        """What each message became as it was checked: a ChatMessage takes four times as much memory."""
        return cast(list[dict[str, str]], self.messages)

    def max_tokens_field(self) -> str:
        """The newer name if the client uses it."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def top_logprobs_wanted(self) -> int | None:
        """Alternatives per token; None = no log probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None
