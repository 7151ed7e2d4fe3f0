"""What clients may send: OpenAI's fields, vLLM's extra ones, and for what is not supported only its neutral value.

Unknown fields and wrong types are errors that name the field; nothing is ignored in silence but `user` and its
successors, which only label a request. Used by `completions` and `chat`. Pure.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

STOP_STRINGS_MAX = 16
STOP_CHARACTERS_MAX = 1024
TOP_LOGPROBS_MAX = 20
CHOICES_MAX = 128


def _only(*neutral: object) -> BeforeValidator:
    """A field that must have one of these values, or null: the feature is not supported."""

    def check(value: object) -> object:
        if value is None or any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral):
            return None
        allowed = ", ".join("null" if n is None else repr(n).lower().replace("'", '"') for n in (None, *neutral))
        raise PydanticCustomError("unsupported", f"is not supported by this engine; leave it out (or send {allowed})")

    return BeforeValidator(check)


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


def _parse_prompt(value: object) -> object:
    """A string, a list of strings, a list of token ids or a list of such lists -> a list of strings or id lists."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and value and (all(isinstance(p, str) for p in value) or all(map(_is_ids, value))):
        return value
    raise PydanticCustomError(
        "prompt", "must be a string, a list of strings, a list of token ids or a list of such lists, none of them empty"
    )


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(v) is int and 0 <= v < 2**31 for v in value)


Unsupported = Annotated[None, _only()]
IgnoredLabel = Annotated[str | None, Field(description="Accepted and ignored: it only labels the request.")]
# Every list stops at its first error: a client would make millions of them.
Prompts = Annotated[
    Annotated[list[str], Field(fail_fast=True)] | Annotated[list[list[int]], Field(fail_fast=True)],
    BeforeValidator(_parse_prompt),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(BaseModel):
    """How a stream ends."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: Annotated[None, _only(False)] = None


class SamplingFields(BaseModel):
    """What completions and chat have in common."""

    model_config = ConfigDict(extra="forbid", strict=True)
    prompt_field: ClassVar[str]  # the field that holds the prompt, whatever its form

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=CHOICES_MAX)] | None = 1
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = 0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_parse_stop)] = ()
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128, fail_fast=True)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = 0
    ignore_eos: bool | None = False
    user: IgnoredLabel = None
    safety_identifier: IgnoredLabel = None
    metadata: Annotated[None, _only({})] = None
    presence_penalty: Annotated[None, _only(0)] = None
    frequency_penalty: Annotated[None, _only(0)] = None
    repetition_penalty: Annotated[None, _only(1)] = None
    min_p: Annotated[None, _only(0)] = None
    logit_bias: Annotated[None, _only({})] = None
    best_of: Annotated[None, _only(1)] = None
    use_beam_search: Annotated[None, _only(False)] = None
    include_stop_str_in_output: Annotated[None, _only(False)] = None
    skip_special_tokens: Annotated[None, _only(True)] = None

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

    prompt_field = "prompt"

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    suffix: Annotated[None, _only("")] = None
    echo: Annotated[None, _only(False)] = None
    response_format: Annotated[None, _only({"type": "text"})] = None


def _parse_content(value: object) -> object:
    """A string, or text parts -> one string. Other parts (images, audio) are refused."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("content", "must be a string or a non-empty list of text parts")
    texts = []
    for number, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise PydanticCustomError(
                "content", f"part {number} is {kind!r}; this engine takes parts of type 'text' only"
            )
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise PydanticCustomError("content", f"part {number} must have a string `text`, and nothing else")
        texts.append(part["text"])
    return "\n".join(texts)


class ChatMessage(BaseModel):
    """One turn. Null fields, which clients send back from answers, are taken as absent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | None, BeforeValidator(_parse_content)] = None
    name: str | None = None
    refusal: Unsupported = None
    tool_calls: Annotated[None, _only([])] = None
    function_call: Unsupported = None
    audio: Unsupported = None
    annotations: Annotated[None, _only([])] = None

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

    prompt_field = "messages"

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    response_format: Annotated[None, _only({"type": "text"})] = None
    tools: Annotated[None, _only([])] = None
    tool_choice: Annotated[None, _only("none")] = None
    parallel_tool_calls: Annotated[None, _only(True, False)] = None
    functions: Annotated[None, _only([])] = None
    function_call: Annotated[None, _only("none")] = None
    modalities: Annotated[None, _only(["text"])] = None
    audio: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Annotated[None, _only("none")] = None
    verbosity: Annotated[None, _only("medium")] = None
    web_search_options: Unsupported = None
    store: Annotated[None, _only(False)] = None
    service_tier: Annotated[None, _only("auto", "default")] = None
    prompt_cache_key: IgnoredLabel = None
    add_generation_prompt: Annotated[None, _only(True)] = None

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs is only allowed when logprobs is true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise PydanticCustomError(
                "max_completion_tokens", "max_completion_tokens and max_tokens differ; send max_completion_tokens alone"
            )
        return self

    def max_tokens_field(self) -> str:
        """The newer name if the client uses it."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def top_logprobs_wanted(self) -> int | None:
        """Alternatives per token; None = no log probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None
